"""What a task does at SIGTERM: Slurm is asked why; tests/on_slurm/test_preemption.py has the real one."""

from __future__ import annotations

import os
import signal
from datetime import UTC, datetime
from pathlib import Path

import pytest
from submitit import helpers
from submitit.core import utils

from zslurm.core.errors import SlurmUnavailable
from zslurm.slurm import client, preemption
from zslurm.slurm.preemption import Preemption
from zslurm.submit.plugin.job_environment import ZslurmJobEnvironment


class Work(helpers.Checkpointable):
    """A function with a checkpoint."""

    def __call__(self) -> None:
        """Do nothing."""


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> utils.JobPaths:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "zslurm")
    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_PROCID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(client.SlurmClient, "can_control", lambda self: True)
    monkeypatch.setattr(client.SlurmClient, "queue", lambda self, jobs: {})
    return utils.JobPaths(tmp_path, job_id="7", task_id=0)


def slurm_says(monkeypatch: pytest.MonkeyPatch, found: Preemption | None) -> None:
    monkeypatch.setattr(preemption, "find_preemption", lambda client, job_id, restart: found)


def terminated(
    paths: utils.JobPaths, monkeypatch: pytest.MonkeyPatch, requeued: list[int] | None = None
) -> list[int]:
    """Give the handler of SIGTERM its signal; returns the countdowns with which the job was requeued."""
    requeued = [] if requeued is None else requeued
    environment = ZslurmJobEnvironment()
    monkeypatch.setattr(environment, "_requeue", requeued.append)
    delayed = utils.DelayedSubmission(Work())
    delayed.set_timeout(60, 3)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGCONT, signal.SIGUSR2)}
    try:
        environment._handle_signals(paths, delayed)
        handler = signal.getsignal(signal.SIGTERM)
        assert callable(handler)
        handler(signal.SIGTERM, None)
    finally:
        for number, before in handlers.items():
            signal.signal(number, before)
    return requeued


NOW = datetime.now(UTC).timestamp()


def test_a_preempted_job_checkpoints_and_requeues_itself(
    paths: utils.JobPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm_says(monkeypatch, Preemption(NOW, "requeue", done=False))
    requeued: list[int] = []
    with pytest.raises(SystemExit):
        terminated(paths, monkeypatch, requeued)
    assert requeued == [3]  # a preemption is no time-out
    assert paths.submitted_pickle.exists()


@pytest.mark.parametrize("preempted", [True, False])
def test_the_other_signal_of_a_preemption_meanwhile_neither_breaks_the_checkpoint_nor_is_lost(
    preempted: bool, paths: utils.JobPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The site has send_user_signal: SIGUSR2 comes while Slurm is asked why SIGTERM came."""
    requeued: list[int] = []

    def find(*_: object) -> Preemption | None:
        os.kill(os.getpid(), signal.SIGUSR2)
        return Preemption(NOW, "requeue", done=False) if preempted else None

    monkeypatch.setattr(preemption, "find_preemption", find)
    with pytest.raises(SystemExit):
        terminated(paths, monkeypatch, requeued)
    assert requeued == [3]
    assert paths.submitted_pickle.exists()


def test_a_job_that_slurm_has_requeued_only_checkpoints(
    paths: utils.JobPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm_says(monkeypatch, Preemption(NOW, "requeue", done=True))
    with pytest.raises(SystemExit):
        terminated(paths, monkeypatch)
    assert paths.submitted_pickle.exists()


def test_a_job_that_preemption_cancels_checkpoints_and_says_why_it_ends(
    paths: utils.JobPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm_says(monkeypatch, Preemption(NOW, "cancel", done=False))
    with pytest.raises(utils.UncompletedJobError, match="PreemptMode=CANCEL"):
        terminated(paths, monkeypatch)
    assert paths.submitted_pickle.exists()


def test_a_job_that_a_user_ends_does_as_submitit_s(paths: utils.JobPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm_says(monkeypatch, None)
    assert terminated(paths, monkeypatch) == []
    assert not paths.submitted_pickle.exists()


def test_other_tasks_leave_it_to_the_first(paths: utils.JobPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm_says(monkeypatch, Preemption(NOW, "requeue", done=False))
    monkeypatch.setenv("SLURM_PROCID", "1")
    assert terminated(paths, monkeypatch) == []


def test_a_controller_that_does_not_answer_ends_no_task(
    paths: utils.JobPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise SlurmUnavailable("squeue: away")

    monkeypatch.setattr(preemption, "find_preemption", away)
    assert terminated(paths, monkeypatch) == []


def test_nodes_without_scontrol_end_the_job_with_a_line(
    paths: utils.JobPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(utils.UncompletedJobError, match="compute nodes have no scontrol"):
        ZslurmJobEnvironment()._requeue(2)
