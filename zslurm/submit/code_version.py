"""Which code a run was submitted with: zslurm's version, and the git commit and local changes around it."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import zslurm
from zslurm.core.redact import redact

_MOST_UNTRACKED = 100


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments],
            capture_output=True, text=True, errors="replace", timeout=20, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def code_version(directory: Path) -> tuple[dict[str, Any], str]:
    """Return versions, and the commit, local changes and new files of the git checkout around `directory`.

    Returns:
        a description for code.json, and the diff (empty if there is none, or no git), without secrets.
    """
    commit = _git(directory, "rev-parse", "HEAD")
    diff = _git(directory, "diff", "HEAD") if commit else None
    new = _git(directory, "ls-files", "--others", "--exclude-standard") if commit else None
    untracked = (new or "").splitlines()
    body = {
        "zslurm": zslurm.__version__,
        "python": platform.python_version(),
        "git_commit": commit.strip() if commit else None,
        "git_changed": bool(diff),
        "git_untracked": untracked[:_MOST_UNTRACKED],
        "git_untracked_count": len(untracked),
    }
    return body, redact(diff or "")
