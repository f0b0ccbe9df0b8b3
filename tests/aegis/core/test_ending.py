"""What is waited for at the end of an attempt, and for how long."""

from __future__ import annotations

import pytest

from zslurm.aegis.core import ending
from zslurm.aegis.core.agents import why_step_given_up
from zslurm.aegis.core.messages import StopState
from zslurm.aegis.core.policy.outcome import AttemptOutcome
from zslurm.aegis.core.policy.shrinking import Weighed, why_not_fewer
from zslurm.aegis.fault_kinds import EARLY_EXIT
from zslurm.aegis.types import Fault
from zslurm.config.aegis import AegisSection
from zslurm.train.errors import ConfigError

DAY_S = 86400.0
PREEMPTED = StopState(asked=True, preempted="requeue")
EARLY = [Fault.of_kind(EARLY_EXIT, 1.0, "srun", "exited", node="node0", rank=0)]


def outcome(name: str) -> AttemptOutcome:
    made = AttemptOutcome.of({"outcome": name, "exit_code": 1})
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("name", "stop", "asks"),
    [
        ("interrupted", StopState(), True),
        ("interrupted", StopState(asked=True, name="SIGUSR2"), True),
        ("interrupted", PREEMPTED, False),
        ("failed", StopState(), False),
    ],
)
def test_slurm_is_asked_who_stopped_the_ranks_unless_a_preemption_is_known(
    name: str, stop: StopState, asks: bool
) -> None:
    assert ending.asks_who_stopped(outcome(name), stop) is asks


def test_slurms_answer_is_waited_for_through_an_outage_of_hours_and_not_for_ever() -> None:
    assert ending.gives_up_answer(10 * 3600.0) == ""
    assert "has not answered for 86400 s" in ending.gives_up_answer(DAY_S)


@pytest.mark.parametrize(
    ("stop", "awaits"),
    [
        (PREEMPTED, True),
        (StopState(asked=True, preempted="requeue", requeued=True), False),
        (StopState(asked=True, preempted="requeue", name="SIGTERM"), False),
        (StopState(asked=True, preempted="cancel"), False),
        (StopState(), False),
    ],
)
def test_only_a_requeue_by_slurm_that_is_not_done_is_left_to_slurm(stop: StopState, awaits: bool) -> None:
    assert ending.awaits_slurm(stop) is awaits


def test_slurms_requeue_is_waited_for_longer_than_the_grace_time() -> None:
    assert ending.gives_up_slurm(DAY_S, grace_s=-5.0) != ""
    assert ending.gives_up_slurm(DAY_S + 600.0, grace_s=601.0) == ""


def test_ranks_of_a_lost_run_directory_save_elsewhere_as_long_as_they_may() -> None:
    assert ending.awaits_rescue(5.0, 6.0, can_save=True, runs=True)
    assert not ending.awaits_rescue(6.0, 6.0, can_save=True, runs=True)
    assert not ending.awaits_rescue(0.0, 6.0, can_save=False, runs=True)
    assert not ending.awaits_rescue(0.0, 6.0, can_save=True, runs=False)


def test_records_are_waited_for_while_ranks_seem_to_have_exited_too_early() -> None:
    assert ending.awaits_records(EARLY, 5.0)
    assert not ending.awaits_records(EARLY, 5.1)
    assert not ending.awaits_records([], 0.0)


def test_only_an_attempt_whose_ranks_did_not_leave_by_themselves_is_cleared() -> None:
    cleared = [
        name for name in ("completed", "interrupted", "failed", "lost") if ending.is_to_be_cleared(outcome(name))
    ]
    assert cleared == ["failed", "lost"]


def test_a_step_of_agents_that_takes_no_command_is_given_up_before_a_deputy_acts() -> None:
    assert why_step_given_up(6.0) == ""
    assert why_step_given_up(6.1) != ""
    assert why_step_given_up(AegisSection().standby_s / 2) != ""


def refuse() -> None:
    raise ConfigError("phases[0].global_batch (2) has fewer sequences than there are ranks")


@pytest.mark.parametrize(
    ("least", "nodes", "divides", "weighed", "why"),
    [
        (None, 2, True, None, "aegis.min_nodes is not set"),
        (3, 2, True, None, "aegis.min_nodes is 3"),
        (2, 2, False, None, "phases[0].global_batch (2) has fewer sequences than there are ranks"),
        (2, 2, True, None, ""),
        (2, 2, True, Weighed(2, 1.5, 60.0, 120.0), ""),
        (2, 2, True, Weighed(2, 1.5, 120.0, 60.0), str(Weighed(2, 1.5, 120.0, 60.0))),
    ],
)
def test_ranks_that_survive_continue_on_fewer_nodes_if_that_is_allowed_possible_and_cheaper(
    least: int | None, nodes: int, divides: bool, weighed: Weighed | None, why: str
) -> None:
    settings = AegisSection(min_nodes=least)
    found = why_not_fewer(nodes, settings, (lambda: None) if divides else refuse, lambda: weighed)
    assert (found.reason, found.weighed) == (why, weighed)
