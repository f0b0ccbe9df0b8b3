"""`zslurm logs --events`: everything that happened and who did what, in words and in order."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import Shell
from tests.run.stories import Holder, Story
from tests.waiting import DEADLINE_S, wait_for
from zslurm.aegis.core.policy.outcome import Cause
from zslurm.cli.logs import events
from zslurm.cli.logs.events import as_json, as_row, recorded_events
from zslurm.run.events import RequeuedByUser, describe
from zslurm.submit.submit import record_action

KILLED = Cause("Killed", rank=3, node="node1", exit_code=137, step=12)


def words(story: Story) -> list[str]:
    return [describe(event) for _, event in recorded_events([story.run])]


def test_a_run_is_reported_from_its_submission_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1_700_000_000.0)
    monkeypatch.setenv("LOGNAME", "ada")
    story = Story(tmp_path / "tiny").submitted("12").started().ended("failed", 137, KILLED)
    record_action(story.run, RequeuedByUser(job_id="12", excluded="node[1,4]"), story.spec)
    assert words(story) == [
        "submitted by ada as job 12",
        "requeued by ada as job 12, without node[1,4] from now on",
        "attempt 1 started on node[0-1], 2 ranks",
        "attempt 1 failed (exit code 137): rank 3 on node1 after step 12: Killed",
        "the run failed (exit code 137): rank 3 on node1 after step 12: Killed",
    ]


@pytest.mark.parametrize(
    ("event", "shown"),
    [
        ({"event": "supervisor_started", "host": "n1", "pid": 4}, "the supervisor started on n1"),
        (
            {"event": "supervisor_started", "host": "n1", "pid": 4, "adopted": 2},
            "the supervisor started on n1 and took over attempt 2",
        ),
        ({"event": "signal", "signal": "SIGUSR2", "attempt": 1}, "asked to save and stop (SIGUSR2)"),
        (
            {"event": "ranks_ended", "ranks": [3], "node": "n1", "what": "Killed", "attempt": 1},
            "rank 3 on n1: Killed",
        ),
        (
            {"event": "ranks_ended", "ranks": [3, 4], "node": "n1", "what": "Killed", "attempt": 1},
            "ranks 3, 4 on n1: Killed",
        ),
        ({"event": "step_killed", "attempt": 1, "reason": "it hung"}, "attempt 1 was torn down: it hung"),
        (
            {"event": "lock_taken_over", "holder": "job 7"},
            "took the checkpoints' lock over from job 7, which is gone",
        ),
        ({"event": "of_a_later_version", "time": 1.0, "rails": 7, "why": "x"}, "rails=7 why=x"),
        ({"event": "attempt_started", "attempt": 1}, "attempt 1 started"),
    ],
)
def test_an_event_in_words(event: dict[str, object], shown: str) -> None:
    assert describe(event) == shown


def test_events_of_several_runs_are_merged_by_time(tmp_path: Path) -> None:
    first, second = Story(tmp_path / "a").submitted(), Story(tmp_path / "b").submitted()
    second.clock += 0.5
    first.started().ended("completed", 0)
    second.started().ended("completed", 0)
    rows = [as_row(*pair) for pair in recorded_events([first.run, second.run])]
    assert [row[1] for row in rows if row[2] != "submit"] == ["a", "b", "a", "b", "a", "b"]


def test_as_json_an_event_is_what_was_recorded_with_its_words(tmp_path: Path) -> None:
    story = Story(tmp_path / "tiny").submitted().started()
    found = as_json(*next(recorded_events([story.run])))
    assert (found["run"], found["run_dir"]) == ("tiny", str(story.run.path))
    assert (found["event"], found["attempt"], found["nodes"]) == ("attempt_started", 1, "node[0-1]")
    assert found["words"] == "attempt 1 started on node[0-1], 2 ranks"


@pytest.fixture
def long_story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Story:
    """A run with 6 events, where 4 are as many as are shown without being asked for."""
    monkeypatch.setattr(events, "MOST", 4)
    story = Story(tmp_path / "tiny").submitted()
    for attempt in range(5):
        story.event("step_killed", attempt=attempt, reason="it hung")
    return story


def attempts_in(stdout: str) -> list[str]:
    return [line.rpartition("attempt ")[2].split()[0] for line in stdout.splitlines() if "torn down" in line]


def test_of_many_events_the_newest_are_shown(long_story: Story, shell: Shell) -> None:
    done = shell.zslurm.ok("logs", "--events", str(long_story.run.path))
    assert attempts_in(done.stdout) == ["2", "3", "4"], "the submission is the last event"
    assert done.stderr == "these are the last 4 events; --all shows every one\n"


def test_nothing_is_left_out_of_as_many_events_as_are_shown(
    long_story: Story, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MOST", 6)
    done = shell.zslurm.ok("logs", "--events", str(long_story.run.path))
    assert (attempts_in(done.stdout), done.stderr) == (["0", "1", "2", "3", "4"], "")


def test_all_events_and_the_last_ones_exclude_each_other(long_story: Story, shell: Shell) -> None:
    code, line = shell.fails("logs", "--events", str(long_story.run.path), "--all", "-n", "2")
    assert (code, line) == (2, "zslurm: --all and -n: give one of them")


@pytest.mark.parametrize("options", [["--all"], ["--since", "2000-01-01"], ["-n", "10"]])
def test_more_are_shown_if_they_are_asked_for(long_story: Story, shell: Shell, options: list[str]) -> None:
    done = shell.zslurm.ok("logs", "--events", str(long_story.run.path), *options)
    assert attempts_in(done.stdout) == ["0", "1", "2", "3", "4"]
    assert done.stderr == ""


def test_programs_get_all_events(long_story: Story, shell: Shell) -> None:
    done = shell.zslurm.ok("logs", "--events", str(long_story.run.path), "--json")
    assert len(done.stdout.splitlines()) == 6
    assert done.stderr == ""


def test_a_few_events_have_no_note(tmp_path: Path, shell: Shell) -> None:
    done = shell.zslurm.ok("logs", "--events", str(Story(tmp_path / "tiny").submitted().run.path))
    assert done.stderr == ""


def test_following_prints_what_is_there_and_what_comes_and_ends_with_the_run(tmp_path: Path) -> None:
    program = """
