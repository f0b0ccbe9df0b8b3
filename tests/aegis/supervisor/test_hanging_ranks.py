"""Ranks that hang: witnesses are asked first, and one rank is killed if the others can continue."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.aegis.core.detection.test_flight_records import WORLD, Recorders
from tests.aegis.core.sites import Site
from zslurm.aegis.core.messages import (
    CoreAction,
    CoreEvent,
    DumpStacks,
    ExamineHang,
    FaultsFound,
    GiveUp,
    KillRanks,
    RanksKilled,
    Record,
    StopChanged,
    StopState,
)
from zslurm.aegis.fault_kinds import RANK_HANG, STORAGE_FAULT
from zslurm.aegis.protocol import Answer, Stamp
from zslurm.aegis.supervisor.agents.agents import Agents
from zslurm.aegis.supervisor.hanging_ranks import dump_stacks, examine_hang, kill_ranks
from zslurm.aegis.types import Fault
from zslurm.run.run_dir import RunDir

HERE = Stamp("n1", 1, 0.0, 0.0)
EVERYWHERE = ("n0", "n1", "n2")


class Hung(Site):
    """A site where ranks hang, and agents that answer what a test has them answer."""

    def __init__(self, directory: Path, *, agents: bool = True, memory: bool = True) -> None:
        self.attempt = RunDir(directory).attempt(1)
        self.attempt.flight.mkdir(parents=True)
        self.asked_agents: list[tuple[str, tuple[str, ...], int]] = []
        stacks = Answer(HERE, 1, ok=True, values={"ranks": [0, 1]})
        self.answers: dict[str, Answer] = {
            "end_rank": Answer(HERE, 1, ok=True), "ras": Answer(HERE, 1, ok=True), "stacks": stacks,
        }  # fmt: skip
        helpers = cast(Agents, SimpleNamespace(ask=self._ask))
        self.agents = helpers if agents else None
        self.given_up: GiveUp | None = None
        super().__init__()
        if not memory:
            self.state.memory = None

    def _ask(self, do: str, nodes: Sequence[str], *, timeout_s: float, rank: int = -1) -> dict[str, Answer]:
        self.asked_agents.append((do, tuple(nodes), rank))
        return {nodes[0]: self.answers[do]} if do in self.answers else {}

    def carry_out(self, action: CoreAction) -> list[CoreEvent]:
        match action:
            case ExamineHang():
                return [examine_hang(self.attempt, self.state, self.agents)]
            case KillRanks():
                return [RanksKilled(action.ranks, kill_ranks(action.ranks, self.state, self.agents), self.now)]
            case DumpStacks() if (dumped := dump_stacks(self.state, self.agents)) is not None:
                return super().carry_out(Record(dumped))
            case GiveUp():
                self.given_up = action
        return super().carry_out(action)

    def hang(self, rank: int | None) -> bool:
        """A rank hangs by its progress, or all do; returns whether the attempt continues."""
        node = None if rank is None else self.state.rank_nodes[rank]
        root = Fault.of_kind(RANK_HANG, 1.0, "progress", "no progress for 180 s", rank=rank, node=node)
        self.tell(FaultsFound((root,)))
        return self.continues()

    def continues(self) -> bool:
        """Let time pass; return whether the attempt continues."""
        self.given_up = None
        self.tick(times=1)
        return self.given_up is None

    @property
    def refused(self) -> list[str]:
        return [event["reason"] for event in self.recorded("recovery_failed")]


@pytest.fixture
def site(tmp_path: Path) -> Hung:
    return Hung(tmp_path)


def test_the_rank_that_hangs_is_killed_alone_and_replaced(site: Hung) -> None:
    assert site.hang(3)
    assert site.asked_agents == [("ras", ("n0",), -1), ("stacks", EVERYWHERE, -1), ("end_rank", ("n1",), 3)]
    assert site.recorded("stacks_dumped")[0]["ranks"] == [0, 1], "before anything is ended"
    (ended,) = site.recorded("hanging_ranks_ended")
    assert (ended["ranks"], ended["nodes"], ended["reason"]) == ([3], ["n1"], "no progress for 180 s")
    assert site.continues(), "until Slurm reports its end"
    assert len(site.asked_agents) == 3, "it is killed once"
    site.state.lost = {3}
    assert site.continues() and site.memory.active
    assert site.generations[0].lost == (3,)
    site.recover(1)
    assert site.recorded("recovered_in_memory")[0]["ranks"] == [3]
    assert site.memory.ended == set(), "the next hang is another one"


def test_a_hang_of_no_rank_in_particular_goes_down_a_rung(site: Hung) -> None:
    assert not site.hang(None)
    assert site.refused == ["a rank hangs: no rank lags behind the others, so none can be replaced alone"]
    assert site.asked_agents == [("ras", ("n0",), -1)], "nothing is killed"


def test_a_hang_inside_a_device_call_goes_down_a_rung(site: Hung) -> None:
    site.answers["end_rank"] = Answer(HERE, 1, ok=False, why="process 7 did not die: it is inside a device call")
    assert not site.hang(3)
    assert site.refused == ["a rank hangs: process 7 did not die: it is inside a device call"]


def test_without_an_agent_s_answer_it_goes_down_a_rung(tmp_path: Path) -> None:
    site = Hung(tmp_path / "a")
    del site.answers["end_rank"]
    assert not site.hang(3)
    assert site.refused == ["a rank hangs: the agent on n1 does not answer, so rank 3 cannot be killed alone"]
    site = Hung(tmp_path / "b", agents=False)
    assert not site.hang(3)
    assert site.refused == ["a rank hangs: no agent is there to kill it alone"]


def test_a_rank_that_could_not_be_replaced_is_not_killed(site: Hung) -> None:
    site.tell(FaultsFound((Fault.of_kind(STORAGE_FAULT, 1.0, "log", "EIO"),)))
    assert not site.hang(3)
    assert "the file system fails" in site.refused[0]
    assert [do for do, *_ in site.asked_agents] == ["ras"]


def test_once_the_ranks_were_asked_to_stop_none_is_killed_alone(site: Hung) -> None:
    site.tell(StopChanged(StopState(True, "SIGUSR2", "SIGUSR2")))
    assert not site.hang(3)
    assert site.asked_agents == [("ras", ("n0",), -1)], "nothing takes its place any more"


def test_a_rank_whose_end_is_never_reported_goes_down_a_rung(site: Hung) -> None:
    assert site.hang(3)
    site.state.hang.until = 0.0
    assert not site.continues()
    assert site.refused == ["a rank that hung was killed, and Slurm did not report its end"]


def test_what_the_ras_service_shows_is_recorded_and_contradicts(site: Hung) -> None:
    values = {"there": True, "version": "2.28.9", "found": ["rank 5 has called 3 AllReduces fewer"], "behind": [5]}
    site.answers["ras"] = Answer(HERE, 1, ok=True, values=values)
    assert not site.hang(3)
    (asked,) = site.recorded("ras_answered")
    assert (asked["node"], asked["version"], asked["found"]) == ("n0", "2.28.9", values["found"])
    assert site.refused == [
        "a rank hangs: the witnesses do not agree who hangs: rank 3 by their progress; rank 5 by the RAS service"
    ]


def test_flight_recorders_are_read_before_and_once(site: Hung) -> None:
    recorders = Recorders()
    recorders.call(WORLD, 5, [0, 2, 3])
    for rank in range(4):
        site.attempt.flight_dump(rank).write_bytes(pickle.dumps(recorders.dump(rank), 2))
    assert site.hang(1)
    (examined,) = site.recorded("collectives_examined")
    assert examined["dumps"] == 4
    assert [fault.source for fault in site.state.faults] == ["progress", "flight_recorder"]
    site.state.lost = {1}
    site.tick()
    assert site.memory.active, "the finding of another witness is no other fault"


def test_without_recovery_in_memory_witnesses_are_asked_for_the_record_only(tmp_path: Path) -> None:
    site = Hung(tmp_path, memory=False)
    assert not site.hang(3)
    assert site.asked_agents == [("ras", ("n0",), -1)]
    assert site.recorded("ras_answered") == [], "nothing listens, and that is no event"
