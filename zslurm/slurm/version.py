"""Slurm's version, and what zslurm can do with which."""

from __future__ import annotations

import re

_VERSION = re.compile(r"(?:^|\s)(\d{2})\.(\d{1,2})(?:\.(\d+))?")

OLDEST = (20, 11, 0)
"""The oldest whose output forms were looked at."""
OVERLAP_SHARES_GPUS = (22, 5, 0)
"""From here on a step with --overlap uses the GPUs that another step of the job holds (RELEASE_NOTES of 22.05)."""


class Version(tuple[int, int, int]):
    """`22.05.8` as numbers, to be compared."""

    def __str__(self) -> str:
        year, month, patch = self
        return f"{year}.{month:02d}.{patch}"


def parse_version(text: str) -> Version | None:
    """The version in `slurm 23.11.4` or `slurm-wlm 22.05.8`, as `squeue --version` prints it; None without one."""
    match = _VERSION.search(text)
    return Version((int(match[1]), int(match[2]), int(match[3] or 0))) if match else None
