"""For which rank the others wait, by the dumps of their flight recorders.

The shapes are those of public dumps with known culprits (nvidia-resiliency-ext, tests/attribution/unit/fr_traces:
sixteen ranks, a GPU error or a locked interpreter on two of them), and of torch's own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.aegis.core.detection import torch_dumps
from tests.waiting import DEADLINE_S
from zslurm.aegis.core.detection.flight_records import find_culprits, operations_of
from zslurm.core.plain_pickle import loads_plain

EXPERTS, PAIR, WORLD = "71", "35", "0"
RANKS = 4


class Recorders:
    """The flight recorders of four ranks: all in two groups, and two in a group without the others."""

    def __init__(self, *, description: bool = True) -> None:
        self._groups = {WORLD: [0, 1, 2, 3], EXPERTS: [0, 1, 2, 3], PAIR: [2, 3]}
        self._entries: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(RANKS)}
        self._describe = description
        self._time = 0

    def call(
        self, group: str, number: int, ranks: Sequence[int], *, done: Sequence[int] = (), **more: Any
    ) -> None:
        """These ranks call an operation; it is done on some of them."""
        self._time += 1_000_000_000
        for rank in ranks:
            state = {"state": "completed" if rank in done else "scheduled", "retired": rank in done}
            entry = {
                "process_group": [group, f"group {group}"], "collective_seq_id": number, "is_p2p": False,
                "profiling_name": "nccl:all_reduce", "input_sizes": [[4, 5]], "input_dtypes": ["BFloat16"],
                "time_created_ns": self._time, "time_discovered_completed_ns": None,
            }  # fmt: skip
            self._entries[rank].append(entry | state | more)

    def dump(self, rank: int) -> dict[str, Any]:
        mine = {
            name: {"name": name, "desc": f"group {name}" if self._describe else "", "ranks": json.dumps(ranks)}
            for name, ranks in self._groups.items()
            if rank in ranks
        }
        return {"version": "2.10", "pg_config": mine, "entries": self._entries[rank]}

    def culprits(
        self, *, without: Sequence[int] = (), unread: Sequence[int] = ()
    ) -> list[tuple[str, tuple[int, ...]]]:
        dumps = {rank: self.dump(rank) for rank in range(RANKS) if rank not in (*without, *unread)}
        found = find_culprits({rank: operations_of(dump) for rank, dump in dumps.items()}, unread)
        return [(culprits.how, culprits.ranks) for culprits in found]


def test_a_rank_whose_program_hangs_has_not_called_what_the_others_wait_in() -> None:
    """As with a locked interpreter: the recorder is there, and nothing waits in it."""
    recorders = Recorders()
    recorders.call(WORLD, 1, range(4), done=range(4))
    recorders.call(EXPERTS, 9, [0, 2, 3])
    recorders.call(WORLD, 2, [0, 2, 3])
    assert recorders.culprits() == [("missing", (1,))]


def test_a_rank_whose_device_hangs_has_not_finished_what_others_have() -> None:
    """As with a GPU error: its program continued and queued more than the others have done."""
    recorders = Recorders()
    recorders.call(PAIR, 7, [2, 3], done=[2])
    recorders.call(EXPERTS, 9, range(4), done=[0, 1, 2])
    recorders.call(EXPERTS, 10, range(4))
    assert recorders.culprits() == [("stuck", (3,))]


def test_a_rank_without_a_dump_is_missing_unless_its_dump_could_not_be_read() -> None:
    recorders = Recorders()
    recorders.call(WORLD, 5, [0, 1, 2])
    assert recorders.culprits(without=[3]) == [("missing", (3,))]
    assert recorders.culprits(unread=[3]) == []


def test_who_waits_elsewhere_is_not_the_one_that_is_waited_for() -> None:
    """Rank 2 waits for 3 in their own group, and 0 and 1 wait for both."""
    recorders = Recorders()
    recorders.call(PAIR, 4, [2])
    recorders.call(WORLD, 5, [0, 1])
    assert recorders.culprits() == [("missing", (3,))]


@pytest.mark.parametrize(
    "more", [{"profiling_name": "nccl:broadcast"}, {"input_sizes": [[4, 6]]}, {"input_dtypes": ["Float"]}]
)
def test_a_rank_that_called_something_else_is_named(more: dict[str, Any]) -> None:
    recorders = Recorders()
    recorders.call(WORLD, 5, [0, 1, 3])
    recorders.call(WORLD, 5, [2], **more)
    assert recorders.culprits() == [("mismatched", (2,))]


def test_sizes_of_an_exchange_may_differ() -> None:
    recorders = Recorders()
    for rank in range(RANKS):
        recorders.call(EXPERTS, 5, [rank], profiling_name="nccl:all_to_all", input_sizes=[[rank, 7]])
    assert recorders.culprits() == []


def test_ranks_that_wait_for_each_other_in_another_order() -> None:
    recorders = Recorders()
    recorders.call(PAIR, 4, [2])
    recorders.call(WORLD, 5, [0, 1, 3])
    assert recorders.culprits() == [("behind", (3,))], "what was called first is named"


def test_nothing_is_found_where_nothing_waits() -> None:
    recorders = Recorders()
    recorders.call(WORLD, 5, range(4), done=range(4))
    assert recorders.culprits() == []
    recorders.call(WORLD, 6, range(4))
    assert recorders.culprits() == [], "all have called it: the network, or a device that shows nothing"


def test_sends_and_receives_are_left_out() -> None:
    recorders = Recorders()
    recorders.call(WORLD, 5, [0], is_p2p=True)
    assert recorders.culprits() == []


def test_the_words_for_a_group_without_a_description() -> None:
    recorders = Recorders(description=False)
    recorders.call(PAIR, 4, [2])
    (found,) = find_culprits({2: operations_of(recorders.dump(2)), 3: operations_of(recorders.dump(3))})
    assert found.where == "all_reduce 4 of group 35"


def test_a_group_whose_members_are_not_recorded_names_no_rank_as_missing() -> None:
    recorders = Recorders()
    recorders.call("99", 4, [2])
    assert recorders.culprits() == []


@pytest.mark.parametrize(
    "dump", [None, [], {}, {"pg_config": {"0": {"ranks": "x"}}}, {"pg_config": {}, "entries": [1]}]
)
def test_what_is_no_dump_is_refused(dump: object) -> None:
    with pytest.raises(ValueError, match="no dump of a flight recorder"):
        operations_of(dump)


def test_dumps_that_torch_writes_are_read(tmp_path: Path) -> None:
    made = forked.server(torch=True).run(
        [str(tmp_path)], module=torch_dumps.__name__, env=dict(os.environ), cwd=tmp_path, timeout=DEADLINE_S
    )
    assert made.returncode == 0, made.stderr
    for name in ("pickled", "json"):
        operations = operations_of(loads_plain((tmp_path / name).read_bytes()))
        assert [(one.name, one.number, one.group.ranks) for one in operations] == [
            ("all_reduce", 1, (0,)), ("all_reduce", 2, (0,)), ("all_reduce", 3, (0,)),
        ]  # fmt: skip
        assert find_culprits({0: operations}) == []
