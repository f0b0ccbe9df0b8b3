"""The state of an attempt, event by event: what is noticed, what is recorded, and when the attempt is ended."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.aegis.attempts import NOW, fault, settings
from zslurm.aegis.core.attempt import GONE, AttemptState, MemoryState, Move, MoveWish
from zslurm.aegis.core.detection.attempt_progress import GONE_S
from zslurm.aegis.core.detection.detector import Detector
from zslurm.aegis.core.messages import (
    CoreAction,
    CoreEvent,
    EndRead,
    FaultsFound,
    GiveUp,
    LookForCancel,
    Paused,
    ProgressRead,
    RanksFailed,
    ReadEnd,
    ReadLastWords,
    Record,
    Recovered,
    ReportReceived,
    Resumed,
    StopChanged,
    StopState,
    Tick,
)
from zslurm.aegis.core.policy.in_memory import InMemory
from zslurm.aegis.core.step import step
from zslurm.aegis.protocol import ProgressReport, RankProgress, Stamp
from zslurm.aegis.types import Fault
from zslurm.run.events import FaultDetected
from zslurm.run.events.event import from_row
from zslurm.slurm.on_nodes.srun_output import TaskFailure
from zslurm.train.progress import Phase

NODES = ("node0", "node1", "node2")
BEGAN = 1000.0


class Attempt:
    """An attempt of three nodes with a rank each, which is told what happens."""

    def __init__(self, *, agents: bool = True, spares: int = 0, **aegis: Any) -> None:
        says = settings(**aegis)
        detector = Detector(says)
        detector.begin(1, NODES, BEGAN)
        self.state = AttemptState(says, 1, NODES, list(NODES), detector, has_agents=agents, spares=spares)

    def tell(self, event: CoreEvent) -> list[CoreAction]:
        state, actions = step(self.state, event)
        assert state is self.state
        return actions

    def fail(self, task: int, what: str = "Killed", now: float = BEGAN, **more: Any) -> list[CoreAction]:
        return self.tell(RanksFailed(TaskFailure(NODES[task % 3], (task,), what), {}, now, **more))

    def assess(self, now: float, **more: Any) -> list[CoreAction]:
        return self.tell(Tick(now, NOW + now - BEGAN, **more))

    def kinds(self) -> list[str]:
        return [fault.kind for fault in self.state.faults]


def kinds_of(actions: list[CoreAction]) -> list[str]:
    return [action.event.NAME if isinstance(action, Record) else type(action).__name__ for action in actions]


def test_a_failed_rank_is_recorded_first_and_then_its_last_words_are_read() -> None:
    attempt = Attempt()
    actions = attempt.fail(1)
    assert kinds_of(actions) == ["ranks_ended", "LookForCancel", "ReadLastWords"]
    assert (attempt.state.lost, attempt.state.failed_at) == ({1}, BEGAN)
    (recorded,) = attempt.tell(FaultsFound((fault("rank_killed", "node1", rank=1),)))
    assert isinstance(recorded, Record) and isinstance(recorded.event, FaultDetected)
    assert (recorded.event.attempt, recorded.event.kind, recorded.event.rank) == (1, "rank_killed", 1)


def test_the_other_ranks_get_settle_s_once_the_root_is_known() -> None:
    attempt = Attempt(settle_s=5.0)
    attempt.fail(1)
    attempt.tell(FaultsFound((fault("rank_killed", "node1", rank=1),)))
    assert attempt.assess(BEGAN + 4.9) == []
    assert attempt.assess(BEGAN + 5.1) == [GiveUp("the other ranks did not end within 5 s of the first")]


@pytest.mark.parametrize(
    ("responding", "patience", "why"),
    [
        (True, 20.0, "ranks lost their peers, and nothing else was found within 20 s"),
        (False, 300.0, "ranks lost their peers, and Slurm named no failed node within 300 s"),
    ],
)
def test_lost_peers_are_explained_by_agents_or_by_slurm(responding: bool, patience: float, why: str) -> None:
    attempt = Attempt(grace_s=20.0, lost_peer_s=300.0)
    attempt.fail(1, "Exited with exit code 1")
    attempt.tell(FaultsFound((Fault("peer_lost", "cascade", "fabric", NOW, "rank", "x", "node1", rank=1),)))
    assert attempt.assess(BEGAN + patience - 1) == []
    if responding:
        report = ProgressReport(Stamp("node0", 1, NOW, BEGAN), 1)
        attempt.tell(ReportReceived(report, BEGAN + patience, NOW + patience))
    assert attempt.assess(BEGAN + patience + 1) == [GiveUp(why)]


def test_a_fault_that_ends_the_attempt_is_the_root_of_giving_up() -> None:
    attempt = Attempt()
    broken = fault("gpu_ras_uncorrectable", "node2", gpu="3")
    attempt.tell(FaultsFound((broken,)))
    (given_up,) = attempt.assess(BEGAN + 1)
    assert isinstance(given_up, GiveUp)
    assert given_up.root == broken
    assert given_up.reason == "node2, GPU 3: uncorrectable memory error of a GPU"


def test_in_mode_observe_nothing_is_ended_for_a_fault() -> None:
    attempt = Attempt(mode="observe")
    attempt.tell(FaultsFound((fault("gpu_ras_uncorrectable", "node2"),)))
    assert attempt.assess(BEGAN + 1) == []


def test_a_slow_node_that_the_ranks_are_about_to_leave_ends_nothing() -> None:
    attempt = Attempt(spares=1, straggler={"act": True}, planned_moves=False)
    attempt.tell(FaultsFound((fault("straggler", "node1", rank=1),)))
    leaves = MoveWish("node1", "it is slow", None, BEGAN)
    attempt.state.moves.wishes = [leaves]
    attempt.state.memory = MemoryState.of_start(NODES, 1, ())
    attempt.state.memory.move = Move("node1", InMemory(), (1,), 1, "it is slow")
    assert attempt.assess(BEGAN + 1) == []
    attempt.state.moves.wishes = [replace(leaves, node="node2")]
    *_, given_up = attempt.assess(BEGAN + 3)
    assert isinstance(given_up, GiveUp) and given_up.root is not None and given_up.root.kind == "straggler"


def test_ranks_that_do_not_stop_in_time_are_ended() -> None:
    attempt = Attempt(save_s=60.0)
    attempt.tell(StopChanged(StopState(True, "SIGUSR2", "SIGUSR2", deadline=BEGAN + 60)))
    assert attempt.assess(BEGAN + 59) == []
    (given_up,) = attempt.assess(BEGAN + 61)
    assert given_up == GiveUp(
        "the ranks did not save and stop within 60 s (aegis.save_s) when asked to (SIGUSR2)", overdue=True
    )


def test_ranks_that_save_and_stop_when_asked_have_not_failed() -> None:
    attempt = Attempt()
    attempt.tell(StopChanged(StopState(True, "SIGUSR2", "SIGUSR2", deadline=BEGAN + 60)))
    assert kinds_of(attempt.fail(1, "Exited with exit code 75")) == ["ranks_ended"]
    assert (attempt.state.lost, attempt.state.failed_at) == (set(), None)


def test_a_pause_of_the_supervisor_counts_for_nobody() -> None:
    attempt = Attempt(settle_s=5.0)
    attempt.fail(1)
    attempt.tell(FaultsFound((fault("rank_killed", "node1", rank=1),)))
    attempt.tell(Paused(100.0, BEGAN + 100))
    assert attempt.assess(BEGAN + 104) == []
    assert kinds_of(attempt.assess(BEGAN + 106)) == ["GiveUp"]


def test_a_pause_moves_no_limit_into_the_future() -> None:
    attempt = Attempt(settle_s=5.0)
    attempt.fail(1)
    attempt.tell(FaultsFound((fault("rank_killed", "node1", rank=1),)))
    attempt.tell(Paused(3600.0, BEGAN + 1))  # told late, or noticed by a reader that began later
    assert attempt.assess(BEGAN + 5) == []
    assert kinds_of(attempt.assess(BEGAN + 7)) == ["GiveUp"]


def test_a_pause_of_the_supervisor_is_no_time_in_which_ranks_could_save() -> None:
    attempt = Attempt(save_s=60.0)
    asked = StopChanged(StopState(True, "SIGUSR2", "SIGUSR2", deadline=BEGAN + 60))
    attempt.tell(Paused(1000.0, BEGAN))
    attempt.tell(asked)
    attempt.tell(Paused(100.0, BEGAN + 101))
    attempt.tell(asked)
    assert attempt.assess(BEGAN + 159) == []
    assert kinds_of(attempt.assess(BEGAN + 161)) == ["GiveUp"]


def test_what_the_run_overcame_is_forgotten() -> None:
    attempt = Attempt()
    attempt.tell(FaultsFound((fault("nic_fault", "node1", ago=300.0, nic="n1"),)))
    assert attempt.state.needs_progress(BEGAN + 1)
    attempt.tell(ProgressRead(40, NOW - 10.0))
    assert attempt.assess(BEGAN + 1) == []
    assert attempt.kinds() == []


def test_nothing_is_read_while_no_serious_fault_is_known() -> None:
    attempt = Attempt()
    attempt.tell(FaultsFound((Fault("zombies", "advisory", "node", NOW, "host", "x", "node1"),)))
    assert not attempt.state.needs_progress(BEGAN + 1000)


def gone(attempt: Attempt) -> list[CoreAction]:
    """Have the agent of node1 report for long that its rank's process is gone."""
    for second in range(int(GONE_S) + 2):
        row = RankProgress(1, 7, Phase.STEP, 5, -1, 1.0 + second, gone=True)
        report = ProgressReport(Stamp("node1", second, NOW + second, BEGAN + second), 1, (row,))
        attempt.tell(ReportReceived(report, BEGAN + second, NOW + second))
    return attempt.tell(Tick(BEGAN + GONE_S + 1, NOW + GONE_S + 1))


