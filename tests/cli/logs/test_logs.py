"""`zslurm logs`: the right file, the right lines, and an end when the run ends."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import Zslurm
from tests.run.stories import Holder, Story
from tests.waiting import DEADLINE_S, wait_for
from zslurm.cli.logs.rank_log import print_logs
from zslurm.core.errors import NotFound


@pytest.fixture
def story(tmp_path: Path) -> Story:
    """A run of two ranks and two attempts that rests."""
    two = Story(tmp_path / "tiny").submitted().started(1).logged(0, "first attempt\n")
    two.logged(1, "first attempt of rank 1\n").ended("interrupted", 75)
    two.submitted("local-2").started(2).logged(0, "one\ntwo\nthree\n", attempt=2).logged(1, "", attempt=2)
    two.run.job_log("local-2").write_text("supervisor: attempt_started\n")
    return two.ended("completed", 0, attempt=2)


def printed(story: Story, capsys: pytest.CaptureFixture[str], **options: object) -> str:
    chosen = {"rank": 0, "attempt": None, "supervisor": False, "last_lines": None, "follow": False} | options
    print_logs(story.run, **chosen)  # type: ignore[arg-type]
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "one\ntwo\nthree\n"),
        ({"last_lines": 2}, "two\nthree\n"),
        ({"last_lines": 0}, ""),
        ({"last_lines": 99}, "one\ntwo\nthree\n"),
        ({"attempt": 1}, "first attempt\n"),
        ({"attempt": 1, "rank": 1}, "first attempt of rank 1\n"),
        ({"rank": 1}, ""),
        ({"supervisor": True}, "supervisor: attempt_started\n"),
        ({"follow": True}, "one\ntwo\nthree\n"),
        ({"follow": True, "last_lines": 1}, "three\n"),
    ],
)
def test_what_is_asked_for_is_printed(
    story: Story, capsys: pytest.CaptureFixture[str], options: dict[str, object], text: str
) -> None:
    assert printed(story, capsys, **options) == text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2}, "tiny: attempt 2 has ranks 0 to 1, not 2"),
        ({"rank": 5, "attempt": 1}, "tiny: attempt 1 has ranks 0 to 1, not 5"),
        ({"attempt": 3}, "tiny: there is no attempt 3"),
        ({"attempt": 3, "follow": True}, "tiny: there is no attempt 3"),
    ],
)
def test_what_is_not_there_is_not_found(
    story: Story, capsys: pytest.CaptureFixture[str], options: dict[str, object], message: str
) -> None:
    with pytest.raises(NotFound) as error:
        printed(story, capsys, **options)
    assert str(error.value) == message
    assert error.value.exit_code == 3


def test_a_run_without_a_log_says_where_to_look(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for story in (Story(tmp_path / "prepared"), Story(tmp_path / "lost").submitted().started()):
        with pytest.raises(NotFound, match=f"no log yet; see why with `zslurm status {story.run.name}`"):
            printed(story, capsys)


def test_a_rank_that_has_printed_nothing_is_noted(story: Story, capsys: pytest.CaptureFixture[str]) -> None:
    print_logs(story.run, rank=1, attempt=None, supervisor=False, last_lines=None, follow=False)
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err == "tiny: rank 1 has printed nothing yet; `zslurm logs -f tiny` waits for it\n"


def test_following_goes_through_attempts_and_ends_with_the_run(tmp_path: Path) -> None:
    """It begins before there is a log, and prints every line once."""
    program = """
import sys
from pathlib import Path
from zslurm.run.run_dir import RunDir
from zslurm.cli.logs import rank_log as logs
from zslurm.cli.logs import rank_log
rank_log.POLL_S, rank_log.STATE_EVERY_S = 0.1, 0.2
logs.print_logs(RunDir(Path(sys.argv[1])), rank=0, attempt=None, supervisor=False, last_lines=None, follow=True)
"""
    with Holder() as holder:
        story = Story(tmp_path / "tiny").submitted(process=holder.pid)
        out = tmp_path / "out"
        with out.open("wb") as file:
            follower = subprocess.Popen([sys.executable, "-u", "-c", program, str(story.run.path)], stdout=file)
        story.started(1).logged(0, "one\ntw")
        wait_for(lambda: out.read_text() == "one\ntw", "the first lines")
        story.logged(0, "o\n").ended("interrupted", 75)
        wait_for(lambda: out.read_text() == "one\ntwo\n", "the second line")
        story.started(2).logged(0, "three\n", attempt=2)
        wait_for(lambda: out.read_text() == "one\ntwo\nthree\n", "the next attempt's")
        assert follower.poll() is None
        story.logged(0, "the end\n", attempt=2).ended("completed", 0, attempt=2)
        holder.end()
        assert follower.wait(timeout=DEADLINE_S) == 0
        assert out.read_text() == "one\ntwo\nthree\nthe end\n"


def test_bytes_that_are_no_text_pass_unchanged(tmp_path: Path) -> None:
    story = Story(tmp_path / "tiny").submitted().started()
    story.run.attempt(1).rank_log(0).write_bytes(b"\xff\x00caf\xe9\r\n")
    program = "import sys; from zslurm.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "logs", str(story.run.path)], capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, b"\xff\x00caf\xe9\r\n")


def noted(story: Story, *pairs: tuple[int, float]) -> None:
    """Note of rank 0's newest log how long it was when."""
    path = story.run.attempt(2).rank_log_times(0)
    path.write_bytes(b"".join(struct.pack("<Qd", length, when) for length, when in pairs))


@pytest.mark.parametrize(
    ("since", "text"), [(0.0, "one\ntwo\nthree\n"), (150.0, "two\nthree\n"), (250.0, "three\n"), (9e9, "")]
)
def test_lines_since_a_time(story: Story, capsys: pytest.CaptureFixture[str], since: float, text: str) -> None:
    noted(story, (4, 100.0), (8, 200.0), (14, 300.0))
    assert printed(story, capsys, since=since) == text


def test_the_previous_attempt_and_the_last_lines_by_command(
    story: Story, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    zslurm = Zslurm(monkeypatch, capsys)
    run = story.run.path
    assert zslurm.ok("logs", run, "--previous").stdout == "first attempt\n"
    assert zslurm.ok("logs", run, "--tail", "1").stdout == "three\n"
    assert zslurm.ok("logs", run, "--since", "2999-01-01").stdout == ""
    merged = zslurm.ok("logs", run, "--rank", "all", "--since", "2000-01-01").stdout
    assert [line.split(": ", 1)[1] for line in merged.splitlines()] == ["one", "two", "three"]
    assert "leave --attempt" in zslurm("logs", run, "--previous", "--attempt", "1").stderr
    fresh = Story(run.parent / "fresh").submitted().started().run.path
    assert "no attempt before the newest" in zslurm("logs", fresh, "--previous").stderr
