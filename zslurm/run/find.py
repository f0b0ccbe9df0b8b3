"""Find the run that is meant on the command line; explain a job id that is of no run."""

from __future__ import annotations

import getpass
import re
from pathlib import Path

from zslurm.core.errors import NotFound, ZslurmError
from zslurm.run import index
from zslurm.run.identity import job_ids
from zslurm.run.run_dir import RunDir
from zslurm.run.state.run_state import last_job
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.jobs import JobRecord
from zslurm.slurm.run_command import Retries

# 12345, a Slurm step 12345.0 or 12345.batch, an array's task 12345_7 or 12345_[0-9], a het job's part 12345+1
_JOB = re.compile(r"(?P<job>\d+)(?:\.(?P<step>\w+)|_(?P<task>\d+|\[[\d,%-]+\])|\+(?P<part>\d+))?")
_PATIENCE_S = 8.0


def find(reference: str) -> RunDir:
    """Return the run that a name, a path, a job id or a Slurm step's id means.

    A job that is not in the index, such as one that was submitted from another home, is found by its output, which
    is in the run's directory.

    Raises:
        NotFound: none; the nearest name is suggested, and Slurm is asked whose job it is.
        OrphanJob: it is a job of a run whose directory is gone.
    """
    try:
        return index.find_run(reference)
    except NotFound as error:
        match = _JOB.fullmatch(reference)
        if match is None:
            raise
        if match["step"]:
            return find(match["job"])
        record = _ask(match["job"])
        if record is not None and match["job"] == reference and record.user == getpass.getuser():
            run = _run_by_output(reference)
            if run is not None and run.exists:
                return run
            if run is not None:
                raise OrphanJob(record, run) from None
        raise NotFound(_explain(reference, match, record, str(error))) from None


class OrphanJob(NotFound):
    """A job of this user's that zslurm submitted, and whose run directory is gone.

    Attributes:
        job: what Slurm knows of it.
        run: the former path of the directory.
    """

    def __init__(self, job: JobRecord, run: RunDir) -> None:
        self.job, self.run = job, run
        end = f"; `scancel {job.job_id}` ends it" if job.state.is_active else ""
        super().__init__(
            f"{job.job_id}: job `{job.name}` is {job.state.lower().replace('_', ' ')}"
            f"{f' on {job.nodes}' if job.nodes else ''}, and its run directory {run.path} is gone{end}"
        )


def find_to_change(reference: str, command: str) -> RunDir:
    """As `find`, for a command that acts on the run's job: an id of an earlier job does not mean the present one.

    `command` is named in the message.

    Raises:
        NotFound, OrphanJob: as `find`.
        ZslurmError: the id belongs to an earlier job of the run.
    """
    run = find(reference)
    asked, _, _ = reference.partition(".")
    job = last_job(run)
    if job is None or asked in (job.job_id, job.successor) or asked not in job_ids(run):
        return run
    raise ZslurmError(
        f"{reference}: an earlier job of {run.name}, whose job is {job.job_id} now; "
        f"`zslurm {command} {run.name}` acts on that"
    )


def _run_by_output(job_id: str) -> RunDir | None:
    """Return the directory of the run whose job this is, by the file that its output goes to.

    None for any other job.
    """
    try:
        output = Path(_client().output_file(job_id))
    except ZslurmError:
        return None
    run = RunDir(output.parent.parent)
    return run if output == run.job_log(job_id) else None


def find_all(references: list[str]) -> list[RunDir]:
    """Return the runs that several references mean, each once, in their order. Raises as `find`."""
    return list(dict.fromkeys(find(reference) for reference in references))


def _explain(reference: str, match: re.Match[str], record: JobRecord | None, unknown: str) -> str:
    """Return what to say of a job id that belongs to no run of this user."""
    kind = "a task of a job array" if match["task"] else "a part of a heterogeneous job" if match["part"] else ""
    said = f"{reference}: {kind}, and no run: a run is one plain job" if kind else unknown
    if record is None:
        return said
    owner = "a job of yours" if record.user == getpass.getuser() else f"{record.user}'s job"
    about = f"`{record.name}`, {record.state.lower().replace('_', ' ')}"
    if kind:
        return f"{said} ({owner} {about})"
    is_own = record.user == getpass.getuser() and record.state.is_active
    hint = f"`scancel {reference}` ends it" if is_own else "`zslurm status` lists your runs"
    return f"{reference}: {owner} {about}, and no run of yours; {hint}"


def _ask(job_id: str) -> JobRecord | None:
    """Return what Slurm knows of the job.

    None if it does not answer, or not at all: the message can do without.
    """
    try:
        records = _client().queue([job_id])
    except ZslurmError:
        return None
    return next(iter(records.values()), None)


def _client() -> SlurmClient:
    return SlurmClient(timeout_s=_PATIENCE_S, retries=Retries(attempts=1))