def test_of_a_rank_that_only_its_agent_reports_the_record_is_read() -> None:
    attempt = Attempt()
    assert gone(attempt) == [ReadEnd(1, GONE_S + 1)]
    actions = attempt.tell(EndRead(1, None, GONE_S + 1, BEGAN + 12))
    assert kinds_of(actions) == ["ranks_ended", "LookForCancel", "ReadLastWords"]
    assert attempt.state.failures == [TaskFailure("node1", (1,), GONE)]
    assert gone(attempt) == [], "it is lost already"
    attempt.fail(1, "Segmentation fault")
    assert [failure.what for failure in attempt.state.failures] == ["Segmentation fault"], "srun knows better"


def test_a_rank_that_recorded_an_orderly_end_is_not_lost() -> None:
    attempt = Attempt()
    gone(attempt)
    assert attempt.tell(EndRead(1, {"rank": 1, "exit_code": 0}, GONE_S + 1, BEGAN + 12)) == []
    assert attempt.state.lost == set()
    assert gone(attempt) == [], "and it is not read again"


def test_a_node_that_slurm_reports_as_failed_is_noticed_once_without_agents() -> None:
    attempt = Attempt(agents=False)
    failed = Tick(BEGAN, NOW, failed_nodes=("node1",), over=True)
    assert kinds_of(attempt.tell(failed)) == ["fault_detected"]
    assert attempt.tell(failed) == []
    assert (attempt.state.dead_nodes, attempt.state.alive) == ({"node1"}, ["node0", "node2"])


