"""Runs a program that may hang in a driver."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


class CommandHung(Exception):
    """A command timed out; it may still hang in the driver."""


@dataclass(frozen=True)
class CommandResult:
    """What a command wrote, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """The last line that it wrote to stderr, or else to stdout; empty if it wrote nothing."""
        return (self.err.strip() or self.out.strip()).rpartition("\n")[2].strip()


def run(argv: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> CommandResult:
    """Run a program to its end, or leave it.

    Raises:
        CommandHung: it did not end in its time. It is killed, but not waited for: a driver may hold it.
    """
    process = subprocess.Popen(
        argv, env=dict(environ), text=True, errors="replace", start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        called = " ".join([Path(argv[0]).name, *argv[1:2]])
        raise CommandHung(f"`{called}` did not answer within {timeout_s:g} s") from None
    return CommandResult(process.returncode, out, err)
