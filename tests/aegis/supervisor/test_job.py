"""Whether the run was asked to stop, by whom, and whether its job is to come back."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.submit.specs import run_spec
from zslurm.aegis.supervisor import job as job_module
from zslurm.aegis.supervisor.job import Job, JobStop
from zslurm.core.errors import SlurmRefused, SlurmUnavailable
from zslurm.run.run_dir import RunDir
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.preemption import Preemption

IN_GRACE = Preemption(1.0, "requeue", done=False, ends_at=31.0)
DONE = Preemption(1.0, "requeue", done=True)


@pytest.mark.parametrize(
    ("signum", "preemption", "asked", "comes_back"),
    [
        (None, None, False, False),
        (signal.SIGTERM, None, True, False),
        (signal.SIGINT, None, True, False),
        (signal.SIGUSR1, None, True, True),
        (signal.SIGUSR2, None, True, True),
        (None, IN_GRACE, True, True),
        (signal.SIGUSR2, IN_GRACE, True, True),
        (signal.SIGTERM, IN_GRACE, True, False),
        (signal.SIGTERM, DONE, True, False),
        (None, DONE, True, False),
    ],
)
def test_who_asks_and_what_becomes_of_the_job(
    signum: int | None, preemption: Preemption | None, asked: bool, comes_back: bool
) -> None:
    stop = JobStop(signum, preemption=preemption)
    assert (stop.asked, stop.comes_back) == (asked, comes_back)
    assert stop.requeued is (preemption is DONE)


@pytest.mark.parametrize(
    ("signum", "preemption", "asked_by"),
    [(signal.SIGTERM, IN_GRACE, "SIGTERM"), (None, IN_GRACE, "preempted"), (None, None, "by Slurm")],
)
def test_what_asked_has_a_name(signum: int | None, preemption: Preemption | None, asked_by: str) -> None:
    assert JobStop(signum, preemption=preemption).asked_by == asked_by


def test_an_unanswered_question_is_told_from_the_answer_no(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    spec = run_spec(tmp_path, cluster={"name": "lab", "launcher": "slurm"})
    job = Job(RunDir(tmp_path), spec, {}, "7", 0, lambda event: events.append(event.NAME))
    answers: list[Preemption | Exception | None] = [
        SlurmUnavailable("away"), SlurmRefused("no such field"), None, IN_GRACE, SlurmUnavailable("away"), DONE,
    ]  # fmt: skip

    def find(*_: object) -> Preemption | None:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(job_module, "find_preemption", find)
    monkeypatch.setattr(SlurmClient, "can_control", lambda _: True)
    assert [job.look_for_preemption() for _ in range(6)] == [False, True, True, True, False, True]
    assert (events, job.stop.preemption) == (["preempted"], DONE)
