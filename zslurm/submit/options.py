"""Options of `zslurm submit` as overrides of the run: everything that a run needs is in its configuration."""

from __future__ import annotations

import re
from collections.abc import Sequence

from zslurm.core.errors import ConfigError
from zslurm.run.index import find_run
from zslurm.run.state.run_state import last_job
from zslurm.slurm.sbatch_options import BY_NAME, RESERVED

_DEPENDENCIES = "after afterany afterok afternotok afterburstbuffer aftercorr".split()
_TIMED_JOB = re.compile(r"\d+(_\d+)?(\+\d+)?")
_FLAG = re.compile(r"--([a-z][a-z0-9-]*)(?:=(.*))?", re.DOTALL)


def dependency(jobs: Sequence[str]) -> str | None:
    """Return Slurm's form of `--dependency [TYPE:]JOB ...`; a job may be a run's name; all must hold.

    Raises:
        ConfigError: not a dependency.
        NotFound: no such run, or it was never submitted.
    """
    return ",".join(_dependency(job_text) for job_text in jobs) or None


def _dependency(given: str) -> str:
    if given == "singleton":
        return given
    kind, colon, job = given.partition(":")
    if not colon:
        kind, job = "afterok", given
    if kind not in _DEPENDENCIES:
        raise ConfigError(
            f"--dependency {given}: `{kind}` is no type of dependency; types: {', '.join(_DEPENDENCIES)}"
        )
    parts = job.split(":")
    return ":".join([kind, *(word if _TIMED_JOB.fullmatch(word) else _job_of(word, given) for word in parts)])


def _job_of(reference: str, given: str) -> str:
    """Return the Slurm job of a run that was submitted last."""
    run = find_run(reference)
    job = last_job(run)
    if job is None or job.launcher != "slurm":
        raise ConfigError(f"--dependency {given}: {run.name} has no Slurm job")
    return job.job_id


def sbatch_flags(words: Sequence[str]) -> dict[str, str | bool]:
    """Return the options of sbatch after `--` on the command line.

    Raises:
        ConfigError: a word is no long option, or an option that zslurm sets itself.
    """
    flags: dict[str, str | bool] = {}
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        match = _FLAG.fullmatch(word)
        if match is None:
            what = (
                "write the long form of the option" if word.startswith("-") else "options of sbatch begin with --"
            )
            raise ConfigError(f"{word}: not a long option of sbatch; {what}, e.g. -- --mail-type=END --exclusive")
        name, value = match[1], match[2]
        if name in RESERVED:
            option = BY_NAME[name]
            instead = f"; use {option.instead}" if option.instead else ""
            raise ConfigError(f"--{name}: zslurm sets it itself{instead}")
        if value is None and remaining and not remaining[0].startswith("-"):
            value = remaining.pop(0)
        flags[name] = True if value is None else value
    return flags