import sys
from zslurm.cli.main import main
from zslurm.cli.logs import rank_log
rank_log.POLL_S, rank_log.STATE_EVERY_S = 0.1, 0.2
main()
"""
    with Holder() as holder:
        story = Story(tmp_path / "tiny").submitted(process=holder.pid).started()
        out = tmp_path / "out"
        with out.open("wb") as file:
            command = [
                sys.executable,
                "-u",
                "-c",
                program,
                "logs",
                "--events",
                str(story.run.path),
                "-f",
                "-n",
                "1",
            ]
            follower = subprocess.Popen(command, stdout=file)
        wait_for(lambda: out.read_text().count("\n") == 1, "what is there")
        story.ended("completed", 0)
        wait_for(lambda: "the run completed (exit code 0)" in out.read_text(), "what comes")
        assert follower.poll() is None
        holder.end()
        assert follower.wait(timeout=DEADLINE_S) == 0
        assert out.read_text().count("\n") == 3


@pytest.mark.parametrize("options", [("--all",), ("-n", "9"), ("--json",), ()])
def test_damaged_lines_are_named_and_the_rest_is_shown(
    tmp_path: Path, shell: Shell, options: tuple[str, ...]
) -> None:
    story = Story(tmp_path / "tiny").submitted("12").started()
    whole = shell.zslurm("logs", "--events", story.run.path, *options).stdout
    text = story.run.events.read_text()
    story.run.events.write_text("\0" * 40 + "\n" + text + "[]\n" + '{"time":9,"event":"run_en')
    done = shell.zslurm("logs", "--events", story.run.path, *options)
    assert done.stdout == whole
    assert done.stderr == f"{story.run.events}: 2 damaged lines are left out\n"
