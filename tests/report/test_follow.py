"""`submit --wait` away from a terminal: plain lines, and an exit code that says how the run came to rest."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.report.stories import STEPS, Holder, Story
from tests.waiting import wait_for
from zslurm.aegis.verdict import Cause
from zslurm.launch.run_state import look_all
from zslurm.report import follow as module
from zslurm.report.follow import follow

KILLED = Cause("Killed", rank=3, node="node1", exit_code=137)


@pytest.mark.parametrize(
    ("outcome", "code", "cause", "exit_code", "last_lines"),
    [
        ("completed", 0, None, 0, [f"tiny: completed {STEPS} steps, loss 3.6000"]),
        ("interrupted", 75, None, 75, [f"tiny: stopped; saved at step {STEPS}; submit again to continue"]),
        ("failed", 137, KILLED, 1, ["tiny: failed: rank 3 on node1: Killed", "see: zslurm logs tiny"]),
    ],
)
def test_the_end_is_told_and_decides_the_exit_code(
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
    assert said.err.splitlines() == last_lines, "what an earlier attempt trained is not told again"
    assert said.out == ""


def test_a_run_that_is_lost_says_where_to_look(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert follow(Story(tmp_path / "tiny").submitted().started().run, "local-1") == 1
    assert "tiny: lost: job local-1 is gone and left no verdict" in capsys.readouterr().err


def test_steps_and_checkpoints_are_told_while_they_happen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LINE_EVERY_S", 0.0)
    looked = threading.Event()  # from here on, what is appended is news
    monkeypatch.setattr(module, "look_all", lambda runs, cached: (looked.set(), look_all(runs, cached=cached))[1])
    with Holder() as holder:
        story = Story(tmp_path / "tiny").submitted(process=holder.pid).started()
        story.clock = 4e9  # what is told is new, whatever this machine's clock says
        codes: list[int] = []
        thread = threading.Thread(target=lambda: codes.append(follow(story.run, "local-1")))
        thread.start()
        said = ""

        def told(text: str) -> bool:
            nonlocal said
            said += capsys.readouterr().err
            return text in said

        assert looked.wait(timeout=90)
        story.trained(1)
        wait_for(lambda: told(f"tiny: step 1/{STEPS}  loss 3.9900  1.23k tokens/s  1m 18s left"), "step 1")
        story.trained(2, saved=2)
        wait_for(lambda: told("tiny: saved step 2"), "the checkpoint")
        story.evaluated(2, 3.25)
        wait_for(lambda: told("tiny: step 2  held-out loss 3.2500"), "the evaluation")
        story.trained(STEPS, saved=STEPS).ended("completed", 0)
        holder.end()
        thread.join(timeout=90)
        assert codes == [0]
        assert told(f"tiny: completed {STEPS} steps")
        assert said.count("step 1/") == 1
