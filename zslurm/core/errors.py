"""Errors that a user of the command line can act on, each with its documented exit code.

Exit codes: 0 done, 1 failed, 2 usage or configuration, or an extra is missing, 3 not found, 4 Slurm unavailable,
5 check failed, 75 interrupted after saving (submit again to continue), 93 stopped for good: do not requeue.
"""

from __future__ import annotations

from enum import IntEnum

from zslurm.error import Error


class Exit(IntEnum):
    """Exit codes of every zslurm command."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    SLURM_UNAVAILABLE = 4
    CHECK_FAILED = 5
    INTERRUPTED = 75
    STOPPED = 93


class ZslurmError(Error):
    """Something went wrong that one line can explain: what, where, and what to do next."""

    exit_code: Exit = Exit.FAILED


class ConfigError(ZslurmError):
    """A run file, profile, override or option is wrong."""

    exit_code = Exit.USAGE


class NoProfile(ConfigError):
    """No cluster profile was named, and there is none."""


class NotFound(ZslurmError):
    """A run, job, file or template that was named does not exist."""

    exit_code = Exit.NOT_FOUND


class CheckFailed(ZslurmError):
    """What was checked is not in order; one line for each fault."""

    exit_code = Exit.CHECK_FAILED


class SlurmUnavailable(ZslurmError):
    """Slurm's commands are missing, or its controller does not answer."""

    exit_code = Exit.SLURM_UNAVAILABLE


class SlurmRefused(ZslurmError):
    """Slurm answered, and refused; its message is passed on."""


class RunCompleted(ZslurmError):
    """The run has trained all its steps."""


class RunDirGone(ZslurmError):
    """The run directory was moved or removed while the run trained."""

    exit_code = Exit.STOPPED


class RunActive(ZslurmError):
    """The run is being trained right now."""
