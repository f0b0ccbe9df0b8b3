"""Find the run that somebody means on the command line, and say clearly what a job id is that is none of ours."""

from __future__ import annotations

import getpass
import re

from zslurm.errors import NotFound, ZslurmError
from zslurm.launch import index
from zslurm.launch.run_dir import RunDir
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.commands import Retries
from zslurm.slurm.jobs import JobRecord

# 12345, a Slurm step 12345.0 or 12345.batch, an array's task 12345_7 or 12345_[0-9], a het job's part 12345+1
_JOB = re.compile(r"(?P<job>\d+)(?:\.(?P<step>\w+)|_(?P<task>\d+|\[[\d,%-]+\])|\+(?P<part>\d+))?")
_PATIENCE_S = 8.0


def find(reference: str) -> RunDir:
    """The run that a name, a path, a job id or a Slurm step's id means.

    Raises:
        NotFound: none; the nearest name is suggested, and Slurm is asked whose job it is.
    """
    try:
        return index.find_run(reference)
    except NotFound as error:
        match = _JOB.fullmatch(reference)
        if match is None:
            raise
        if match["step"]:
            return find(match["job"])
        raise NotFound(_explain(reference, match, str(error))) from None


def find_all(references: list[str]) -> list[RunDir]:
    """The runs that several references mean, each once, in their order. Raises as `find`."""
    return list(dict.fromkeys(find(reference) for reference in references))


def _explain(reference: str, match: re.Match[str], unknown: str) -> str:
    """What to say of a job id that belongs to no run of this user."""
    kind = "a task of a job array" if match["task"] else "a part of a heterogeneous job" if match["part"] else ""
    said = f"{reference}: {kind}, and no run: a run is one plain job" if kind else unknown
    record = _ask(match["job"])
    if record is None:
        return said
    owner = "a job of yours" if record.user == getpass.getuser() else f"{record.user}'s job"
    about = f"`{record.name}`, {record.state.lower().replace('_', ' ')}"
    if kind:
        return f"{said} ({owner} {about})"
    return f"{reference}: {owner} {about}, and no run of yours; `zslurm status` lists your runs"


def _ask(job_id: str) -> JobRecord | None:
    """What Slurm knows of the job; None where it does not answer, or not at all: the message can do without."""
    try:
        found = SlurmClient(timeout_s=_PATIENCE_S, retries=Retries(attempts=1)).queue([job_id])
    except ZslurmError:
        return None
    return next(iter(found.values()), None)
