"""Names and log lines with terminal escapes and HTML are shown; neither a terminal nor a browser obeys them."""

from __future__ import annotations

import io
import re
import sys

import pytest

from tests.cli.commands import Shell
from tests.run.stories import Story
from zslurm.aegis.core.policy.outcome import Cause
from zslurm.cli.logs.rank_log import incomplete_end, shown_on
from zslurm.core.console import harmless, say
from zslurm.run.run_dir import RunDir

TITLE = "\x1b]0;owned\x07"
HTML = "<img src=x onerror=alert(1)>"
HOSTILE = f"RuntimeError: {TITLE}\x9b2J\u202e{HTML}\x1b[31mred"
STYLES = re.compile("\x1b\\[[0-9;]*m")
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202e]")


@pytest.fixture
def run(shell: Shell) -> RunDir:
    """A run that failed with such a line in its log, whose directory was renamed to such a name."""
    story = Story(shell.directory / "run").submitted().started()
    story.logged(0, f"Traceback (most recent call last):\n{HOSTILE}\n")
    story.event(
        "fault_detected", kind="python_error", role="root", scope="program", line=HOSTILE, attempt=1, rank=0
    )
    story.ended("failed", 1, Cause(HOSTILE, rank=0, node="node0", exit_code=1))
    return RunDir(story.run.path.rename(shell.directory / f"evil{TITLE}<b>"))


@pytest.mark.parametrize(
    "command",
    [
        ["status", "RUN"],
        ["why", "RUN"],
        ["logs", "--events", "RUN"],
        ["logs", "--events", "RUN", "--all"],
        ["logs", "--events", "RUN", "--json"],
        ["logs", "RUN", "--errors"],
        ["report", "RUN", "--format", "md", "-o", "-"],
        ["report", "RUN", "-o", "-"],
        ["why", "LOG"],
    ],
)
@pytest.mark.parametrize("columns", [None, 80])
def test_commands_show_them_harmlessly(
    run: RunDir, shell: Shell, command: list[str], columns: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal, with styles of ours, and in a pipe."""
    if columns is not None:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True)
    places = {"RUN": str(run.path), "LOG": str(run.attempt(1).rank_log(0))}
    done = shell.zslurm(*(places.get(word, word) for word in command))
    assert done.stdout
    assert CONTROL.findall(STYLES.sub("", done.stdout) + done.stderr) == []
    if command[0] == "report":
        assert HTML not in done.stdout
        assert f"{TITLE}<b>".replace("\x1b", r"\x1b").replace("\x07", r"\x07") not in done.stdout


def test_a_message_is_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"{HOSTILE}: no such run")
    assert CONTROL.findall(capsys.readouterr().err) == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain \t text\n", "plain \t text\n"),
        (TITLE, r"\x1b]0;owned\x07"),
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("\u202eabc", r"\u202eabc"),
        ("\u061cabc", r"\u061cabc"),
        ("failed\rall is well", r"failed\x0dall is well"),
        ("é 日本 ✓", "é 日本 ✓"),
    ],
)
def test_control_characters_are_written_out(text: str, shown: str) -> None:
    assert harmless(text) == shown


def test_a_log_keeps_its_colours_on_a_terminal_and_everything_in_a_pipe() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    line = f"\x1b[31;1mred\x1b[0m {TITLE}\x1b[2J progress\r\n".encode()
    assert shown_on(io.StringIO(), line) == line
    assert shown_on(Terminal(), line) == b"\x1b[31;1mred\x1b[0m \\x1b]0;owned\\x07\\x1b[2J progress\r\n"


@pytest.mark.parametrize(
    ("block", "left"),
    [
        ("whole ✓".encode(), 0),
        ("whole é".encode(), 0),
        ("✓".encode()[:2], 2),
        ("é".encode()[:1], 1),
        ("😀".encode()[:3], 3),
        (b"text \x1b[31", 4),
        (b"text \x1b[31m", 0),
        (b"caf\xe9 latin", 0),
    ],
)
def test_what_a_terminal_cannot_show_yet_waits_for_its_end(block: bytes, left: int) -> None:
    assert incomplete_end(block) == left
