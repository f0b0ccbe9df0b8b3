"""The journal: `journalctl -k -f`. It needs no root if the user is in the group systemd-journal or adm."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping

from zslurm.aegis.agent.kernel_source.source import (
    CHUNK,
    MOST_RECORDS,
    LineSplitter,
    NoMoreLines,
    Position,
    Source,
    Unavailable,
    text_of,
)


class Journal(Source):
    """`journalctl -k -f`."""

    def __init__(
        self, program: str, environ: Mapping[str, str], timeout_s: float, at: Position | None = None
    ) -> None:
        """Start journalctl.

        Args:
            program: journalctl.
            environ: its environment.
            timeout_s: after which it counts as hanging.
            at: a position of before; None: its end.

        Raises:
            Unavailable: this user may not see the kernel's lines, or journalctl does not answer.
        """
        self._splitter = LineSplitter()
        self._process: subprocess.Popen[bytes] | None = None
        self._at = time.time()
        since = None if at is None else at.get("since")
        new = ["-n", "0"]
        if isinstance(since, int | float) and 0 < since <= self._at:
            new, self._at = ["--no-tail", f"--since=@{int(since)}"], float(since)
        form = ["--no-pager", "--output=short-monotonic"]
        try:
            answer = subprocess.run(
                [program, "-k", "-n", "1", *form], env=dict(environ), stdin=subprocess.DEVNULL,
                capture_output=True, timeout=timeout_s, check=False,
            )  # fmt: skip
            if b" kernel: " not in answer.stdout:
                printed = (answer.stderr or answer.stdout).decode("utf-8", errors="replace").strip()
                last = (printed.splitlines() or ["it is empty"])[-1]
                raise Unavailable(f"journalctl shows no line of the kernel: {last}")
            self._process = subprocess.Popen(
                [program, "-k", "-f", *new, *form], env=dict(environ), stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise Unavailable(f"journalctl timed out after {timeout_s:g} s") from error
        except OSError as error:
            raise Unavailable(f"journalctl cannot be run: {error.strerror}") from error
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def lines(self) -> list[str]:
        """See Source."""
        assert self._process is not None and self._process.stdout is not None
        began = time.time()
        read_lines: list[str] = []
        while len(read_lines) < MOST_RECORDS:
            try:
                chunk = os.read(self._process.stdout.fileno(), CHUNK)
            except BlockingIOError:
                break
            if not chunk:
                raise NoMoreLines("journalctl has ended")
            read_lines += self._splitter.feed(chunk)
        self._at = began
        return [text_of(line) for line in read_lines]

    def position(self) -> Position:
        """See Source."""
        return {"since": self._at}

    def close(self) -> None:
        """See Source."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None