def test_a_sensor_that_no_node_can_read_is_recorded_once() -> None:
    attempt = Attempt()
    lines = [Fault("sensor_unavailable", "advisory", "node", NOW, "gpu", "no amd-smi", node) for node in NODES]
    assert kinds_of(attempt.tell(FaultsFound(tuple(lines)))) == ["fault_detected"]


def test_after_a_recovery_tasks_keep_their_numbers_and_ranks_do_not() -> None:
    """Task 1 was replaced, then the ranks that were 0 and 2 were left out."""
    attempt = Attempt()
    state = attempt.state
    attempt.tell(Recovered(frozenset([1])))
    assert [state.rank_of(task) for task in range(5)] == [0, None, 2, 3, 4]
    state.lost = {0, 3}
    attempt.tell(Recovered(frozenset([0, 2]), frozenset(["node0"]), left_out=True))
    assert [state.rank_of(task) for task in range(5)] == [None, None, None, 1, 2]
    assert (state.lost, state.dead_nodes) == ({1}, {"node0"})
    assert attempt.fail(1) == [], "the former process of a rank that trains elsewhere"


def test_what_another_supervisor_recorded_is_not_noticed_again() -> None:
    row = {"attempt": 1, "event": "ranks_ended", "ranks": [1], "node": "node1", "what": "Killed", "time": NOW}
    failure = TaskFailure("node1", (1,), "Killed")
    attempt = Attempt()
    actions = attempt.tell(Resumed((from_row(row),), (failure,), {}, BEGAN, NOW))
    assert actions == [ReadLastWords(failure)], "it died before it recorded why"
    assert (attempt.state.lost, attempt.state.ends_taken) == ({1}, 1)
    noticed = fault("rank_killed", "node1", rank=1, source="srun").fields()
    known = {"attempt": 1, "event": "fault_detected", **noticed, "fault_time": NOW, "time": NOW}
    attempt = Attempt()
    assert attempt.tell(Resumed((from_row(row), from_row(known)), (failure,), {}, BEGAN, NOW)) == []
    assert attempt.kinds() == ["rank_killed"]


