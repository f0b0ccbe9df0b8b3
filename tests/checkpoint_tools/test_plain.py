"""Errors in one line for people: the path and the system's message, and no class of Python without need."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zslurm.checkpoint_tools.plain import in_words, reason_of, shorten

TORCH = "a peer is gone\nException raised from send at socket.cpp:1 (most recent call first):\nframe #0: x"


def caught(action: Callable[[], Any]) -> BaseException:
    with pytest.raises(BaseException) as found:
        action()
    return found.value


def refused(number: int, path: str | None = None) -> OSError:
    return OSError(number, os.strerror(number), path)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (refused(errno.ENOSPC, "/scratch/x"), f"/scratch/x: {os.strerror(errno.ENOSPC)}"),
        (refused(errno.EIO), os.strerror(errno.EIO)),
        (OSError("the device\nis away"), "the device is away"),
        (ConnectionResetError(), "connection reset error"),
        (subprocess.TimeoutExpired(["amd-smi", "list"], 5.0), "amd-smi did not end within 5 s"),
        (subprocess.CalledProcessError(128, ["git", "ls-files"]), "git ended with exit code 128"),
        (subprocess.CalledProcessError(-9, "git"), "git was killed by signal 9"),
        (RuntimeError(TORCH), "a peer is gone"),
        (RuntimeError("x" * 1000), "x" * 497 + "..."),
        (EOFError(), "eof error"),
        (RecursionError("maximum recursion depth exceeded"), "it is nested too deeply"),
    ],
    ids=repr,
)
def test_a_reason_is_one_plain_line(error: BaseException, reason: str) -> None:
    assert reason_of(error) == reason


def test_the_first_file_that_could_not_be_copied_is_the_reason(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from/gone").symlink_to(tmp_path / "nowhere")
    error = caught(lambda: shutil.copytree(tmp_path / "from", tmp_path / "to"))
    assert reason_of(error) == f"{tmp_path}/from/gone: {os.strerror(errno.ENOENT)}"


def test_a_mistake_in_a_program_keeps_its_class_and_names_its_line() -> None:
    line = sys._getframe().f_lineno + 1
    error = caught(lambda: {}["x"])
    assert reason_of(error) == f"internal error (KeyError: 'x' at checkpoint_tools/test_plain.py:{line})"


def test_text_that_is_not_utf_8_is_so_in_both_directions() -> None:
    assert in_words(caught(lambda: b"ab\xff".decode())) == "it is not UTF-8 text (byte 2)"  # type: ignore[arg-type]
    assert in_words(caught("a\udcff".encode)) == "it is not UTF-8 text (character 1)"  # type: ignore[arg-type]


def test_a_long_text_is_shortened() -> None:
    assert shorten("a" * 60) == "a" * 60
    assert shorten("a" * 61) == "a" * 57 + "..."
