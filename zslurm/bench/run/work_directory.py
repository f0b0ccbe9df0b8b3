"""A directory that disappears with the process that made it, however that process ends.

A small process in another session waits for the end of a pipe, which a SIGKILL closes too, and removes the
directory.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

PREFIX = ".zslurm-bench-"

_REMOVER = "import shutil, sys; sys.stdin.buffer.read(); shutil.rmtree(sys.argv[1], ignore_errors=True)"


class WorkDirectory:
    """A directory of this process, for files that need names."""

    def __init__(self, path: Path) -> None:
        """Make the directory; `path.parent` exists.

        Raises:
            OSError: it cannot be made.
        """
        self.path = path
        path.mkdir(mode=0o700, exist_ok=True)
        self._remover = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _REMOVER, str(path)], stdin=subprocess.PIPE, cwd="/",
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def remove(self) -> None:
        """Remove it, with all that it holds."""
        shutil.rmtree(self.path, ignore_errors=True)
        assert self._remover.stdin is not None
        with suppress(OSError):
            self._remover.stdin.close()
        self._remover.wait()
