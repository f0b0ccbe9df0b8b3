"""A command that runs as a job: the same command line, its output and its exit code; Slurm is in scripts here."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.submit.scripted_slurm import NO_CONTROLLER, ScriptedSlurm
from zslurm.cluster.profile import save_profile
from zslurm.core.errors import ConfigError, SlurmUnavailable, ZslurmError
from zslurm.run.index import state_dir
from zslurm.submit import as_job
from zslurm.submit.as_job import run_as_job

PROFILE = """
cluster: {cpus_per_node: 6, modules: [rocm], env: {HF_TOKEN: abcdefgh, A: "1"}}
slurm: {partition: cpu, account: lab}
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedSlurm:
    """sbatch keeps the script and runs `job` in its place."""
    scripted = ScriptedSlurm(tmp_path / "bin", monkeypatch)
    for program in ("scontrol", "bash", "sed"):
        scripted.write_program(program, "exit 1")
    save_profile("lab", PROFILE, make_default=True)
    monkeypatch.setattr(as_job, "POLL_S", 0.01)
    monkeypatch.setattr(as_job, "ASK_SLURM_EVERY_S", 0.0)
    return scripted


def job_does(slurm: ScriptedSlurm, shell: str) -> None:
    slurm.write_program(
        "sbatch", f'place=${{2%/script.sh}}; cat "$2" > {slurm.directory}/submitted; {shell}; echo 7'
    )


def test_the_job_runs_the_same_command_and_its_words_and_code_come_back(
    slurm: ScriptedSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    job_does(slurm, 'echo data > "$place/output"; echo note > "$place/messages"; echo 5 > "$place/exit-code"')
    assert run_as_job(["checkpoint", "verify", "a b", "--slurm"]) == 5
    said = capsys.readouterr()
    assert said.out == "data\n"
    assert said.err == "zslurm checkpoint verify 'a b' --workers 6 runs as job 7; Ctrl-C cancels it\nnote\n"
    script = slurm.submitted
    assert "-m zslurm checkpoint verify 'a b' --workers 6\n" in script
    assert "--slurm" not in script
    for option in (
        "job-name=zslurm-checkpoint-verify",
        "nodes=1",
        "cpus-per-task=6",
        "partition=cpu",
        "account=lab",
    ):
        assert f"#SBATCH --{option}\n" in script
    assert "module load rocm" in script
    assert "abcdefgh" not in script
    assert list((state_dir() / "tools").iterdir()) == [], "nothing stays of what went well"


def test_the_script_is_shell_and_leaves_the_code(slurm: ScriptedSlurm, tmp_path: Path) -> None:
    job_does(slurm, 'echo 0 > "$place/exit-code"')
    run_as_job(["data", "build", "x", "--workers", "3"])
    assert "--workers 3\n" in slurm.submitted
    assert "--workers 6" not in slurm.submitted
    subprocess.run(["/bin/bash", "-n"], input=slurm.submitted, text=True, check=True)


def test_a_job_that_leaves_nothing_is_an_error_that_says_where_its_output_is(slurm: ScriptedSlurm) -> None:
    job_does(slurm, 'echo oom > "$place/messages"')
    with pytest.raises(ZslurmError, match=r"^job 7 ended without a result; its output is in /"):
        run_as_job(["checkpoint", "verify", "x"])


def test_slurm_that_is_away_or_not_there_is_said(slurm: ScriptedSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm.refuses(NO_CONTROLLER)
    with pytest.raises(SlurmUnavailable):
        run_as_job(["checkpoint", "verify", "x"])
    monkeypatch.setenv("ZSLURM_CLUSTER", "local")
    with pytest.raises(ConfigError, match="the profile `local` is this machine"):
        run_as_job(["checkpoint", "verify", "x"])
    (slurm.directory / "sbatch").unlink()
    with pytest.raises(ConfigError, match="leave --slurm out to run the command here"):
        run_as_job(["checkpoint", "verify", "x"])


def test_a_controller_that_is_away_while_the_job_runs_does_not_end_it(
    slurm: ScriptedSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(as_job, "ASK_SLURM_EVERY_S", -1.0)
    monkeypatch.setattr(as_job, "POLL_S", 0.0)
    asked = slurm.directory / "asked"
    job_does(slurm, f'echo "$place" > {slurm.directory}/place')
    slurm.write_program(
        "squeue",
        f'read -r place < {slurm.directory}/place; [ -e {asked} ] && echo 0 > "$place/exit-code"; : > {asked}; '
        "echo Unable to contact slurm controller >&2; exit 1",
    )
    assert run_as_job(["checkpoint", "verify", "x"]) == 0
