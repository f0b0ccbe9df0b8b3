"""`zslurm watch`: a line for every change, the table on a terminal, and an end that leaves nothing behind."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.run.stories import STEPS, Holder, Story
from tests.waiting import DEADLINE_S, wait_for
from zslurm.cli.run import watch
from zslurm.cli.run.watch import changing_facts
from zslurm.run import index
from zslurm.run.index import new_entry
from zslurm.run.run_dir import RunDir
from zslurm.run.state.run_state import RunState, look

_PROGRAM = "import sys; from zslurm.cli.main import main; main()"


def watching(*arguments: str | Path, stdout: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-u", "-c", _PROGRAM, "watch", "-i", "1", *map(str, arguments)]
    environment = os.environ | {"COLUMNS": "200", "TERM": "xterm"}
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.STDOUT, env=environment)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def test_without_a_terminal_a_line_for_every_change_until_the_run_rests(tmp_path: Path, out: Path) -> None:
    with Holder() as holder, out.open("wb") as file:
        story = Story(tmp_path / "tiny").submitted(process=holder.pid).started().trained(1)
        watcher = watching(story.run.path, stdout=file.fileno())
        wait_for(
            lambda: "tiny  running  job local-1  attempt 1 started on node[0-1]" in out.read_text(), "the run"
        )
        story.trained(2, 3, saved=3)
        wait_for(lambda: "tiny  saved step 3\n" in out.read_text(), "the checkpoint")
        lines = out.read_text().count("\n")
        story.trained(4)
        story.ended("completed", 0)
        holder.end()
        assert watcher.wait(timeout=DEADLINE_S) == 0
        reported = out.read_text().splitlines()[lines:]
        assert "completed" in reported[-1]
        assert "running" not in " ".join(reported), "only what changed is reported"
        assert not any("step 4" in line for line in reported), "a step alone is no news"


def test_a_decision_is_reported_even_where_other_events_followed_at_once(tmp_path: Path) -> None:
    story = Story(tmp_path / "tiny").submitted().started()
    root = {"kind": "rank_killed", "node": "node1", "rank": 3, "line": "Killed"}
    story.event("decision", attempt=1, action="restart", mode="act", reason="a rank was killed", root=root)
    decided = "attempt 1: decided to start again in place: a rank was killed"
    assert changing_facts(look(story.run)).count(decided) == 1, "it is the newest event, too"
    facts = changing_facts(look(story.started(2).run))
    assert (decided in facts, facts[-1]) == (True, "attempt 2 started on node[0-1], 2 ranks")


def test_all_active_runs_are_watched_until_ctrl_c(tmp_path: Path, out: Path) -> None:
    with Holder() as holder, out.open("wb") as file:
        for name in ("resting", "busy", "later"):
            story = Story(tmp_path / name)
            index.record(new_entry(f"local-{name}", story.run, "local", "local"))
        Story(tmp_path / "resting").submitted().started().ended("completed", 0)
        Story(tmp_path / "busy").submitted("local-2", process=holder.pid).started()
        watcher = watching(stdout=file.fileno())
        wait_for(lambda: "busy  running" in out.read_text(), "the active run")
        Story(tmp_path / "later").submitted("local-3", process=holder.pid).started()
        wait_for(lambda: "later  running" in out.read_text(), "a run that became active")
        assert "resting" not in out.read_text()
        watcher.send_signal(signal.SIGINT)
        assert watcher.wait(timeout=DEADLINE_S) == 0
        assert "Traceback" not in out.read_text()


def test_on_a_terminal_the_run_and_after_ctrl_c_the_cursor(tmp_path: Path) -> None:
    with Holder() as holder:
        story = Story(tmp_path / "tiny").submitted(process=holder.pid).started().trained(1)
        ours, theirs = pty.openpty()
        shown: list[bytes] = []

        def read() -> None:
            while True:
                try:
                    shown.append(os.read(ours, 4096))
                except OSError:
                    return

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        watcher = watching(story.run.path, stdout=theirs)
        os.close(theirs)
        wait_for(lambda: b"running" in b"".join(shown), "the table")
        watcher.send_signal(signal.SIGINT)
        assert watcher.wait(timeout=DEADLINE_S) == 0
        reader.join(timeout=DEADLINE_S)
        text = b"".join(shown)
        assert f"step 1/{STEPS}".encode() in text, "the run in full"
        assert text.rindex(b"\x1b[?25h") > text.rindex(b"\x1b[?25l"), "the cursor is back"
        assert b"Traceback" not in text
        os.close(ours)


def test_a_look_releases_jobs_that_slurm_holds_and_passes_the_lines_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, lines = RunDir(tmp_path / "tiny"), list[str]()
    held = RunState(run, "held", job_id="12", launcher="slurm")
    monkeypatch.setattr(watch, "look_all", lambda runs, cached: [held])
    monkeypatch.setattr(watch, "release_held", lambda states: [f"{states[0].run.name}: released"])
    states, _ = watch._look([run], set(), lines.append)
    assert states == [held] and lines == ["tiny: released"]
