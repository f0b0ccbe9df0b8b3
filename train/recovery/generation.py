"""Generations: which processes are the ranks now, and the keys by which they learn of it. No torch here.

Generation 0 is the start of an attempt. After a fault the supervisor has its store server
(zslurm/job/in_memory/store_server.py) publish the next one: the members in the order of their ranks, and the ranks
whose process is another one than before. Everything between the server and the processes is a key of its store.
The keys begin with a secret of the attempt: who merely reaches the port can neither lose ranks nor move them:

    newest          number of the newest generation                       server
    generation/N    the generation, as JSON                               server, before `newest`
    here/N/R        rank R has left its collectives, and is ready         each member of N
    arrived/N       how many members of N are ready                       each of them adds 1
    met/N           empty: all members of N are ready; else why there     the last of them; the server,
                    is nothing to wait for any more if N is over before
    result/N        how it ended, as JSON: the first answer counts        rank 0, or who failed
    move/N          generation N is to follow at a step's boundary        server; the ranks are all alive
    held/N          how many ranks hold at that boundary, copied whole    each rank adds 1
    boundary/N      the step at which all of them hold                    the last of them; then comes generation N
    unmoved/N       ranks have held for generation N in vain, and train on    whoever finds that first
    warm            how many warm processes have registered               each of them adds 1
    warm/I          the member's name of the I-th one, from 1             that process
    facts           what the ranks agreed on at the start, as JSON        rank 0 of generation 0
    off             why these ranks cannot be recovered in memory         rank 0 of generation 0
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

RECOVERY_VARIABLE = "ZSLURM_RECOVERY"
"""Environment variable of ranks and warm processes: `aegis.recovery` where there is a store server for them."""

RECOVERING = frozenset({"auto", "memory"})
"""Its values with which a store server is there."""

SECRET_VARIABLE = "ZSLURM_STORE_SECRET"
"""Environment variable of ranks and warm processes with the secret that all keys of their recovery begin with."""

MEMBER_VARIABLE = "ZSLURM_MEMBER"
"""Environment variable with the name of a process among the members, NODE/SLOT."""

PREFIX = "zslurm/recovery/"
NEWEST = PREFIX + "newest"
WARM = PREFIX + "warm"
FACTS = PREFIX + "facts"
OFF = PREFIX + "off"


NEW = -1
"""The former rank of a process that had none: the number of ranks grows by it."""


def member_name(node: str, slot: int | str) -> str:
    """Return the name of a process among the members; the slot is a local rank, or `w` and a number."""
    return f"{node}/{slot}"


def node_of(member: str) -> str:
    """Return the node of a member."""
    return member.rpartition("/")[0]


def generation_key(number: int) -> str:
    """Return the key of a generation."""
    return f"{PREFIX}generation/{number}"


def here_key(number: int, rank: int) -> str:
    """Return the key under which a rank reports that it is ready to regroup."""
    return f"{PREFIX}here/{number}/{rank}"


def arrived_key(number: int) -> str:
    """Return the key that counts the members of a generation that are ready."""
    return f"{PREFIX}arrived/{number}"


def met_key(number: int) -> str:
    """Return the key that ends the members' wait for each other: empty if all are ready."""
    return f"{PREFIX}met/{number}"


def result_key(number: int) -> str:
    """Return the key under which the outcome of a generation is reported."""
    return f"{PREFIX}result/{number}"


def move_key(number: int) -> str:
    """Return the key by which the ranks learn that a generation is to follow at a step's boundary."""
    return f"{PREFIX}move/{number}"


def held_key(number: int) -> str:
    """Return the key that counts the ranks that hold for a generation."""
    return f"{PREFIX}held/{number}"


def boundary_key(number: int) -> str:
    """Return the key with the step at which all ranks hold for a generation."""
    return f"{PREFIX}boundary/{number}"


def unmoved_key(number: int) -> str:
    """Return the key by which a rank reports that it has held for a generation in vain."""
    return f"{PREFIX}unmoved/{number}"


