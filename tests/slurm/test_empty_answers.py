"""What squeue does not say, or says of one run of a job, is no end of the job."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from zslurm.core.errors import SlurmUnavailable
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.jobs import FIELD_END, QUEUE_FIELDS, RECORD_END
from zslurm.slurm.run_command import Retries
from zslurm.slurm.states import JobState

UNKNOWN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"


def record(job_id: str, state: str, **fields: str) -> str:
    values = {"JobArrayID": job_id, "State": state, "Partition": "low", **fields}
    return FIELD_END.join(values.get(name, "") for name in QUEUE_FIELDS) + RECORD_END


class Slurm:
    """squeue and scontrol as scripts, and a client that finds them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.client = SlurmClient({"PATH": str(directory)}, retries=Retries(attempts=3, first_pause_s=0.0))

    def write(self, program: str, script: str) -> None:
        path = self.directory / program
        path.write_text(f'#!/bin/sh\necho "$@" >> {self.directory}/{program}.calls\n{script}\n')
        path.chmod(0o755)

    def calls(self, program: str) -> int:
        return (self.directory / f"{program}.calls").read_text().count("\n")


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    return Slurm(tmp_path)


def test_a_job_is_forgotten_only_if_the_controller_says_so(slurm: Slurm) -> None:
    slurm.write("squeue", UNKNOWN)
    assert slurm.client.queue(["7"]) == {}
    assert slurm.calls("squeue") == 1


@pytest.mark.parametrize("job_ids", [["7"], ["6", "7"]])
def test_an_empty_answer_says_nothing(slurm: Slurm, job_ids: list[str]) -> None:
    slurm.write("squeue", "exit 0")
    with pytest.raises(SlurmUnavailable, match=r"^squeue says nothing about job 7, not"):
        slurm.client.queue(job_ids)


def test_after_an_empty_answer_slurm_is_asked_again(slurm: Slurm, tmp_path: Path) -> None:
    shown = record("7", "RUNNING")
    slurm.write("squeue", f'[ -e {tmp_path}/once ] || {{ : > {tmp_path}/once; exit 0; }}; printf "%s" "{shown}"')
    assert slurm.client.queue(["7"])["7"].state is JobState.RUNNING


def test_several_jobs_that_are_all_forgotten(slurm: Slurm) -> None:
    """Of several, squeue leaves out those that it does not know; of one it says that it does not know it."""
    slurm.write("squeue", f'case "$*" in *--jobs=6,7*) exit 0;; esac; {UNKNOWN}')
    assert slurm.client.queue(["6", "7"]) == {}


def test_one_forgotten_job_is_no_end_of_the_others(slurm: Slurm, tmp_path: Path) -> None:
    """An empty answer about two jobs, of which the last is forgotten: the first runs."""
    shown = record("6", "RUNNING")
    first = f'[ -e {tmp_path}/once ] || {{ : > {tmp_path}/once; exit 0; }}; printf "%s" "{shown}"'
    slurm.write("squeue", f'case "$*" in *--jobs=6,7*) {first};; *) {UNKNOWN};; esac')
    assert slurm.client.queue(["6", "7"])["6"].state is JobState.RUNNING


def config(mode: str) -> str:
    return f'case "$*" in *config*) printf "PreemptMode = {mode}\\nPreemptType = preempt/qos\\n";; esac'


@pytest.mark.parametrize(
    ("mode", "requeue", "ended_ago_s", "state"),
    [
        ("REQUEUE", "1", 1, JobState.REQUEUED),
        ("GANG,REQUEUE", "1", 1, JobState.REQUEUED),
        ("CANCEL", "1", 1, JobState.PREEMPTED),
        ("REQUEUE", "0", 1, JobState.PREEMPTED),
        ("REQUEUE", "1", 3600, JobState.PREEMPTED),
    ],
)
def test_a_preempted_job_is_not_over_if_the_site_requeues_it(
    slurm: Slurm, mode: str, requeue: str, ended_ago_s: int, state: JobState
) -> None:
    ended = (datetime.now(UTC) - timedelta(seconds=ended_ago_s)).strftime("%Y-%m-%dT%H:%M:%S")
    shown = record("7", "PREEMPTED", EndTime=ended)
    slurm.write(
        "squeue", f'case "$*" in *=Requeue:0) echo {requeue};; *=QOS:0) ;; *) printf "%s" "{shown}";; esac'
    )
    slurm.write("scontrol", config(mode))
    assert slurm.client.queue(["7"])["7"].state is state


def test_steps_of_a_job_that_has_none(slurm: Slurm) -> None:
    slurm.write("scontrol", "echo 'Job step 7. not found'; exit 1")
    assert slurm.client.steps("7") == {}


def test_a_node_without_scontrol_lists_steps_by_squeue(slurm: Slurm) -> None:
    slurm.write("squeue", f'printf "%s" "7.0{FIELD_END}attempt-1{RECORD_END}"')
    assert slurm.client.steps("7") == {"7.0": "attempt-1"}
