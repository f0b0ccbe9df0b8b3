"""`submit --wait` away from a terminal: plain lines, and an exit code that says how the run came to rest."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.run.stories import STEPS, Holder, Story
from tests.waiting import DEADLINE_S, wait_for
from zslurm.aegis.core.policy.outcome import Cause
from zslurm.cli.run import follow as module
from zslurm.cli.run.follow import follow, recovery_line
from zslurm.run.state import rest
from zslurm.run.state.run_state import look_all

KILLED = Cause("Killed", rank=3, node="node1", exit_code=137)
KILLED_AS = {"message": "Killed", "rank": 3, "node": "node1", "exit_code": 137}


@pytest.mark.parametrize(
    ("outcome", "code", "cause", "exit_code", "last_lines"),
    [
        ("completed", 0, None, 0, [f"tiny: completed {STEPS} steps, loss 3.6000"]),
        ("interrupted", 75, None, 75, [f"tiny: stopped; saved at step {STEPS}; submit again to continue"]),
        (
            "failed",
            137,
            KILLED,
            1,
            [
                "tiny: attempt 1 failed (exit code 137): rank 3 on node1: Killed",
                "tiny: failed: rank 3 on node1: Killed",
                "what to do: zslurm why tiny    output: zslurm logs tiny",
            ],
        ),
    ],
)
def test_the_end_is_reported_and_decides_the_exit_code(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    outcome: str,
    code: int,
    cause: Cause | None,
    exit_code: int,
    last_lines: list[str],
) -> None:
    story = Story(tmp_path / "tiny").submitted().started().trained(STEPS, saved=STEPS).ended(outcome, code, cause)
    assert follow(story.run, "local-1") == exit_code
    said = capsys.readouterr()
    assert said.err.splitlines() == last_lines, "what an earlier attempt trained is not reported again"
    assert said.out == ""


def test_a_run_that_is_lost_says_where_to_look(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert follow(Story(tmp_path / "tiny").submitted().started().run, "local-1") == 1
    assert "tiny: lost: job local-1 is gone and did not record its outcome" in capsys.readouterr().err


def test_steps_and_checkpoints_are_reported_while_they_happen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LINE_EVERY_S", 0.0)
    looked = threading.Event()  # from here on, what is appended is news
    monkeypatch.setattr(rest, "look_all", lambda runs, cached: (looked.set(), look_all(runs, cached=cached))[1])
    with Holder() as holder:
        story = Story(tmp_path / "tiny").submitted(process=holder.pid).started()
        story.clock = 4e9  # what is reported is new, whatever this machine's clock says
        codes: list[int] = []
        thread = threading.Thread(target=lambda: codes.append(follow(story.run, "local-1")))
        thread.start()
        said = ""

        def reported(text: str) -> bool:
            nonlocal said
            said += capsys.readouterr().err
            return text in said

        assert looked.wait(timeout=DEADLINE_S)
        story.trained(1)
        wait_for(lambda: reported(f"tiny: step 1/{STEPS}  loss 3.9900  1.23k tokens/s  1m 18s left"), "step 1")
        story.trained(2, saved=2)
        wait_for(lambda: reported("tiny: saved step 2"), "the checkpoint")
        story.evaluated(2, 3.25)
        wait_for(lambda: reported("tiny: step 2  validation loss 3.2500"), "the evaluation")
        story.trained(STEPS, saved=STEPS).ended("completed", 0)
        holder.end()
        thread.join(timeout=DEADLINE_S)
        assert codes == [0]
        assert reported(f"tiny: completed {STEPS} steps")
        assert said.count("step 1/") == 1


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            {"event": "attempt_ended", "attempt": 1, "outcome": "failed", "exit_code": 137, "cause": KILLED_AS},
            "attempt 1 failed (exit code 137): rank 3 on node1: Killed",
        ),
        (
            {"event": "decision", "attempt": 1, "action": "swap", "nodes": ["node0", "node2"], "reason": "a\nb"},
            "attempt 1: decided to start again with a spare node on node[0,2]: a b",
        ),
        (
            {"event": "gpu_tested", "node": "node1", "gpu": "3", "ok": False, "reason": "off by 9"},
            "GPU 3 of node1 computes wrongly: off by 9",
        ),
        ({"event": "requeued", "excluded": "", "reason": "dead"}, "put back into the queue: dead"),
        ({"event": "attempt_ended", "attempt": 1, "outcome": "completed", "exit_code": 0, "cause": None}, None),
        ({"event": "decision", "attempt": 1, "action": "finish", "reason": "the run is complete"}, None),
        ({"event": "fault_detected", "kind": "peer_lost"}, None),
    ],
    ids=["failure", "decision", "test of a GPU", "requeue", "completed", "finish", "a mere fault"],
)
def test_a_failure_is_a_line_and_so_is_what_follows(event: dict[str, Any], line: str | None) -> None:
    assert recovery_line(event) == line


def test_failures_of_an_earlier_job_are_no_news(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = Story(tmp_path / "tiny").submitted("local-1").started().ended("failed", 137, KILLED)
    story.submitted("local-2").started(2).trained(STEPS, saved=STEPS).ended("completed", 0, attempt=2)
    assert follow(story.run, "local-2") == 0
    assert "failed" not in capsys.readouterr().err


def test_a_run_that_was_stopped_for_good_has_the_exit_code_that_says_so(tmp_path: Path) -> None:
    assert follow(Story(tmp_path / "tiny").submitted().started().ended("failed", 93, KILLED).run, "local-1") == 93
