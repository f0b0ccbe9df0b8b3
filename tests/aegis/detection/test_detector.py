"""What is made of reports: who hangs, who is dead, who is slow; on a made-up training with a made-up clock."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from zslurm.aegis.detection.detector import Detector
from zslurm.aegis.protocol import AgentReport, ProgressReport, RankProgress, SensorReport, Stamp
from zslurm.aegis.types import Fault, Role
from zslurm.config.aegis import AegisSection
from zslurm.train.progress import Phase

WALL = 1_700_000_000.0
SETTINGS = AegisSection.model_validate(
    {
        "heartbeat_timeout_s": 8,
        "hang": {"setup_s": 100, "step_s": 20, "step_factor": 5, "save_s": 60, "eval_s": 40},
        "straggler": {"factor": 1.3, "after_s": 100},
    }
)


@dataclass
class Training:
    """Ranks that train in step, two to a node, and the agents that report on them every second."""

    nodes: int = 2
    step_s: float = 2.0
    attempt: int = 1
    settings: AegisSection = SETTINGS
    now: float = 1000.0
    wall: float = WALL
    silent: set[int] = field(default_factory=set)
    """Nodes whose agents say nothing."""
    stopped: dict[int, float] = field(default_factory=dict)
    """Ranks that do nothing any more, and since when; whoever waits for them stands still as well."""
    stuck: float | None = None
    """Since when the collective itself hangs: all have done their own part."""
    halted: set[int] = field(default_factory=set)
    """Ranks whose process is stopped."""
    phase: Phase = Phase.STEP
    own_s: dict[int, float] = field(default_factory=dict)
    """Seconds of own work per microbatch, where they differ from 1."""
    slow_steps: tuple[int, int] = (0, 10**9)
    """First and last of the steps in which they do."""
    missing: set[int] = field(default_factory=set)
    """Ranks without a record."""
    adopted: bool = False
    known_step_times: tuple[float, ...] = ()
    detector: Detector = field(init=False)
    found: list[Fault] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.detector = Detector(self.settings)
        self.began = self.now
        self.detector.begin(
            self.attempt, self.rank_nodes, self.now, adopted=self.adopted, step_times=self.known_step_times
        )

    @property
    def rank_nodes(self) -> list[str]:
        return [f"node{rank // 2}" for rank in range(2 * self.nodes)]

    def _record(self, rank: int) -> RankProgress:
        """What the rank wrote last."""
        halted = min([*self.stopped.values(), self.stuck or math.inf], default=math.inf)
        until = min(self.now, halted)
        step = int((until - self.began) / self.step_s)
        when = self.began + step * self.step_s
        waiting = False
        if self.now > halted:
            if self.stuck is not None:
                when, waiting = when + self.step_s * 0.9, True
            elif rank not in self.stopped:
                when, waiting = when + self.step_s * 0.7, True
        if self.phase is not Phase.STEP:
            when, waiting = min([self.now, *(t for r, t in self.stopped.items() if r == rank)]), False
        age = max(0.0, self.now - when)
        first, last = self.slow_steps
        pace = step + (self.own_s.get(rank, 1.0) - 1.0) * max(0, min(step, last) - first)
        return RankProgress(rank, 100 + rank, self.phase, step, -1, age, waiting, pace, rank in self.halted)

    def stamp(self, node: int) -> Stamp:
        return Stamp(f"node{node}", int(self.now), self.wall, self.now)

    def second(self, *, look: bool = True, **evidence: Any) -> None:
        """One second passes; without a look, the supervisor is busy with something else."""
        self.now += 1.0
        self.wall += 1.0
        for node in range(self.nodes):
            if node not in self.silent:
                rows = tuple(self._record(rank) for rank in (2 * node, 2 * node + 1) if rank not in self.missing)
                self.detector.feed(ProgressReport(self.stamp(node), self.attempt, rows), self.now + 0.1)
        if look:
            self.found += self.detector.check(self.now + 0.2, self.wall, **evidence)

    def run(self, seconds: int, **evidence: Any) -> list[Fault]:
        """Time passes; returns the faults that were found meanwhile."""
        before = len(self.found)
        for _ in range(seconds):
            self.second(**evidence)
        return self.found[before:]

    def kinds(self, faults: list[Fault]) -> list[tuple[str, str | None, int | None]]:
        return [(fault.kind, fault.node, fault.rank) for fault in faults]


def test_a_training_that_goes_well_is_no_fault() -> None:
    training = Training()
    assert training.run(600) == []
    assert training.detector.step == 300


# --- hangs ------------------------------------------------------------------------------------------------------


def test_the_rank_that_stopped_is_named_and_not_those_that_wait_for_it() -> None:
    training = Training()
    training.run(31)
    training.stopped[3] = training.now
    assert training.run(19) == []
    (fault,) = training.run(10)
    assert (fault.kind, fault.role, fault.node, fault.rank, fault.step) == ("rank_hang", "root", "node1", 3, 15)
    assert fault.time == pytest.approx(training.wall, abs=10)
    assert "in step 16 (limit 20 s); 3 of 4 ranks are further" in fault.line
    assert training.run(60) == [], "once is enough"


def test_a_rank_that_was_stopped_while_it_waited_for_others_is_named_all_the_same() -> None:
    training = Training()
    training.run(31)
    training.stuck = training.now
    training.halted = {2}
    (fault,) = training.run(40)
    assert (fault.kind, fault.rank, fault.node) == ("rank_hang", 2, "node1")
    assert "its process stopped" in fault.line


def test_several_lagging_ranks_are_each_named() -> None:
    training = Training(nodes=4)
    training.run(31)
    training.stopped |= {0: training.now, 5: training.now}
    assert training.kinds(training.run(40)) == [("rank_hang", "node0", 0), ("rank_hang", "node2", 5)]


def test_where_all_stand_at_the_same_point_none_is_singled_out() -> None:
    training = Training()
    training.run(31)
    training.stuck = training.now
    (fault,) = training.run(60)
    assert (fault.kind, fault.node, fault.rank, fault.step) == ("rank_hang", None, None, 15)
    assert "4 of 4 ranks stand still in step 16, waiting for others" in fault.line


def test_a_slow_model_gets_as_long_as_its_own_steps_say() -> None:
    training = Training(step_s=30.0)
    training.run(200)
    training.stopped[1] = training.now
    assert training.run(130) == [], "5 medians of 30 s, not 20 s"
    assert training.kinds(training.run(40)) == [("rank_hang", "node0", 1)]


def test_before_a_step_time_is_known_a_step_may_take_as_long_as_the_setup() -> None:
    """Also after a supervisor was replaced, which knows no step times at first."""
    training = Training(step_s=90.0, adopted=True)
    assert training.run(400) == []


@pytest.mark.parametrize(("phase", "limit"), [(Phase.SETUP, 100), (Phase.SAVE, 60), (Phase.EVAL, 40)])
def test_each_phase_has_its_own_limit(phase: Phase, limit: int) -> None:
    training = Training()
    training.run(31)
    training.phase, training.stopped = phase, {2: training.now}
    assert training.run(limit - 1) == []
    assert training.kinds(training.run(3)) == [("rank_hang", "node1", 2)]


def test_who_waits_for_a_rank_within_its_limit_does_not_hang() -> None:
    detector = Detector(SETTINGS)
    detector.begin(1, ["node0", "node0"], 0.0)
    for second in range(10):
        rows = [RankProgress(rank, rank, Phase.STEP, second, -1, 0.0) for rank in range(2)]
        detector.feed(ProgressReport(Stamp("node0", second, 0, 0), 1, tuple(rows)), float(second))
    saves = RankProgress(0, 0, Phase.SAVE, 9, -1, 50.0)
    waits = RankProgress(1, 1, Phase.STEP, 9, -1, 50.0, waiting=True)
    detector.feed(ProgressReport(Stamp("node0", 60, 0, 0), 1, (saves, waits)), 60.0)
    assert detector.check(60.0, WALL) == [], "60 s are allowed for a save"
    detector.feed(
        ProgressReport(Stamp("node0", 71, 0, 0), 1, (saves.__class__(0, 0, Phase.SAVE, 9, -1, 61.0), waits)), 71.0
    )
    assert [fault.rank for fault in detector.check(71.0, WALL)] == [0]


def test_a_rank_that_never_left_a_sign_hangs_in_its_setup() -> None:
    training = Training(missing={3})
    training.phase = Phase.SETUP
    assert training.run(99) == []
    assert training.kinds(training.run(5)) == [("rank_hang", "node1", 3)]


def test_a_rank_that_ended_in_order_does_not_hang() -> None:
    training = Training()
    training.run(30)
    training.missing = {0, 1}
    training.stopped = {2: training.now}
    assert [rank for _, _, rank in training.kinds(training.run(60))] == [2]


def test_a_rank_that_is_done_may_take_its_time() -> None:
    training = Training()
    training.run(30)
    training.phase = Phase.DONE
    training.stopped = dict.fromkeys(range(4), training.now)
    assert training.run(1000) == []


def test_the_progress_of_an_earlier_attempt_is_not_looked_at() -> None:
    training = Training()
    training.run(31)
    training.stopped[3] = training.now
    assert len(training.run(40)) == 1
    training.detector.begin(2, training.rank_nodes, training.now)
    assert training.run(60) == [], "the agents still report the attempt that hung"


def test_an_adopted_attempt_hangs_by_the_step_times_before_its_adoption() -> None:
    """Nobody has finished a step since; without them a step may take as long as a setup."""
    stopped = {"adopted": True, "stopped": {2: 1000.0}, "now": 1000.0}
    assert Training(**stopped).run(90) == []
    known = Training(**stopped, known_step_times=(2.0, 2.1, 40.0))
    assert known.kinds(known.run(30)) == [("rank_hang", "node1", 2)]


# --- silent nodes -----------------------------------------------------------------------------------------------


def test_a_silent_node_is_dead_when_nobody_finishes_a_step() -> None:
    training = Training()
    training.run(31)
    died = training.now
    training.silent.add(1)
    training.stopped |= {2: died, 3: died}
    (fault,) = training.run(10)
    assert (fault.kind, fault.role, fault.scope, fault.node) == ("node_dead", "root", "node", "node1")
    assert fault.time == pytest.approx(training.wall - 10, abs=1.5), "when it fell silent"
    assert training.run(60) == [], "nobody hangs who waits for a dead node"


def test_it_takes_less_than_ten_seconds() -> None:
    training = Training(step_s=0.2)
    training.run(30)
    training.silent.add(1)
    training.stopped |= {2: training.now, 3: training.now}
    died, seconds = training.now, 0
    while not training.found:
        training.second()
        seconds += 1
    assert training.now - died <= 9
    assert training.found[0].kind == "node_dead"


def test_it_is_found_though_each_look_takes_long() -> None:
    """What other nodes said meanwhile was received all the same: silence is silence."""
    training = Training()
    training.run(31)
    training.silent.add(1)
    training.stopped |= {2: training.now, 3: training.now}
    for _ in range(20):
        training.second(look=training.now % 5 == 0)
    assert training.kinds(training.found) == [("node_dead", "node1", None)]


def test_two_nodes_that_die_together_are_both_named() -> None:
    training = Training(nodes=4)
    training.run(31)
    training.silent |= {1, 2}
    training.stopped |= dict.fromkeys((2, 3, 4, 5), training.now)
    assert training.kinds(training.run(20)) == [("node_dead", "node1", None), ("node_dead", "node2", None)]


def test_while_training_goes_on_only_the_agent_is_lost() -> None:
    """A stalled file system silences the agent of a healthy node."""
    training = Training()
    training.run(31)
    training.silent.add(1)
    (fault,) = training.run(300)
    assert (fault.kind, fault.role, fault.node) == ("agent_lost", "advisory", "node1")
    training.silent.clear()
    training.run(10)
    training.silent.add(1)
    assert training.kinds(training.run(30)) == [("agent_lost", "node1", None)], "it was back in between"


def test_a_lost_agent_does_not_make_its_node_guilty_of_a_later_hang() -> None:
    training = Training(nodes=3)
    training.run(31)
    training.silent.add(1)
    training.run(60)
    training.stopped[5] = training.now
    assert training.kinds(training.run(60)) == [("rank_hang", "node2", 5)]


def test_long_steps_do_not_make_a_silent_agent_a_dead_node() -> None:
    training = Training(step_s=30.0)
    training.run(125)
    training.silent.add(1)
    assert training.kinds(training.run(300)) == [("agent_lost", "node1", None)]


def test_where_all_agents_are_silent_nobody_is_dead() -> None:
    training = Training()
    training.run(31)
    training.silent |= {0, 1}
    training.stopped |= dict.fromkeys(range(4), training.now)
    assert training.run(100) == []


@pytest.mark.parametrize("apart", [0.3, 0.9, 2.0])
@pytest.mark.parametrize("lost_peers", [False, True])
def test_agents_that_fall_silent_one_after_the_other_are_still_all_of_them(
    apart: float, *, lost_peers: bool
) -> None:
    """Their srun ended: the one that reported last has not been silent for as long as the first yet."""
    training = Training(nodes=3)
    training.run(31)
    training.silent |= {0, 1, 2}
    late = ProgressReport(training.stamp(2), training.attempt, tuple(training._record(rank) for rank in (4, 5)))
    training.detector.feed(late, training.now + 0.1 + apart)
    training.stopped |= dict.fromkeys(range(6), training.now)
    assert training.run(100, lost_peers=lost_peers) == []


@pytest.mark.parametrize("phase", [Phase.SETUP, Phase.SAVE, Phase.EVAL])
def test_in_phases_without_steps_silence_needs_another_witness(phase: Phase) -> None:
    training = Training()
    training.run(31)
    training.phase = phase
    training.silent.add(1)
    training.stopped |= {2: training.now, 3: training.now}
    assert training.run(30) == [], "a stalled file system is as likely"
    (fault,) = training.run(1, trouble={"node1": "Slurm says down not responding"})
    assert (fault.kind, fault.node) == ("node_dead", "node1")
    assert "Slurm says down not responding" in fault.line


def test_silence_and_lost_peers_are_enough() -> None:
    training = Training(step_s=30.0)
    training.run(125)
    training.silent.add(1)
    assert training.run(7, lost_peers=True) == []
    assert training.kinds(training.run(2, lost_peers=True)) == [("node_dead", "node1", None)]


def test_the_limit_of_a_rank_elsewhere_is_a_witness_too() -> None:
    training = Training()
    training.phase = Phase.SAVE
    training.run(31)
    training.silent.add(1)
    training.stopped |= dict.fromkeys(range(4), training.now)
    assert training.kinds(training.run(70)) == [("node_dead", "node1", None)]


def test_slurm_need_not_wait_for_silence() -> None:
    training = Training()
    training.run(5)
    (fault,) = training.run(3, dead={"node0": "Slurm declared it failed", "node9": "not of this attempt"})
    assert (fault.kind, fault.node) == ("node_dead", "node0")


def test_a_node_that_slurm_distrusts_but_that_speaks_is_not_dead() -> None:
    training = Training()
    assert training.run(60, trouble={"node1": "Slurm says idle not responding"}) == []


def test_agents_that_have_not_spoken_yet_get_the_time_to_start() -> None:
    training = Training(adopted=True)
    training.silent.add(1)
    training.phase = Phase.SETUP
    assert training.run(80, trouble={"node1": "Slurm says down"}) == []
    assert training.kinds(training.run(30, trouble={"node1": "Slurm says down"})) == [("node_dead", "node1", None)]


def test_a_supervisor_that_was_stopped_itself_blames_nobody() -> None:
    training = Training()
    training.run(31)
    training.now += 60.0
    training.stopped |= {2: training.now, 3: training.now}
    training.began += 60.0
    training.silent.add(1)
    assert training.run(2) == [], "what node1 said meanwhile may not have been read yet"


def test_a_wall_clock_that_jumps_changes_nothing() -> None:
    training = Training()
    training.run(31)
    for jump in (-86400.0, 3 * 86400.0, -1.0):
        training.wall += jump
        assert training.run(30) == []


# --- stragglers -------------------------------------------------------------------------------------------------


def test_a_rank_slower_than_its_peers_for_long_is_named_once() -> None:
    training = Training(own_s={2: 1.5})
    assert training.run(95) == []
    (fault,) = training.run(60)
    assert (fault.kind, fault.role, fault.node, fault.rank) == ("straggler", "advisory", "node1", 2)
    assert "1.50 times as long as its peers" in fault.line
    assert training.run(300) == []


def test_who_is_slow_only_for_a_while_is_no_straggler() -> None:
    assert Training(own_s={2: 1.5}, slow_steps=(20, 60)).run(600) == []


def test_a_straggler_that_recovers_is_cleared() -> None:
    training = Training(own_s={2: 1.5}, slow_steps=(0, 80))
    assert [(fault.rank, fault.cleared) for fault in training.run(300)] == [(2, False), (2, True)]


def test_the_setting_makes_it_a_root() -> None:
    settings = SETTINGS.model_copy(update={"straggler": SETTINGS.straggler.model_copy(update={"act": True})})
    (fault,) = Training(own_s={0: 2.0}, settings=settings).run(150)
    assert fault.role == "root"


def test_a_little_slower_is_no_straggler() -> None:
    assert Training(own_s={2: 1.25}).run(600) == []


# --- sensors ----------------------------------------------------------------------------------------------------


def _fault(kind: str, *, role: Role = "root", **fields: Any) -> Fault:
    return Fault(kind, role, "gpu", WALL, "gpu", "words", **fields)


def _sensor(
    *faults: Fault, ok: bool = True, why: str = "", node: str = "node1", sensor: str = "gpu", wall: float = WALL
) -> SensorReport:
    return SensorReport(Stamp(node, 1, wall, 1.0), sensor, ok, why, tuple(faults))


def _begun() -> Detector:
    detector = Detector(SETTINGS)
    detector.begin(1, ["node0", "node1"], 0.0)
    return detector


def test_a_fault_of_a_sensor_is_passed_on_once_with_its_node() -> None:
    detector = _begun()
    for _ in range(3):
        detector.feed(_sensor(_fault("gpu_ras_uncorrectable", gpu="3")), 1.0)
    detector.feed(_sensor(_fault("gpu_ras_uncorrectable", gpu="4")), 1.0)
    found = detector.check(1.0, WALL)
    assert [(fault.kind, fault.node, fault.gpu) for fault in found] == [
        ("gpu_ras_uncorrectable", "node1", "3"),
        ("gpu_ras_uncorrectable", "node1", "4"),
    ]
    assert detector.check(2.0, WALL) == []


def test_a_fault_that_was_cleared_may_come_again() -> None:
    detector = _begun()
    down, up = _fault("nic_link_down", nic="rdma0"), _fault("nic_link_down", nic="rdma0", cleared=True)
    seen = []
    for fault in (up, down, down, up, up, down):
        detector.feed(_sensor(fault, sensor="nic"), 1.0)
        seen += [(fault.kind, fault.cleared) for fault in detector.check(1.0, WALL)]
    assert seen == [("nic_link_down", False), ("nic_link_down", True), ("nic_link_down", False)]


@pytest.mark.parametrize("wrong_by", [-90.0, 0.0, 3600.0])
def test_a_fault_is_told_in_the_supervisors_time_whatever_its_nodes_clock_shows(wrong_by: float) -> None:
    """By a clock that is behind, a link that has just gone down would have been down for long."""
    detector = _begun()
    there = WALL + wrong_by
    down = replace(_fault("nic_link_down", nic="rdma0"), time=there - 2.0)
    detector.feed(_sensor(down, sensor="nic", wall=there), 1.0, WALL)
    detector.feed(_sensor(ok=False, why="no amd-smi", wall=there + 1.0), 2.0, WALL + 1.0)
    assert [fault.time for fault in detector.check(5.0, WALL + 4.0)] == [WALL - 2.0, WALL + 1.0]
    detector.begin(2, ["node0", "node1"], 6.0)
    assert [fault.time for fault in detector.check(6.0, WALL + 5.0)] == [WALL - 2.0]


def test_in_a_new_attempt_an_error_counts_again_and_a_lasting_state_is_told_again() -> None:
    """The sensor of the link speaks of changes only: the new attempt would not know why it cannot communicate."""
    detector = _begun()
    ecc, down = _fault("gpu_ras_uncorrectable", gpu="3"), _fault("nic_link_down", nic="rdma0")
    low = _fault("memory_low", role="advisory")
    detector.feed(_sensor(ecc, down, low), 1.0)
    assert len(detector.check(1.0, WALL)) == 3
    detector.begin(2, ["node0", "node1"], 2.0)
    (again,) = detector.check(2.0, WALL)
    assert (again.kind, again.node, again.nic, again.time) == ("nic_link_down", "node1", "rdma0", down.time)
    detector.feed(_sensor(ecc, down, low), 3.0)
    assert [fault.kind for fault in detector.check(3.0, WALL)] == ["gpu_ras_uncorrectable"]
    detector.feed(_sensor(_fault("nic_link_down", nic="rdma0", cleared=True)), 4.0)
    assert [fault.cleared for fault in detector.check(4.0, WALL)] == [True]
    detector.begin(3, ["node0", "node1"], 5.0)
    assert detector.check(5.0, WALL) == []


def test_a_storm_is_thinned() -> None:
    detector = _begun()
    for number in range(1000):
        detector.feed(_sensor(_fault("pcie_error", gpu=str(number))), 1.0)
    assert 1 <= len(detector.check(1.0, WALL)) < 50
    detector.feed(_sensor(_fault("pcie_error", gpu="later")), 100.0)
    assert [fault.gpu for fault in detector.check(100.0, WALL)] == ["later"]


def test_an_unavailable_sensor_is_told_once_for_each_reason_and_when_it_is_back() -> None:
    detector = _begun()
    told = []
    for ok, why in ((True, ""), (False, "no amd-smi"), (False, ""), (False, "it hangs"), (True, ""), (True, "")):
        detector.feed(_sensor(ok=ok, why=why), 1.0)
        told += [(fault.kind, fault.role, fault.line, fault.cleared) for fault in detector.check(1.0, WALL)]
    assert told == [
        ("sensor_unavailable", "advisory", "gpu: no amd-smi", False),
        ("sensor_unavailable", "advisory", "gpu: it hangs", False),
        ("sensor_unavailable", "advisory", "gpu: can be read again", True),
    ]


def test_nothing_is_needed_to_begin_with() -> None:
    detector = Detector(SETTINGS)
    detector.feed(AgentReport(Stamp("node0", 1, WALL, 1.0), "started"), 1.0)
    assert detector.check(1.0, WALL) == []
    assert detector.step == -1
