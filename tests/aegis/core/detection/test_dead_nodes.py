"""Which node is dead when heartbeats are missed, and when only its agent is lost."""

from __future__ import annotations

import pytest

from tests.aegis.core.detection.simulated_training import SETTINGS, Training
from zslurm.aegis.protocol import ProgressReport
from zslurm.train.progress import Phase


def test_a_silent_node_is_dead_when_no_rank_finishes_a_step() -> None:
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


def test_no_node_is_dead_if_all_but_the_supervisors_own_are_silent() -> None:
    """Its own node has lost its connections. Its ranks hang in the end, so that the run does not wait forever."""
    training = Training(nodes=4)
    training.run(31)
    training.silent |= {1, 2, 3}
    training.stopped |= dict.fromkeys(range(2, 8), training.now)
    for node in ("node1", "node2"):
        training.detector.nodes.take_unreachable(node, "srun starts nothing there")
    assert training.run(18, own_node="node0") == []
    assert training.kinds(training.run(10, own_node="node0")) == [("rank_hang", None, None)]


def test_whether_a_link_is_up_again_is_not_known_if_the_supervisors_own_node_is_cut_off() -> None:
    training = Training(nodes=3)
    training.run(31)
    training.silent |= {1, 2}
    training.stopped |= dict.fromkeys(range(2, 6), training.now)
    (fault,) = training.run(12, own_node="node0", halted_by={"node2"})
    assert (fault.kind, fault.role, fault.node) == ("agent_lost", "advisory", "node2")
    assert "may be cut off" in fault.line


def test_while_the_supervisors_own_node_is_cut_off_a_halt_proves_nothing_about_a_silent_node() -> None:
    training = Training(nodes=3)
    training.run(31)
    training.silent |= {1, 2}
    training.stopped |= dict.fromkeys((2, 3), training.now)
    training.run(7, own_node="node0")
    training.silent.remove(2)
    assert training.run(4, own_node="node0") == []
    assert training.kinds(training.run(8, own_node="node0")) == [("node_dead", "node1", None)]


def test_agents_that_report_rarely_do_not_look_as_if_this_node_were_cut_off() -> None:
    """Between two reports all of them are silent, this node's own included."""
    settings = SETTINGS.model_copy(update={"sensors": SETTINGS.sensors.model_copy(update={"progress_s": 6.0})})
    training = Training(nodes=4, settings=settings)
    training.run(31)
    training.stopped |= {6: training.now, 7: training.now}
    for _ in range(6):
        training.silent = {0, 1, 2, 3}
        training.run(5, own_node="node0")
        training.silent = {3}
        training.run(1, own_node="node0")
    assert ("node_dead", "node3", None) in training.kinds(training.found)


def test_a_node_that_slurm_calls_down_is_dead_though_all_others_are_silent() -> None:
    training = Training(nodes=4)
    training.run(31)
    training.silent |= {1, 2, 3}
    training.stopped |= dict.fromkeys(range(2, 8), training.now)
    faults = training.run(12, own_node="node0", trouble={"node2": "Slurm says down"})
    assert training.kinds(faults) == [("node_dead", "node2", None)]


def test_a_node_that_died_before_does_not_count_among_the_silent() -> None:
    training = Training(nodes=3)
    training.run(31)
    training.silent.add(1)
    training.stopped |= dict.fromkeys((2, 3), training.now)
    assert training.kinds(training.run(15, own_node="node0")) == [("node_dead", "node1", None)]
    training.silent.add(2)
    faults = training.run(12, own_node="node0", lost_peers=True)
    assert training.kinds(faults) == [("node_dead", "node2", None)]


def test_while_training_continues_only_the_agent_is_lost() -> None:
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


def test_a_lost_agent_does_not_make_its_node_the_cause_of_a_later_hang() -> None:
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


def test_where_all_agents_are_silent_no_node_is_dead() -> None:
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
    late = ProgressReport(training.stamp(2), training.attempt, tuple(training.record(rank) for rank in (4, 5)))
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


def test_a_supervisor_that_was_stopped_itself_names_no_node() -> None:
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
