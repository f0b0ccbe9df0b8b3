"""The small commands: completion, and what `status` says if Slurm does not answer."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.checkpoint_tools.saves import save
from tests.cli.commands import Shell, fresh_zslurm, separate_zslurm
from tests.slurm.recordings import recorded
from tests.submit.scripted_slurm import ScriptedSlurm
from tests.submit.specs import run_spec
from zslurm.config.load import load_spec
from zslurm.core.errors import Exit
from zslurm.run import index
from zslurm.run.events import Submitted
from zslurm.run.index import IndexedJob, new_entry
from zslurm.run.run_dir import RunDir
from zslurm.slurm import queue_view
from zslurm.submit.submit import record_action
from zslurm.train.jsonl import JsonLinesWriter


def _completed(shell: Shell, line: str) -> list[str]:
    """What bash offers at the end of a line."""
    asked = {"_ZSLURM_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    done = separate_zslurm(cwd=shell.directory, PATH="/nonexistent", **asked)
    assert done.stderr == ""
    return done.stdout.split()


def test_the_shell_completes_keys_recipes_templates_checks_and_states(shell: Shell) -> None:
    assert "phases[0].lr=" in _completed(shell, "zslurm submit run.yaml --set phases[0].l")
    assert _completed(shell, "zslurm config show run.yaml --set slurm.node") == ["slurm.nodes=", "slurm.nodelist="]
    assert _completed(shell, "zslurm new --recipe zaya1-1") == ["zaya1-100m", "zaya1-1b"]
    assert _completed(shell, "zslurm config template show tr") == ["train"]
    assert _completed(shell, "zslurm doctor --only gpu-e") == ["gpu-ecc"]
    assert _completed(shell, "zslurm status --state failed,com") == ["failed,completing", "failed,completed"]
    assert _completed(shell, "zslurm cluster use loc") == ["local"]


def test_the_shell_completes_tensors_of_the_checkpoint(shell: Shell) -> None:
    save(shell.directory, 400)
    found = _completed(shell, "zslurm checkpoint show step-00000400 --tensor layers.0.e")
    assert found == ["layers.0.experts.up"]
    assert _completed(shell, "zslurm checkpoint show none --tensor lay") == []


def test_the_shell_completes_commands_runs_and_clusters(shell: Shell) -> None:
    for name, job_id in (("alpha", "41"), ("beta", "412")):
        run = shell.directory / "elsewhere" / name
        run.mkdir(parents=True)
        (run / "config.json").write_text("{}")
        index.record(IndexedJob(job_id, run, "lab", "slurm", 0.0))
    assert _completed(shell, "zslurm stat") == ["status"]
    assert _completed(shell, "zslurm status al") == ["alpha"]
    assert _completed(shell, "zslurm logs -f ") == ["alpha", "beta"]
    assert _completed(shell, "zslurm cancel 41") == ["41", "412"]
    assert "local" in _completed(shell, "zslurm submit run.yaml --cluster lo")


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_the_script_for_the_shell_is_printed(shell: Shell, name: str) -> None:
    done = shell.zslurm("completion", name)
    assert done.code == 0
    assert "_ZSLURM_COMPLETE" in done.stdout
    assert "zslurm" in done.stdout
    assert shell.zslurm("completion", "csh").code == Exit.USAGE


@pytest.fixture
def on_slurm(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> tuple[ScriptedSlurm, RunDir]:
    """A run that is job 4 of recorded.SQUEUE, which runs on node[0-1]."""
    slurm = ScriptedSlurm(shell.directory / "bin", monkeypatch)
    slurm.gives("4")
    run = RunDir(shell.directory / "runs" / "tiny")
    run.create(group_readable=False)
    spec = run_spec(shell.directory, cluster={"name": "lab", "launcher": "slurm"})
    run.config.write_text(spec.model_dump_json())
    record_action(run, Submitted(job_id="4"), spec)
    index.record(new_entry("4", run, "lab", "slurm"))
    return slurm, run


def test_status_shows_the_last_view_with_its_age_where_slurm_is_away(
    shell: Shell, on_slurm: tuple[ScriptedSlurm, RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm, _ = on_slurm
    monkeypatch.setattr(queue_view, "FRESH_S", 0.0)
    monkeypatch.setattr(queue_view, "SLOW", 0.0)
    done = shell.zslurm("status")
    assert (done.code, done.stderr) == (0, "")
    assert "tiny\trunning\t4\t" in done.stdout
    slurm.write_program("squeue", f"printf %s '{recorded.CONTROLLER_DOWN}' >&2; exit 1")
    done = shell.zslurm("status")
    assert done.code == Exit.SLURM_UNAVAILABLE
    assert "tiny\trunning\t4\t" in done.stdout
    assert done.stderr.startswith("zslurm: the Slurm controller does not answer; what is shown is ")
    assert done.stderr.count("\n") == 1
    assert '"as_of": 1' in shell.zslurm("status", "--json").stdout


def test_status_without_any_view_says_unknown_and_why(
    shell: Shell, on_slurm: tuple[ScriptedSlurm, RunDir]
) -> None:
    slurm, _ = on_slurm
    slurm.write_program("squeue", f"printf %s '{recorded.CONTROLLER_DOWN}' >&2; exit 1")
    done = shell.zslurm("status", "tiny")
    assert done.code == Exit.SLURM_UNAVAILABLE
    assert done.stdout.startswith("tiny: unknown (job 4 on lab)")
    assert "does not answer" in done.stderr


@pytest.mark.parametrize(
    ("outcome", "code", "shown"),
    [("completed", 0, "completed"), ("failed", 1, "failed"), ("interrupted", 75, "unknown")],
)
def test_a_run_that_ended_for_good_needs_no_slurm_to_say_so(
    shell: Shell, on_slurm: tuple[ScriptedSlurm, RunDir], outcome: str, code: int, shown: str
) -> None:
    """One that saved and stopped may have been requeued: of that only Slurm knows."""
    slurm, run = on_slurm
    slurm.write_program("squeue", f"printf %s '{recorded.CONTROLLER_DOWN}' >&2; exit 1")
    with JsonLinesWriter(run.events) as lines:
        event = {"time": time.time(), "event": "run_ended", "job_id": "4"}
        lines.append(event | {"outcome": outcome, "exit_code": code, "cause": None})
    done = shell.zslurm("status")
    assert f"tiny\t{shown}\t4\t" in done.stdout
    assert done.code == (Exit.SLURM_UNAVAILABLE if shown == "unknown" else 0)


def test_a_shell_loop_of_status_asks_slurm_once(
    shell: Shell, on_slurm: tuple[ScriptedSlurm, RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm, _ = on_slurm
    calls = shell.directory / "calls"
    calls.touch()
    monkeypatch.setattr(queue_view, "FRESH_S", 3600.0)
    slurm.write_program("squeue", f'echo x >> {calls}; printf %s "{recorded.SQUEUE}"')
    for _ in range(5):
        assert "tiny\trunning\t4\t" in shell.zslurm("status").stdout
    assert calls.read_text() == "x\n"


def test_only_active_runs_are_shown_where_that_is_asked(
    shell: Shell, on_slurm: tuple[ScriptedSlurm, RunDir]
) -> None:
    slurm, run = on_slurm
    assert len(shell.zslurm("status", "--active").stdout.splitlines()) == 2
    slurm.gives("6")
    record_action(run, Submitted(job_id="6"), load_spec(run.config))
    done = shell.zslurm("status", "--active")
    assert (done.code, done.stdout, done.stderr) == (0, "", "no runs are active\n")


def test_a_command_beside_a_run_that_does_not_run_is_refused(shell: Shell) -> None:
    (shell.directory / "runs" / "r").mkdir(parents=True)
    (shell.directory / "runs" / "r" / "config.json").write_text("{}")
    code, line = shell.fails("exec", "r", "--", "hostname")
    assert (code, line) == (
        Exit.FAILED,
        "zslurm: r: it is prepared; a command can run with it only while it is running",
    )


def test_completion_of_many_runs_asks_no_other_program(tmp_path: Path) -> None:
    """A fresh interpreter without any Slurm on its path."""
    done = fresh_zslurm("completion", "bash", cwd=tmp_path, PATH="/nonexistent")
    assert (done.code, done.stderr) == (0, "")
