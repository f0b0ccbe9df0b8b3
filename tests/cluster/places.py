"""Where profiles are in tests."""

from __future__ import annotations

from pathlib import Path

from tests.config.run_files import write
from zslurm.cluster.profile import profile_path


def own(name: str, text: str = "cluster: {launcher: slurm}\n") -> Path:
    """A profile of the user's own."""
    return write(profile_path(name), text)
