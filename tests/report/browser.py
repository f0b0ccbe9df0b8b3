"""Chromium without a window: a picture of a page, its document after its scripts have run, and its complaints."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

_NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome", "google-chrome-stable")


@dataclass(frozen=True)
class Browser:
    """A browser and a directory of its own."""

    program: str
    directory: Path

    def _run(self, page: Path, *options: str) -> subprocess.CompletedProcess[str]:
        command = [
            self.program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--hide-scrollbars", "--enable-logging=stderr", f"--user-data-dir={self.directory / 'profile'}",
            "--host-resolver-rules=MAP * ~NOTFOUND", *options, page.as_uri(),
        ]  # fmt: skip
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)

    def document(self, page: Path) -> tuple[str, list[str]]:
        """The document after its scripts have run, and what they and the browser wrote to the console."""
        done = self._run(page, "--dump-dom")
        return done.stdout, _console(done.stderr)

    def screenshot(self, page: Path, out: Path, width: int, height: int) -> list[str]:
        """Take a picture of the page; return what was written to the console."""
        done = self._run(page, f"--window-size={width},{height}", f"--screenshot={out}")
        return _console(done.stderr)


def _console(log: str) -> list[str]:
    return [line for line in log.splitlines() if ":CONSOLE" in line]


def find_browser(directory: Path) -> Browser:
    """The browser of this machine; without one the test is skipped, and fails in CI, which installs one."""
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        reason = "no Chromium on this machine (Debian: apt-get install chromium-headless-shell)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return Browser(program, directory)
