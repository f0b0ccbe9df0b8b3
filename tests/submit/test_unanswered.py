"""A submission that sbatch got no answer for: its job is found by its script and adopted, or ends by itself."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.submit.scripted_slurm import RUNNING, ScriptedSlurm
from tests.submit.specs import run_spec
from tests.train.runs import make_corpus
from zslurm.config.spec import RunSpec
from zslurm.core.errors import SlurmRefused, SlurmUnavailable
from zslurm.run.run_dir import RunDir
from zslurm.run.state.run_state import last_job
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.jobs import FIELD_END, RECORD_END
from zslurm.submit.control import cancel_stray
from zslurm.submit.script.render import render
from zslurm.submit.submit import submit

TIMED_OUT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedSlurm:
    make_corpus(tmp_path / "tokens.h5")
    return ScriptedSlurm(tmp_path / "slurm", monkeypatch)


def _spec(tmp_path: Path) -> RunSpec:
    return run_spec(tmp_path, cluster={"name": "lab", "launcher": "slurm"})


def _times_out(slurm: ScriptedSlurm, *, looks_in_vain: int | None, state: str = "PENDING") -> None:
    """sbatch gets no answer; squeue shows the job after some looks, or never."""
    directory = slurm.directory
    slurm.write_program("sbatch", f'echo "$1" > {directory}/script; echo "{TIMED_OUT}" >&2; exit 1')
    record = f"4711{FIELD_END}{state}{FIELD_END}$script{RECORD_END}"
    shows = f'[ $looks -lt {looks_in_vain} ] || printf "%s" "{record}"' if looks_in_vain is not None else ""
    slurm.write_program(
        "squeue",
        f"""read -r script < {directory}/script
looks=0; [ ! -e {directory}/looks ] || read -r looks < {directory}/looks
echo $((looks + 1)) > {directory}/looks
printf "%s" "12{FIELD_END}RUNNING{FIELD_END}/other/script.sh{RECORD_END}"
{shows}""",
    )


@pytest.mark.parametrize("looks_in_vain", [0, 3])
def test_a_job_that_slurm_has_all_the_same_is_adopted(
    slurm: ScriptedSlurm, tmp_path: Path, looks_in_vain: int
) -> None:
    _times_out(slurm, looks_in_vain=looks_in_vain)
    done = submit(_spec(tmp_path))
    assert done.job_id == "4711"
    job = last_job(done.run)
    assert job is not None
    assert job.job_id == "4711"
    assert (done.run.submitit / "4711_submitted.pkl").exists(), "what the job runs"


@pytest.mark.parametrize("state", ["FAILED", "COMPLETING"])
def test_a_job_that_has_ended_is_not_adopted(slurm: ScriptedSlurm, tmp_path: Path, state: str) -> None:
    _times_out(slurm, looks_in_vain=0, state=state)
    with pytest.raises(SlurmRefused, match=r"got no answer .*, and its job 4711 ended; submit again"):
        submit(_spec(tmp_path))


def test_a_user_without_a_passwd_entry_is_asked_for_by_number(slurm: ScriptedSlurm) -> None:
    slurm.write_program("squeue", f'echo "$*" > {slurm.directory}/asked')
    assert SlurmClient().job_of_script("/some/script.sh") is None
    assert f"--user={os.getuid()} " in (slurm.directory / "asked").read_text()


def test_where_slurm_shows_no_such_job_that_is_said_and_nothing_is_recorded(
    slurm: ScriptedSlurm, tmp_path: Path
) -> None:
    _times_out(slurm, looks_in_vain=None)
    spec = _spec(tmp_path)
    with pytest.raises(SlurmUnavailable, match="shows no job of this submission; a job that appears later ends"):
        submit(spec)
    run = RunDir(Path(spec.run.runs_dir) / spec.run.name)
    assert last_job(run) is None
    assert not list(run.submitit.glob("*.pkl"))


def test_a_job_whose_submission_was_not_recorded_waits_for_sbatch_and_ends_with_one_line(tmp_path: Path) -> None:
    spec = _spec(tmp_path)
    run = RunDir(Path(spec.run.runs_dir) / spec.run.name)
    run.create(group_readable=False)
    text = render(spec, run).text.replace("sleep 1", "echo waited")
    done = subprocess.run(
        ["bash", "-c", text], env={"SLURM_JOB_ID": "4712", "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("supervisor:")]
    assert (done.returncode, len(lines)) == (93, 1), done.stdout + done.stderr
    assert "job 4712 ends: its submission was not recorded" in lines[0]
    assert done.stdout.count("waited") > 100, "the MessageTimeout of Slurm, for which sbatch waits"


def test_a_directory_whose_name_is_a_number_is_meant_before_a_job(
    slurm: ScriptedSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`zslurm cancel 4` of a run whose directory was renamed to 4 must not end job 4, which is another run's."""
    slurm.gives(RUNNING)
    run = submit(_spec(tmp_path)).run
    run.path.rename(run.path.with_name(RUNNING))
    monkeypatch.chdir(run.path.parent)
    assert cancel_stray(RUNNING) is None
