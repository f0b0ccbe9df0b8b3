"""Who must agree before a silent node is dead, and who can save it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import get_args

import pytest

from tests.aegis.core.detection.simulated_training import Training
from zslurm.aegis.core.detection.witnesses import RanksElsewhere, WitnessReport, why_dead
from zslurm.core.reach import Reach
from zslurm.train.progress import Phase

# slurmd's port from here, the same port from the neighbours, what ranks elsewhere show -> dead
TABLE: list[tuple[Reach, tuple[Reach, ...], RanksElsewhere, bool]] = [
    # A lost machine: nothing comes back from anywhere, whatever the ranks do.
    ("nothing", ("nothing", "nothing"), "unknown", True),
    ("nothing", ("nothing",), "halted", True),
    ("nothing", ("nothing",), "lost_peers", True),
    ("nothing", ("unknown",), "halted", True),
    ("nothing", ("unknown",), "unknown", True),
    # Everything on it was killed, or it boots: its kernel refuses, and its ranks are gone.
    ("refuses", ("refuses",), "lost_peers", True),
    ("refuses", ("refuses",), "halted", True),
    # The site restarts slurmd beside a slow agent.
    ("refuses", ("refuses", "refuses"), "unknown", False),
    ("refuses", ("refuses",), "moving", False),
    # A slow agent, or one that waits for a stalled file system: the kernel accepts connections.
    ("answers", ("answers",), "unknown", False),
    ("answers", ("answers",), "halted", False),
    ("answers", ("answers",), "lost_peers", False),
    ("answers", ("nothing",), "lost_peers", False),
    # Only the way from the supervisor is broken.
    ("nothing", ("answers",), "halted", False),
    ("nothing", ("nothing", "answers"), "lost_peers", False),
    # A management network that is away while the training continues on another one.
    ("nothing", ("nothing", "nothing"), "moving", False),
    # Slurm does not show the port: ranks that halt or lost peers are not enough. A file system that stalls on the
    # node halts its agent and its ranks alike, and a rank that was killed elsewhere breaks connections.
    ("unknown", ("unknown",), "lost_peers", False),
    ("unknown", ("unknown",), "halted", False),
    ("unknown", ("unknown",), "unknown", False),
    # No neighbour answers: it is the supervisor that is cut off.
    ("nothing", (), "lost_peers", False),
    ("refuses", (), "halted", False),
]


def _witness_reports(slurmd: Reach, neighbours: tuple[Reach, ...], asked_at: float = 10.0) -> WitnessReport:
    seen: Mapping[str, Reach] = {f"node{number}": answer for number, answer in enumerate(neighbours, start=5)}
    return WitnessReport(asked_at, slurmd, seen)


@pytest.mark.parametrize(("slurmd", "neighbours", "ranks", "dead"), TABLE)
def test_two_of_three(slurmd: Reach, neighbours: tuple[Reach, ...], ranks: RanksElsewhere, *, dead: bool) -> None:
    assert (why_dead(_witness_reports(slurmd, neighbours), ranks) is not None) == dead


def test_no_single_witness_is_enough_and_any_sign_of_life_saves_the_node() -> None:
    answers = get_args(Reach)
    for slurmd, one, other, ranks in itertools.product(answers, answers, answers, get_args(RanksElsewhere)):
        if why_dead(_witness_reports(slurmd, (one, other)), ranks) is None:
            continue
        assert "answers" not in (slurmd, one, other)
        assert ranks != "moving"
        assert "nothing" in (slurmd, one, other) or ranks != "unknown", "a second witness besides the agent"


def test_the_reason_names_the_witnesses() -> None:
    assert why_dead(_witness_reports("refuses", ("refuses",)), "lost_peers") == (
        "its agent misses heartbeats, its slurmd refuses connections and ranks elsewhere have lost their peers"
    )
    assert why_dead(_witness_reports("nothing", ("nothing",)), "unknown") == (
        "its agent misses heartbeats, its slurmd does not answer and no neighbour reaches it"
    )


# --- in the course of a training ----------------------------------------------------------------------------


def _died(training: Training) -> None:
    training.silent.add(1)
    training.stopped |= {2: training.now, 3: training.now}


def test_a_dead_node_is_confirmed_long_before_its_heartbeat_timeout() -> None:
    training = Training(step_s=30.0)
    training.run(125)
    _died(training)
    assert training.run(2) == []
    (fault,) = training.run(1, witness_reports={"node1": _witness_reports("nothing", ("nothing",), training.now)})
    assert (fault.kind, fault.node) == ("node_dead", "node1")
    assert fault.line.endswith("its slurmd does not answer and no neighbour reaches it")
    assert training.run(60) == [], "it is named once"


@pytest.mark.parametrize("phase", [Phase.SETUP, Phase.SAVE, Phase.EVAL])
def test_in_every_phase_a_stalled_file_system_kills_no_node(phase: Phase) -> None:
    training = Training(nodes=3)
    training.run(31)
    training.phase = phase
    _died(training)
    for _ in range(30):
        training.run(
            1, witness_reports={"node1": _witness_reports("answers", ("answers", "answers"), training.now)}
        )
    assert training.found == []


def test_ranks_that_finish_steps_show_that_the_node_lives() -> None:
    """Its management network is away; the training uses another one."""
    training = Training(step_s=0.5)
    training.run(31)
    training.silent.add(1)
    for _ in range(30):
        training.run(1, witness_reports={"node1": _witness_reports("nothing", ("nothing",), training.now - 0.9)})
    assert training.kinds(training.found) == [("agent_lost", "node1", None)]


def test_killed_processes_are_confirmed_once_the_other_ranks_halt_for_longer_than_steps_take() -> None:
    training = Training(step_s=0.5)
    training.run(31)
    _died(training)
    assert (
        training.run(1, witness_reports={"node1": _witness_reports("refuses", ("refuses",), training.now + 0.5)})
        == []
    )
    (fault,) = training.run(
        2, witness_reports={"node1": _witness_reports("refuses", ("refuses",), training.now + 0.5)}
    )
    assert fault.line.endswith("its slurmd refuses connections and no rank elsewhere finishes a step")


def test_an_agent_that_was_heard_again_answers_for_its_node() -> None:
    training = Training()
    training.run(31)
    asked_at = training.now
    training.second()
    assert training.run(5, witness_reports={"node1": _witness_reports("nothing", ("nothing",), asked_at)}) == []


def test_a_node_without_ranks_is_not_the_training_s_matter() -> None:
    training = Training()
    training.run(31)
    assert (
        training.run(5, witness_reports={"spare": _witness_reports("nothing", ("nothing",), training.now)}) == []
    )
