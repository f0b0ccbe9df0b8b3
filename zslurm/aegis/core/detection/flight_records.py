"""What the flight recorders of torch show of a hang: which rank the others wait for in a collective operation.

torch keeps the last operations of each process group and dumps them as one file for each rank (a pickle or JSON;
docs.pytorch.org, "Flight Recorder"). Each operation has a number in its group, the same on all members. From the
dumps of all ranks follows, in this order:

- **mismatched**: members called different operations, or with different sizes, under one number;
- **stuck**: a rank has not finished an operation that another member has: its device hangs, not its program;
- **missing**: a rank has not called an operation in which others wait, and waits in none, or it left no dump;
- **behind**: if all wait for each other, those that are missing in the oldest operation of all.

Pure: it reads no file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

How = Literal["mismatched", "stuck", "missing", "behind"]

_SAME_SIZES = ("all_reduce", "broadcast", "_all_gather_base", "_allgather_base", "_reduce_scatter_base", "barrier")
"""Operations in which every member has the same sizes; others may differ from rank to rank."""


@dataclass(frozen=True)
class Group:
    """A process group: its name is the same on all members, but not on all ranks of the run."""

    name: str
    ranks: tuple[int, ...]
    description: str = ""


@dataclass(frozen=True)
class RecordedOperation:
    """A collective operation as one rank has recorded it.

    Attributes:
        group: in which it is.
        number: in its group, from 1.
        name: without the backend: `all_reduce`.
        sizes: of its inputs.
        dtypes: of these.
        created: UNIX seconds.
        finished: it is done on this rank.
    """

    group: Group
    number: int
    name: str
    sizes: tuple[Any, ...]
    dtypes: tuple[str, ...]
    created: float
    finished: bool


@dataclass(frozen=True)
class Culprits:
    """Ranks for which the others wait.

    Attributes:
        how: how they differ from the others.
        ranks: which.
        operation: in which the others wait, or they themselves.
    """

    how: How
    ranks: tuple[int, ...]
    operation: RecordedOperation

    @property
    def where(self) -> str:
        """The operation, as a part of a sentence."""
        name = self.operation.group.description or f"group {self.operation.group.name}"
        return f"{self.operation.name} {self.operation.number} of {name}"


def operations_of(trace: Any) -> list[RecordedOperation]:
    """Return the collective operations in the dump of one rank, those between two ranks left out.

    Raises:
        ValueError: it is no dump of a flight recorder.
    """
    try:
        config = trace["pg_config"]
        groups = {name: _group(str(name), body) for name, body in config.items()}
        return [_operation(entry, groups) for entry in trace.get("entries", ()) if not entry.get("is_p2p")]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ValueError(f"it is no dump of a flight recorder: {error!r}") from error


def _group(name: str, body: Mapping[str, Any]) -> Group:
    ranks = json.loads(body["ranks"]) if isinstance(body["ranks"], str) else body["ranks"]
    return Group(name, tuple(sorted(int(rank) for rank in ranks)), str(body.get("desc", "")))


def _operation(entry: Mapping[str, Any], groups: Mapping[Any, Group]) -> RecordedOperation:
    name, description = map(str, entry["process_group"][:2])
    # torch 2.13 gives the first group of gloo no name in `pg_config`, and "0" in its operations.
    group = groups.get(name) or Group(name, groups[""].ranks if name == "0" and "" in groups else (), description)
    done = (
        entry.get("state") == "completed"
        or bool(entry.get("retired"))
        or entry.get("time_discovered_completed_ns") is not None
    )
    return RecordedOperation(
        group
        if group.description
        else Group(group.name, group.ranks, str(description or entry["process_group"][1])),
        int(entry["collective_seq_id"]),
        str(entry.get("profiling_name", "?")).rpartition(":")[2],
        tuple(_frozen(size) for size in entry.get("input_sizes", ())),
        tuple(str(dtype) for dtype in entry.get("input_dtypes", ())),
        int(entry.get("time_created_ns", 0)) / 1e9,
        done,
    )


def _frozen(size: Any) -> Any:
    return tuple(_frozen(item) for item in size) if isinstance(size, list | tuple) else size


def find_culprits(
    operations: Mapping[int, Sequence[RecordedOperation]], unread: Iterable[int] = ()
) -> list[Culprits]:
    """Return the ranks that hold the others up; none if no rank waits, or no rank differs from another.

    Args:
        operations: of each rank that left a dump.
        unread: ranks whose dump could not be read: nothing is known of them.
    """
    latest_calls = {rank: _latest(called) for rank, called in operations.items()}
    pending: dict[tuple[Group, int], dict[int, RecordedOperation]] = {}
    for rank, called in operations.items():
        for operation in called:
            if not operation.finished:
                pending.setdefault((operation.group, operation.number), {})[rank] = operation
    waiting = {rank for by_rank in pending.values() for rank in by_rank}
    oldest_first = sorted(pending.items(), key=lambda item: min(call.created for call in item[1].values()))

    odd = [culprits for operation_key, _ in oldest_first if (culprits := _mismatched(operation_key, operations))]
    culprits_found = odd or _stuck(oldest_first, operations)
    if culprits_found:
        return culprits_found
    unknown, seen = set(unread), set[int]()
    behind: list[Culprits] = []
    for (group, number), by_rank in oldest_first:
        absent = [
            rank
            for rank in group.ranks
            if rank not in by_rank and rank not in unknown and latest_calls.get(rank, {}).get(group, -1) < number
        ]
        operation = next(iter(by_rank.values()))
        if missing := tuple(rank for rank in absent if rank not in waiting and rank not in seen):
            seen.update(missing)
            culprits_found.append(Culprits("missing", missing, operation))
        elif absent and not behind:
            behind.append(Culprits("behind", tuple(absent), operation))
    return culprits_found or behind


def _latest(found: Iterable[RecordedOperation]) -> dict[Group, int]:
    """Return the number of the newest operation of each group."""
    latest: dict[Group, int] = {}
    for operation in found:
        latest[operation.group] = max(operation.number, latest.get(operation.group, -1))
    return latest


def _mismatched(
    place: tuple[Group, int], operations: Mapping[int, Sequence[RecordedOperation]]
) -> Culprits | None:
    """Return the minority of the members that called something else under this number."""
    group, number = place
    called = {
        rank: operation
        for rank, recorded in operations.items()
        for operation in recorded
        if operation.group == group and operation.number == number
    }
    kinds = {rank: _kind(operation) for rank, operation in called.items()}
    usual, count = Counter(kinds.values()).most_common(1)[0]
    if count == len(kinds):
        return None
    if 2 * count == len(kinds):  # no majority: that of the lowest rank counts as usual
        usual = kinds[min(kinds)]
    odd = tuple(rank for rank, kind in kinds.items() if kind != usual)
    return Culprits("mismatched", odd, next(called[rank] for rank in called if kinds[rank] == usual))


def _kind(operation: RecordedOperation) -> tuple[Any, ...]:
    sizes = operation.sizes if operation.name in _SAME_SIZES else ()
    return operation.name, operation.dtypes, sizes


def _stuck(
    oldest_first: Sequence[tuple[tuple[Group, int], Mapping[int, RecordedOperation]]],
    operations: Mapping[int, Sequence[RecordedOperation]],
) -> list[Culprits]:
    """Return ranks that have not finished what other members have."""
    first_pending: dict[tuple[int, Group], int] = {}
    for (group, number), by_rank in oldest_first:
        for rank in by_rank:
            key = (rank, group)
            first_pending[key] = min(number, first_pending.get(key, number))
    stuck: list[Culprits] = []
    seen: set[int] = set()
    for (group, number), by_rank in oldest_first:
        passed = [
            rank
            for rank in group.ranks
            if rank not in by_rank
            and (
                first_pending.get((rank, group), -1) > number or _finished(operations.get(rank, ()), group, number)
            )
        ]
        if passed and (fresh := tuple(rank for rank in by_rank if rank not in seen)):
            seen.update(fresh)
            stuck.append(Culprits("stuck", fresh, by_rank[fresh[0]]))
    return stuck


def _finished(found: Iterable[RecordedOperation], group: Group, number: int) -> bool:
    return any(call.finished and call.group == group and call.number >= number for call in found)
