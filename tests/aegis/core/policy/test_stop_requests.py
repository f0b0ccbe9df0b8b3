"""What the policy decides if the run was asked to stop: by a person, a time limit, a preemption."""

from __future__ import annotations

import pytest

from tests.aegis.attempts import (
    fault,
    history,
    incident,
)
from tests.aegis.core.policy.decisions import WITH_SPARE, decided


class TestStopRequest:
    def test_a_completed_run_is_finished_whatever_was_noticed(self) -> None:
        assert decided(fault("gpu_ras_uncorrectable"), outcome="completed").action == "finish"

    @pytest.mark.parametrize("signal", ["SIGTERM", "SIGINT"])
    @pytest.mark.parametrize("outcome", ["interrupted", "failed"])
    def test_asked_by_a_person(self, signal: str, outcome: str) -> None:
        decision = decided(fault("rank_killed"), asked_to_stop=signal, outcome=outcome)
        assert (decision.action, decision.exclude) == ("finish", ())

    def test_requeued_by_slurm(self) -> None:
        assert decided(fault("rank_killed"), requeued=True).action == "finish"
        said = fault("slurm_requeue", role="teardown", source="srun")
        assert decided(fault("rank_killed"), said).action == "finish"
        rumour = fault("slurm_preempt", role="teardown", source="log")
        assert decided(fault("rank_killed"), rumour).action == "restart"

    def test_saved_without_being_asked_by_us(self) -> None:
        assert decided(outcome="interrupted").action == "finish"

    def test_saved_because_of_a_fault(self) -> None:
        assert decided(fault("gpu_bad_pages"), outcome="interrupted", there=WITH_SPARE).action == "swap"

    @pytest.mark.parametrize("outcome", ["interrupted", "failed"])
    def test_time_limit(self, outcome: str) -> None:
        limit = {"asked_to_stop": "SIGUSR2", "outcome": outcome}
        killed = fault("rank_killed", source="srun")
        decision = decided(killed, **limit)
        assert (decision.action, decision.exclude, decision.n_nodes) == ("requeue", (), None)
        assert decision.root is not None
        assert decision.root.kind == "slurm_time_limit"
        assert decided(killed, says={"requeue_at_time_limit": False}, **limit).action == "finish"
        assert decided(killed, there={"can_requeue": False}, **limit).action == "finish"
        assert decided(killed, says={"retries": 0}, **limit).action == "requeue"

    @pytest.mark.parametrize("signal", [None, "SIGUSR2"])
    @pytest.mark.parametrize("outcome", ["interrupted", "failed"])
    def test_preempted_in_a_grace_time(self, signal: str | None, outcome: str) -> None:
        """Back into the queue, whatever the settings say of the time limit: nothing is blamed or counted."""
        asked = {"preempted": "requeue", "asked_to_stop": signal, "outcome": outcome}
        killed = fault("rank_killed", source="srun")
        decision = decided(killed, says={"requeue_at_time_limit": False, "retries": 0}, **asked)
        assert (decision.action, decision.exclude) == ("requeue", ())
        assert decision.root is not None
        assert decision.root.kind == "slurm_preempt"
        assert decided(killed, there={"can_requeue": False}, **asked).action == "finish"
        assert decided(fault("gpu_bad_pages"), **asked).exclude == ("node1",), "what is broken stays behind"
        often = history(*[incident(decision.root, action="requeue")] * 9)
        assert decided(past=often, **asked).action == "requeue"
        assert decided(fault("user_error"), past=often).action == "restart", "no retry is spent"

    def test_preempted_and_cancelled_or_requeued_by_slurm(self) -> None:
        assert decided(preempted="cancel", outcome="interrupted").action == "finish"
        assert decided(preempted="cancel", asked_to_stop="SIGUSR2", outcome="interrupted").action == "finish"
        due_to = fault("slurm_preempt", role="teardown", source="srun")  # srun reports it in either mode
        assert "cancels it" in decided(due_to, preempted="cancel", outcome="interrupted").reason
        assert decided(preempted="requeue", requeued=True, asked_to_stop="SIGTERM").action == "finish"
        cancelled = decided(preempted="requeue", asked_to_stop="SIGTERM", outcome="interrupted")
        assert cancelled.action == "finish", "a person cancelled the job in its grace time"

    @pytest.mark.parametrize("signal", ["SIGUSR1", "SIGUSR2"])
    def test_either_user_signal_is_a_time_limit(self, signal: str) -> None:
        assert decided(asked_to_stop=signal, outcome="interrupted").action == "requeue"

    def test_time_limit_that_slurm_itself_reports(self) -> None:
        said = fault("slurm_time_limit", role="teardown", source="srun")
        assert decided(fault("rank_killed", source="srun"), said).action == "requeue"

    def test_time_limit_takes_a_broken_node_along(self) -> None:
        for outcome in ("interrupted", "failed"):
            decision = decided(fault("gpu_bad_pages"), asked_to_stop="SIGUSR2", outcome=outcome)
            assert (decision.action, decision.exclude) == ("requeue", ("node1",))

    def test_time_limits_between_which_nothing_is_saved(self) -> None:
        limit = fault("slurm_time_limit", role="teardown")
        in_vain = history(*[incident(limit, action="requeue")] * 4)
        says = {"asked_to_stop": "SIGUSR2", "outcome": "interrupted"}
        assert decided(past=in_vain, **says).action == "stop"
        assert decided(past=in_vain, step=41, **says).action == "requeue"
        assert decided(fault("user_error"), past=in_vain).action == "restart"
