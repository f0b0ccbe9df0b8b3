"""`zslurm logs --rank 0,8-15`: the lines of several ranks in the order in which they were written."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.run.stories import Holder, Story
from tests.waiting import DEADLINE_S, wait_for
from zslurm.cli.logs import rank_log
from zslurm.cli.logs.logs import parse_ranks
from zslurm.cli.logs.rank_log import print_merged
from zslurm.core.errors import ConfigError, NotFound

T0 = 1_780_000_000.0


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as context:
        context.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def log(story: Story, rank: int, *lines: tuple[float, str], attempt: int = 1) -> Story:
    """Lines with the seconds after T0 at which they were written; the notes that the rank would have made."""
    place = story.run.attempt(attempt)
    with place.rank_log(rank).open("ab") as file, place.rank_log_times(rank).open("ab") as times:
        for seconds, text in lines:
            file.write(text.encode())
            times.write(struct.pack("<Qd", file.tell(), T0 + seconds))
    os.utime(place.rank_log(rank), (T0 + 9, T0 + 9))
    return story


@pytest.fixture
def story(tmp_path: Path) -> Story:
    """A run of four ranks that rests; rank 3 wrote nothing."""
    four = Story(tmp_path / "tiny", ranks=4).submitted().started()
    log(four, 0, (1, "step 1\n"), (3, "step 2\n"), (3, "step 3\n"))
    log(four, 1, (2, "NCCL WARN\n"))
    log(four, 2, (3, "late\nand more\n"), (5, "unfinished"))
    four.run.attempt(1).rank_log(3).touch()
    return four.ended("completed", 0)


def printed(story: Story, capsys: pytest.CaptureFixture[str], **options: object) -> list[str]:
    chosen = {"ranks": None, "attempt": None, "last_lines": None, "follow": False, "as_json": False} | options
    print_merged(story.run, **chosen)  # type: ignore[arg-type]
    return capsys.readouterr().out.splitlines()


def test_lines_are_in_the_order_of_their_times(story: Story, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(story, capsys) == [
        "05-28 20:26:41 rank 0: step 1",
        "05-28 20:26:42 rank 1: NCCL WARN",
        "05-28 20:26:43 rank 0: step 2",
        "05-28 20:26:43 rank 0: step 3",
        "05-28 20:26:43 rank 2: late",
        "05-28 20:26:43 rank 2: and more",
        "05-28 20:26:45 rank 2: unfinished",
    ]


@pytest.mark.parametrize("block", [1, 5, 1 << 20])
def test_however_the_files_are_cut_into_blocks(
    story: Story, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    whole = printed(story, capsys)
    monkeypatch.setattr(rank_log, "BLOCK", block)
    assert printed(story, capsys) == whole


def test_only_some_ranks_and_only_the_last_lines(story: Story, capsys: pytest.CaptureFixture[str]) -> None:
    assert [line[-6:] for line in printed(story, capsys, ranks=[0, 1], last_lines=2)] == ["step 2", "step 3"]
    assert printed(story, capsys, ranks=[3]) == []
    assert printed(story, capsys, last_lines=0) == []


def test_as_json_each_line_is_an_object(story: Story, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) for line in printed(story, capsys, ranks=[1], as_json=True)]
    assert rows == [{"time": T0 + 2, "attempt": 1, "rank": 1, "line": "NCCL WARN"}]


def test_what_is_not_there_is_not_found(story: Story, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="attempt 1 has ranks 0 to 3, not 7"):
        printed(story, capsys, ranks=[0, 7])
    with pytest.raises(NotFound, match="there is no attempt 2"):
        printed(story, capsys, attempt=2)
    with pytest.raises(NotFound, match="no log yet"):
        printed(Story(tmp_path / "new").submitted(), capsys)


@pytest.mark.parametrize(
    ("text", "ranks"), [("3", [3]), ("0,8-10", [0, 8, 9, 10]), ("2,1,2", [1, 2]), ("all", None)]
)
def test_ranks_as_people_write_them(text: str, ranks: list[int] | None) -> None:
    assert parse_ranks(text) == ranks


@pytest.mark.parametrize("text", ["", "x", "3-1", "-1", "1,,2"])
def test_what_is_no_rank(text: str) -> None:
    with pytest.raises(ConfigError, match="expected ranks such as 0,8-15, or `all`"):
        parse_ranks(text)


def test_following_goes_through_attempts_and_ends_with_the_run(tmp_path: Path) -> None:
    program = """
import sys
from zslurm.cli.main import main
from zslurm.cli.logs import rank_log
rank_log.POLL_S, rank_log.STATE_EVERY_S = 0.1, 0.2
main()
"""
    with Holder() as holder:
        story = log(Story(tmp_path / "tiny").submitted(process=holder.pid).started(), 0, (1, "one\n"))
        out = tmp_path / "out"
        with out.open("wb") as file:
            command = [sys.executable, "-u", "-c", program, "logs", str(story.run.path), "-f", "--rank", "all"]
            follower = subprocess.Popen(command, stdout=file)

        def lines() -> list[str]:
            return [line.partition(" rank ")[2] for line in out.read_text().splitlines()]

        wait_for(lambda: lines() == ["0: one"], "what is there")
        log(story, 1, (2, "two\nhalf"))
        wait_for(lambda: lines() == ["0: one", "1: two"], "another rank's first line")
        log(story, 1, (3, " a line\n")).ended("interrupted", 75)
        log(story.started(2), 0, (4, "three\n"), attempt=2)
        wait_for(lambda: lines()[2:] == ["1: half a line", "0: three"], "the next attempt")
        log(story, 0, (5, "the end"), attempt=2).ended("completed", 0, attempt=2)
        holder.end()
        assert follower.wait(timeout=DEADLINE_S) == 0
        assert lines()[4:] == ["0: the end"]
