"""Which code a run was submitted with: zslurm's version, and the git commit and local changes around it."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import zslurm


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def code_version(directory: Path) -> tuple[dict[str, Any], str]:
    """What runs: versions, and for the git checkout around `directory` its commit and uncommitted diff.

    Returns:
        a description for code.json, and the diff (empty where there is none, or no git).
    """
    commit = _git(directory, "rev-parse", "HEAD")
    diff = _git(directory, "diff", "HEAD") if commit else None
    body = {
        "zslurm": zslurm.__version__,
        "python": platform.python_version(),
        "git_commit": commit.strip() if commit else None,
        "git_changed": bool(diff),
    }
    return body, diff or ""