def warm_key(index: int) -> str:
    """Return the key under which the index-th warm process, from 1, leaves its name."""
    return f"{WARM}/{index}"


@dataclass(frozen=True)
class Generation:
    """Who the ranks are.

    Attributes:
        number: counts from 0, the start of the attempt.
        members: the processes by rank.
        lost: ranks whose process is another one than in the generation before.
        former: if the number of ranks changes, the rank that each member had before, or NEW; else empty.
        former_size: how many ranks there were before; 0 if their number stays.
        deadline_s: seconds after which a recovery that is not complete has failed.
        left: nodes that the ranks leave as planned: processes there that are no members end in order.
    """

    number: int
    members: tuple[str, ...]
    lost: tuple[int, ...] = ()
    deadline_s: float = 10.0
    former: tuple[int, ...] = ()
    former_size: int = 0
    left: tuple[str, ...] = ()

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Generation:
        """Read a generation from the fields of a JSON object.

        Raises:
            ValueError: naming what is wrong.
        """
        try:
            number, deadline_s = int(fields["number"]), float(fields.get("deadline_s", 10.0))
            members = tuple(str(name) for name in fields["members"])
            lost = tuple(sorted({int(rank) for rank in fields.get("lost", ())}))
            former = tuple(int(rank) for rank in fields.get("former", ()))
            former_size = int(fields.get("former_size", 0))
            former_nodes = tuple(str(node) for node in fields.get("left", ()))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"a generation needs number, members and lost; {error!r} is wrong") from error
        if not members or len(set(members)) != len(members):
            raise ValueError("members must be names, each once")
        if any(not 0 <= rank < len(members) for rank in lost):
            raise ValueError(f"lost must be ranks below {len(members)}, the number of members")
        had_one = [rank for rank in former if rank != NEW]
        if former and not (len(former) == len(members) and len(set(had_one)) == len(had_one) > 0):
            raise ValueError("former must be another rank for each member, or -1")
        if not set(had_one) <= set(range(former_size)):
            raise ValueError("former must be ranks below former_size")
        return cls(number, members, lost, deadline_s, former, former_size, former_nodes)

    @classmethod
    def of_json(cls, text: str | bytes) -> Generation:
        """Read what `to_json` returned.

        Raises:
            ValueError: it is none.
        """
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ValueError("a generation is a JSON object")
        return cls.of(fields)

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))

    @property
    def resizes(self) -> bool:
        """Whether there is another number of ranks than before."""
        return bool(self.former)

    @property
    def grows(self) -> bool:
        """Whether processes join that take no rank's place."""
        return NEW in self.former

    def rank_of(self, member: str) -> int | None:
        """Return the rank of a process; None if it is not a member."""
        return self.members.index(member) if member in self.members else None

    def leaves(self, member: str) -> bool:
        """Return whether a process is on a node that the ranks leave as planned, and is no rank any more."""
        return node_of(member) in self.left and self.rank_of(member) is None


def buddy_of(rank: int, size: int, per_node: int) -> int | None:
    """Return the rank that keeps the copy of `rank`; None if there is no other one.

    It is at the same place on the next node, so that copies stay on their rail; on one node it is the next rank.
    """
    if size == 1:
        return None
    return (rank + (per_node if per_node < size else 1)) % size


def ward_of(rank: int, size: int, per_node: int) -> int | None:
    """Return the rank whose copy `rank` keeps; the inverse of `buddy_of`."""
    if size == 1:
        return None
    return (rank - (per_node if per_node < size else 1)) % size


def recovered(number: int, step: int, rolled_back: int, seconds: float) -> dict[str, Any]:
    """Return the event of a generation that trains: `step` steps are done, `rolled_back` were done before."""
    return {
        "event": "recovered", "number": number, "step": step, "rolled_back": rolled_back,
        "seconds": round(seconds, 4),
    }  # fmt: skip


def failed(number: int, rank: int | None, reason: str) -> dict[str, Any]:
    """Return the event of a generation that does not come about: the next rung of the ladder is taken."""
    return {"event": "failed", "number": number, "rank": rank, "reason": reason}