def test_a_step_that_this_supervisor_s_predecessor_ended_was_not_cancelled() -> None:
    attempt = Attempt()
    killed = {"attempt": 1, "event": "step_killed", "reason": "so", "time": NOW}
    attempt.tell(Resumed((from_row(killed),), (), {}, BEGAN, NOW))
    assert LookForCancel() not in attempt.fail(1)


class Reporting(Attempt):
    """An attempt that trained for twenty seconds, whose agents report every second, some of them until then."""

    def __init__(self, silent: str, *, failed: bool = True, **aegis: Any) -> None:
        super().__init__(heartbeat_timeout_s=8.0, **aegis)
        self.state.own_node = "node0"
        self.second = 0
        for _ in range(20):
            self.wait()
        if failed:
            self.fail(1, "Exited with exit code 1", BEGAN + 20)
        for _ in range(9):
            self.wait(silent)

    def wait(self, silent: str | None = None, **more: Any) -> list[CoreAction]:
        """Let a second pass; steps take two, and none is finished once an agent is silent."""
        self.second += 1
        now, wall = BEGAN + self.second, NOW + self.second
        finished = min(self.second, 20)
        for rank, node in enumerate(NODES):
            if node != silent:
                row = RankProgress(rank, rank, Phase.STEP, finished // 2, -1, float(self.second - finished))
                report = ProgressReport(Stamp(node, self.second, wall, now), 1, (row,))
                self.tell(ReportReceived(report, now, wall))
        return self.tell(Tick(now, wall, **more))

    def dead(self) -> set[str | None]:
        return {fault.node for fault in self.state.faults if fault.kind == "node_dead"}


def test_a_silent_node_is_dead_if_ranks_lost_peers_or_no_step_is_finished() -> None:
    assert Reporting("node2").dead() == {"node2"}
    assert Reporting("node2", failed=False).dead() == {"node2"}


@pytest.mark.parametrize("told", [True, False], ids=["the supervisor was stopped", "all reports were held up"])
def test_after_a_pause_no_node_is_dead_and_no_rank_hangs_until_that_takes_its_usual_time(told: bool) -> None:
    attempt = Reporting("nobody", failed=False, hang={"step_s": 15.0, "step_factor": 2.0})
    attempt.second += 100
    now = BEGAN + attempt.second
    if told:
        attempt.tell(Paused(100.0, now))
    first = ProgressReport(Stamp("node0", 130, now, now), 1, (RankProgress(0, 0, Phase.STEP, 10, -1, 9.0),))
    attempt.tell(ReportReceived(first, now, now))
    assert attempt.assess(now) == [], "the others' reports are still to be read"
    assert attempt.kinds() == []
    for _ in range(10):
        attempt.wait("node2")
    assert attempt.dead() == {"node2"}, "the pause counts once"


def test_the_supervisor_s_own_node_is_alive_unless_slurm_reports_it_as_failed() -> None:
    attempt = Reporting("node0")
    assert attempt.dead() == set()
    attempt.wait("node0", failed_nodes=("node0",))
    assert attempt.dead() == {"node0"}


class Explained(Reporting):
    """One in which a fault is known before an agent falls silent."""

    def __init__(self, known: Fault, *, over: bool = False, failed: bool = False) -> None:
        super().__init__("node2", failed=False)
        self.state.faults.clear()
        self.state.detector.begin(1, NODES, BEGAN)
        self.second = 0
        for _ in range(20):
            self.wait()
        self.tell(FaultsFound((known,)))
        if failed:
            self.fail(1, "Exited with exit code 1", BEGAN + 20)
        for _ in range(9):
            self.wait("node2", over=over)


@pytest.mark.parametrize(
    "known",
    [fault("nic_link_down", "node1", ago=-20.0, nic="nic0"), fault("node_dead", "node1", ago=-20.0)],
    ids=lambda known: known.kind,
)
def test_a_halt_that_another_node_explains_says_nothing_of_a_silent_one(known: Fault) -> None:
    assert "node2" not in Explained(known).dead()


def test_the_program_s_own_error_explains_why_an_attempt_that_is_over_lost_peers() -> None:
    error = fault("user_error", "node1", ago=-20.0, source="rank", rank=1)
    assert Explained(replace(error, scope="user"), over=True, failed=True).dead() == set()
    killed = fault("rank_killed", "node1", ago=-20.0, source="srun", rank=1)
    assert Explained(killed, over=True, failed=True).dead() == {"node2"}, "nodes often die together"
