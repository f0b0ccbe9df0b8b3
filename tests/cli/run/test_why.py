"""`zslurm why`: one paragraph and the next thing to do, for a run in every state; `zslurm rm`."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.commands import Shell
from tests.run.stories import Holder, Story
from zslurm.aegis.core.policy.outcome import Cause
from zslurm.cli.run.run_rows import note
from zslurm.cli.run.why import explain_run
from zslurm.run.run_dir import RunDir
from zslurm.run.state.run_state import look

RAS = {
    "kind": "gpu_ras_uncorrectable", "role": "root", "scope": "gpu", "node": "node1", "gpu": "3",
    "line": "umc: 1 new uncorrectable error", "time": 1.0, "source": "ras",
}  # fmt: skip


def test_an_error_of_the_program_names_the_traceback_and_the_step_to_continue_from(tmp_path: Path) -> None:
    cause = Cause("ValueError: shapes do not match", rank=3, node="node1", exit_code=1, step=12)
    story = Story(tmp_path / "tiny").submitted().started().trained(11, 12, saved=10).ended("failed", 1, cause)
    answer = explain_run(look(story.run))
    assert answer.died
    assert answer.text.startswith("tiny has failed in attempt 1 at step 12 of 40 (exit code 1). ")
    assert "rank 3 on node1 after step 12: ValueError: shapes do not match." in answer.text
    assert "The newest checkpoint is that of step 10." in answer.text
    assert "`zslurm logs tiny --errors` shows the errors in its output" in answer.advice
    assert answer.advice.endswith("`zslurm submit RUN_FILE` continues from step 10")
    assert "\n" not in answer.text + answer.advice


def test_a_fault_of_the_machine_gives_the_advice_of_its_kind_and_why_it_was_stopped(tmp_path: Path) -> None:
    story = Story(tmp_path / "tiny").submitted().started()
    story.event("attempt_ended", attempt=1, outcome="failed", exit_code=1, cause={"message": RAS["line"]})
    story.event("decision", attempt=1, action="stop", mode="act", reason="no node is left", root=RAS)
    story.event("run_ended", outcome="failed", exit_code=93, cause={"message": RAS["line"]})
    answer = explain_run(look(story.run))
    assert answer.kind == "gpu_ras_uncorrectable"
    assert "The root cause (uncorrectable memory error of a GPU): umc: 1 new uncorrectable error." in answer.text
    assert "Aegis stopped it for good: no node is left." in answer.text
    assert "No checkpoint was saved." in answer.text
    assert answer.advice.startswith("The GPU lost data. Exclude the node;")
    assert answer.advice.endswith("continues it from the beginning")


@pytest.mark.parametrize(
    ("outcome", "code", "text", "advice"),
    [
        ("interrupted", 75, "asked to save and stop", "`zslurm submit RUN_FILE` continues from step 9"),
        ("completed", 0, "did not die", ""),
    ],
)
def test_a_run_that_did_not_fail(tmp_path: Path, outcome: str, code: int, text: str, advice: str) -> None:
    story = Story(tmp_path / "tiny").submitted().started().trained(9, saved=9).ended(outcome, code)
    answer = explain_run(look(story.run))
    assert text in answer.text
    assert answer.advice == advice


def test_a_copy_did_not_die(tmp_path: Path) -> None:
    story = Story(tmp_path / "tiny").submitted().started()
    copy = RunDir(shutil.copytree(story.run.path, tmp_path / "copy"))
    answer = explain_run(look(copy))
    assert not answer.died
    assert answer.text.startswith("copy did not die: it is a copy of ")


def test_a_run_that_is_lost_and_one_that_was_never_accepted(tmp_path: Path) -> None:
    lost = explain_run(look(Story(tmp_path / "lost").submitted().started().run))
    assert "ended without a record of how" in lost.text
    assert lost.advice == "`zslurm logs lost --supervisor` has the job's last output"
    assert "never accepted" in explain_run(look(Story(tmp_path / "new").run)).text


def test_a_run_that_lives(tmp_path: Path) -> None:
    with Holder() as holder:
        story = Story(tmp_path / "tiny").submitted(process=holder.pid).started().trained(9, 10)
        answer = explain_run(look(story.run))
    assert (answer.died, answer.advice) == (False, "")
    assert "has not died: it is running. It is at step 10 of 40; 1m 00s left." in answer.text


def test_why_as_text_and_as_json(shell: Shell) -> None:
    run = (
        Story(shell.directory / "runs/tiny")
        .submitted()
        .started()
        .trained(9)
        .ended("failed", 1, Cause("Killed"))
        .run
    )
    shown = shell.zslurm.ok("why", "tiny").stdout.splitlines()
    assert [line[:6] for line in shown] == ["tiny h", "next: "]
    found = shell.zslurm.ok("why", run.path, "--json").json
    assert (found["run"], found["state"], found["died"], found["cause"]["message"]) == (
        "tiny",
        "failed",
        True,
        "Killed",
    )
    assert found["text"] in shown[0]


def test_rm_removes_a_run_that_rests_and_asks_first(shell: Shell) -> None:
    run = Story(shell.directory / "runs/tiny").submitted().started().trained(9, saved=9).ended("completed", 0).run
    code, message = shell.fails("rm", "tiny")
    assert (code, "needs --yes" in message, run.exists) == (2, True, True)
    assert shell.zslurm.ok("rm", "tiny", "--yes").stderr == f"removed {run.path}\n"
    assert not run.path.exists()
    assert shell.fails("rm", "tiny", "--yes")[0] == 3


def test_rm_refuses_a_run_that_is_active_and_removes_none_then(shell: Shell) -> None:
    resting = Story(shell.directory / "runs/resting").submitted().started().ended("completed", 0).run
    with Holder() as holder:
        Story(shell.directory / "runs/busy").submitted(process=holder.pid).started()
        code, message = shell.fails("rm", "resting", "busy", "--yes")
    assert code == 1
    assert "`zslurm cancel busy --wait` ends it" in message
    assert resting.exists


def test_a_cancelled_run_was_cancelled_whatever_its_ranks_said_meanwhile(tmp_path: Path) -> None:
    cause = Cause("the Slurm step was cancelled (scancel)", rank=0, node="node0", exit_code=1)
    story = Story(tmp_path / "tiny").submitted().started().trained(9, saved=9).cancelled()
    answer = explain_run(look(story.ended("interrupted", 75, cause).run))
    assert "It was cancelled." in answer.text
    assert "root cause" not in answer.text


def test_a_fault_that_was_repaired_is_not_why_a_run_stopped_later(tmp_path: Path) -> None:
    story = Story(tmp_path / "tiny").submitted().started().trained(9, saved=9)
    story.event("attempt_ended", attempt=1, outcome="failed", exit_code=1, cause={"message": RAS["line"]})
    story.event("decision", attempt=1, action="swap", mode="act", reason="so", root=RAS)
    story.started(2).trained(12, attempt=2, saved=12).ended("interrupted", 75, attempt=2)
    answer = explain_run(look(story.run))
    assert (answer.kind, answer.cause) == (None, "")
    assert "It was asked to save and stop." in answer.text


def test_a_requeued_run_says_why_slurm_lets_it_wait(tmp_path: Path) -> None:
    story = Story(tmp_path / "tiny").submitted().started().trained(9, saved=9).ended("interrupted", 75)
    waits = replace(look(story.run), state="requeued", reason="BeginTime")
    assert note(waits).startswith("BeginTime: Slurm lets a requeued job wait, for two minutes by default; ")
    assert "`zslurm requeue tiny --now`" in note(waits)
    assert note(replace(waits, state="pending")).startswith("BeginTime: must not start before its begin time")


def test_a_requeued_run_names_the_fault_before_it_and_what_it_waits_for(tmp_path: Path) -> None:
    story = Story(tmp_path / "tiny").submitted().started().trained(9, saved=9)
    dead = RAS | {"kind": "node_dead", "line": "node node1 is dead", "scope": "node", "gpu": None}
    story.event("attempt_ended", attempt=1, outcome="failed", exit_code=1, cause={"message": dead["line"]})
    story.event("decision", attempt=1, action="requeue", mode="act", reason="so", root=dead)
    for state in ("requeued", "held"):
        waits = replace(look(story.run), state=state, reason="BeginTime")
        answer = explain_run(waits)
        assert "equeued after: " in answer.text
        assert "node1" in answer.text
        assert "node node1 is dead" in answer.text
        assert "node node1 is dead" in note(waits)


def test_a_host_without_memory_names_the_settings_that_take_less(tmp_path: Path) -> None:
    oom = RAS | {"kind": "host_oom", "line": "Out of memory: Killed process 7 (python)", "scope": "node"}
    story = Story(tmp_path / "tiny").submitted().started()
    story.event("attempt_ended", attempt=1, outcome="failed", exit_code=137, cause={"message": oom["line"]})
    story.event("decision", attempt=1, action="stop", mode="act", reason="so", root=oom)
    story.event("run_ended", outcome="failed", exit_code=93, cause={"message": oom["line"]})
    advice = explain_run(look(story.run)).advice
    for key in ("`slurm.mem`", "`checkpoint.background: false`", "`data.prefetch`", "`micro_batch`"):
        assert key in advice
