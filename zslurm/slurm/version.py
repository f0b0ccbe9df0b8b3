"""Slurm's version, and what zslurm can do with which."""

from __future__ import annotations

import re

_VERSION = re.compile(r"(?:^|\s)(\d{2})\.(\d{1,2})(?:\.(\d+))?")

OLDEST = (20, 11, 0)
"""The oldest whose output forms were looked at."""
_OVERLAP_SHARES_GPUS = (22, 5, 0)
"""Since this version a step with --overlap uses GPUs that another step of the job holds (its RELEASE_NOTES)."""
_SETS_JOB_END_TIME = (23, 2, 0)
"""Since this version a job finds SLURM_JOB_END_TIME in its environment (its RELEASE_NOTES)."""
_NO_RANK_BINDING = (24, 11, 0)
"""Since this version srun ignores `--cpu-bind=rank` ("Rank binding is obsolete")."""

LACKS = (
    (OLDEST, ", the oldest whose output was looked at."),
    (
        _OVERLAP_SHARES_GPUS,
        ": spare nodes and agents next to the ranks need a step that shares their GPUs; a plainer watch takes "
        "their place.",
    ),
    (
        _SETS_JOB_END_TIME,
        ": a job does not know its end (SLURM_JOB_END_TIME); it saves when Slurm's signal comes.",
    ),
)
"""What a Slurm before each version lacks, as `zslurm init` notes it in the profile."""

NEEDED = {
    "sbatch": ("--signal", "--requeue", "--no-kill"),
    "srun": ("--overlap", "--distribution", "--kill-on-bad-exit", "--no-kill", "--unbuffered", "--wait"),
    "squeue": ("--Format",),
}
"""Options without which a run cannot be started or watched, by command. Every Slurm since 20.11 has them; Spur
(ROCm/spur), which has commands of the same names, did not in version 0.8."""

_TEST_ONLY_CRASHES = (((23, 11, 0), (24, 11, 2)), ((25, 5, 0), (25, 11, 7)))
"""From, and before: versions in which `sbatch --test-only` can crash slurmctld."""


def test_only_is_safe(version: tuple[int, int, int]) -> bool:
    """Return whether `sbatch --test-only` may be called."""
    return not any(first <= version < repaired for first, repaired in _TEST_ONLY_CRASHES)


class Version(tuple[int, int, int]):
    """`22.05.8` as numbers, to be compared."""

    def __str__(self) -> str:
        year, month, patch = self
        return f"{year}.{month:02d}.{patch}"


def parse_version(text: str) -> Version | None:
    """Return the version in `slurm 23.11.4` or `slurm-wlm 22.05.8`, as `squeue --version` prints it.

    None without one.
    """
    match = _VERSION.search(text)
    return Version((int(match[1]), int(match[2]), int(match[3] or 0))) if match else None


def is_spur(text: str) -> bool:
    """Return whether what a command prints for `--version` is of AMD's scheduler Spur."""
    return text.strip().lower().startswith("spur")


def missing_options(command: str, help_text: str) -> list[str]:
    """Return the options of `NEEDED` that a command's `--help` does not name."""
    named = set(re.findall(r"--[\w-]+", help_text))
    return [option for option in NEEDED[command] if option not in named]


def shares_gpus(version: Version) -> bool:
    """Return whether a step with --overlap uses GPUs that another step of the job holds."""
    return version >= _OVERLAP_SHARES_GPUS


def why_not_shared(version: Version) -> str:
    """Return why steps cannot share a job's GPUs; empty if they can."""
    if shares_gpus(version):
        return ""
    return f"need Slurm 22.05 or newer, where steps can share a job's GPUs; this is {version}"


def why_not_bound_by_rank(version: Version) -> str:
    """Return why `--cpu-bind=rank` has no effect; empty if it has one."""
    return f"srun ignores `rank` since Slurm 24.11, and this is {version}" if version >= _NO_RANK_BINDING else ""
