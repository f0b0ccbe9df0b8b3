"""Submit a run: check it, prepare or continue its directory, hand it to a launcher, and remember the job.

A run is its name under runs_dir. Submitting it again continues it from its last checkpoint and reports the keys
that changed; another model or tokenizer is refused; a run that is active is refused.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from zslurm.cluster.gemm_tables import find_kernel_tables, table_of
from zslurm.cluster.rccl.environment import left_out_note
from zslurm.config.load import load_spec
from zslurm.config.spec import RunSection, RunSpec
from zslurm.core.errors import ConfigError, ZslurmError
from zslurm.core.extras import require
from zslurm.job.preparation.code_copy import copied_code
from zslurm.job.successor import cancel_last_successor, successor_spec
from zslurm.run import index
from zslurm.run.events import Submitted, SuccessorSubmitted
from zslurm.run.events.by_user import record_by_user
from zslurm.run.events.event import Event, only_known
from zslurm.run.identity import forget_original, location
from zslurm.run.run_dir import RunDir, not_writable
from zslurm.run.secrets import read_secrets, without_secrets, write_secrets
from zslurm.run.state.run_state import recorded_job
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.run_command import Retries
from zslurm.submit.code_version import code_version
from zslurm.submit.continuation import check_continues, refuse_active
from zslurm.submit.submit_lock import submit_lock

if TYPE_CHECKING:  # cancel, hold and exec need this file too, and neither numpy nor h5py nor jinja2
    from zslurm.submit.script.render import JobScript
    from zslurm.train.data.order import DataOrder

Launch = Callable[["JobScript", RunDir], tuple[str, dict[str, Any]]]
"""Starts a script: returns a job id, and the process that holds a local run."""


@dataclass(frozen=True)
class Prepared:
    """A run that passed the checks that need no data, with the script that its job will be given.

    Attributes:
        start_over: a run of this name that is there is moved aside.
    """

    spec: RunSpec
    run: RunDir
    script: JobScript
    start_over: bool

    @property
    def continues(self) -> RunDir | None:
        """Return the directory whose checkpoints it continues from; None if it starts over."""
        return None if self.start_over else self.run


@dataclass(frozen=True)
class Submission:
    """A submitted run."""

    job_id: str
    run: RunDir
    continued: bool
    changed: list[str]
    notes: list[str]


def run_dir_of(spec: RunSpec) -> RunDir:
    """Return the directory of a run: its name under runs_dir."""
    return RunDir(Path(spec.run.runs_dir) / spec.run.name)


def prepare(spec: RunSpec, *, new: bool = False) -> Prepared:
    """Check a resolved run and render its script. Nothing is written.

    With `new` the run starts over: an existing one of the name is moved aside when it is submitted.

    Raises:
        ConfigError, NotFound: see `check_before_submission`.
    """
    from zslurm.submit.checks.run import check_before_submission

    run = run_dir_of(spec)
    return Prepared(spec, run, check_before_submission(spec, run, start_over=new), start_over=new)


def submit(spec: RunSpec, *, new: bool = False) -> Submission:
    """Check and submit a resolved run; arguments as for `prepare`, errors of `prepare` and `submit_prepared`."""
    return submit_prepared(prepare(spec, new=new))


def submit_prepared(prepared: Prepared) -> Submission:
    """Submit a run.

    Raises:
        ConfigError: the data or the run directory is not usable, or it is another run's.
        RunActive: the run is active.
        SlurmUnavailable, SlurmRefused: from the launcher.
    """
    from zslurm.submit.checks.run import check_data, notes_on

    spec, run = prepared.spec, prepared.run
    # What can be found wrong is found before anything is written or moved.
    order = check_data(spec)
    launch = _launcher(spec)
    with submit_lock(run):
        changed = _check_existing(prepared, order)
        notes = notes_on(spec, order, continues=prepared.continues)
        if (unset := left_out_note(spec.cluster)) is not None:
            notes.append(unset)
        continued = _clear_way(prepared)
        run.create(group_readable=spec.run.group_readable)
        if (recorded := recorded_job(run)) is not None and recorded.original is not None:
            try:  # the files of a copied run name processes of its original
                forget_original(run)
            except OSError as error:
                raise not_writable(error, run.path) from error
        with _restored_on_error(run), copied_code(spec, run) as left_out:
            notes += left_out
            _write_files(prepared, _tokenizer(order))
            expected = _expected_start(spec, prepared.script.text)
            job_id, process = launch(prepared.script, run)
        notes += _indexed(job_id, run, spec)
        event = Submitted(job_id=job_id, changed=changed, expected_start=expected, **location(run), **process)
        record_action(run, only_known(event), spec)
        notes += _limit_note(spec, job_id)
        if spec.wants_successor:
            notes.append(_queue_successor(launch, spec, run, job_id))
        return Submission(job_id, run, continued, changed, notes)


def _tokenizer(order: DataOrder | None) -> str | None:
    """Return the checksum of the tokenizer of a run's data; None for another program than zslurm's trainer."""
    return None if order is None else order.data.header.tokenizer_sha256


def _check_existing(prepared: Prepared, order: DataOrder | None) -> list[str]:
    """Check against the run that is there, if any; returns the keys that change."""
    run = prepared.run
    if not run.submitted:
        return []
    refuse_active(run)
    if prepared.start_over:
        return []
    return check_continues(run, prepared.spec, _tokenizer(order))


def _clear_way(prepared: Prepared) -> bool:
    """Move a run aside that is started over, and cancel a queued successor; returns whether a run is left."""
    run = prepared.run
    if run.submitted and prepared.start_over:
        try:
            run.path.rename(run.path.with_name(f"{run.name}.{time.strftime('%Y%m%dT%H%M%S')}"))
        except OSError as error:
            raise ZslurmError(f"{run.path}: cannot be moved aside: {error.strerror}") from error
    if run.submitted:
        cancel_last_successor(run)
    return run.submitted


def _write_files(prepared: Prepared, tokenizer_sha256: str | None) -> None:
    """Write what the job and the next submission read."""
    run = prepared.run
    body, diff = code_version(Path.cwd())
    write_tables(prepared.spec, run)
    run.write_text(run.code, json.dumps({**body, "tokenizer_sha256": tokenizer_sha256}, indent=1) + "\n")
    run.write_text(run.code_diff, diff)
    run.write_text(run.config, json.dumps(without_secrets(prepared.spec).model_dump(mode="json"), indent=1) + "\n")
    write_secrets(run.secrets, prepared.script.secrets)
    run.write_text(run.script, prepared.script.text)


def write_tables(spec: RunSpec, run: RunDir) -> None:
    """Put the cluster's tables of kernels and tuned products into the run, or remove an earlier submission's.

    Raises:
        ConfigError, NotFound: see `table_of`.
    """
    kernels = find_kernel_tables(spec)
    if kernels is None:
        run.kernel_tables.unlink(missing_ok=True)
    else:
        run.write_text(run.kernel_tables, kernels.read_text(encoding="utf-8"))
    tuned = table_of(spec)
    if tuned is None:
        run.gemm_table.unlink(missing_ok=True)
        run.gemm_csv.unlink(missing_ok=True)
        return
    run.write_text(run.gemm_csv, tuned[1].csv())
    run.gemm_csv.chmod(0o440)
    run.write_text(run.gemm_table, tuned[1].model_dump_json() + "\n")


@contextmanager
def _restored_on_error(run: RunDir) -> Iterator[None]:
    """Put the files of the last accepted submission back if the launcher refuses this one."""
    files = (run.code, run.code_diff, run.config, run.script, run.gemm_table, run.gemm_csv, run.kernel_tables)
    before = {path: path.read_text(encoding="utf-8") for path in files if path.exists()}
    secrets = read_secrets(run.secrets)
    try:
        yield
    except ZslurmError:
        for path, text in before.items():
            run.write_text(path, text)
        write_secrets(run.secrets, secrets)
        raise


def _launcher(spec: RunSpec) -> Launch:
    """Return what starts the run; imported here, because only one of them is needed, and submitit is large."""
    if spec.cluster.launcher == "slurm":
        from zslurm.submit.slurm_launcher import check_slurm, submit_to_slurm

        check_slurm(spec)
        return submit_to_slurm
    if spec.trainer is None and spec.cluster.venv is None and spec.cluster.container is None:
        require("torch")  # of the environment in which the ranks will run, which is this one
    from zslurm.submit.local_launcher import submit_here

    return submit_here


def _queue_successor(launch: Launch, spec: RunSpec, run: RunDir, job_id: str) -> str:
    """Queue the job that continues the run if this one ends early; returns a note on it."""
    from zslurm.submit.script.render import render

    try:
        successor, _ = launch(render(successor_spec(spec, job_id), run), run)
    except ZslurmError as error:
        return f"job {job_id} has no successor: {error}"
    record_action(run, SuccessorSubmitted(job_id=job_id, successor=successor), spec)
    _indexed(successor, run, spec)
    return f"job {successor} waits to continue the run if job {job_id} ends early"


_ESTIMATE_S = 10.0


def _expected_start(spec: RunSpec, script: str) -> float | None:
    """Return when Slurm means to start a job (UNIX seconds); None if a long wait is not to be reported."""
    notify = spec.aegis.notify
    if spec.cluster.launcher != "slurm" or not (notify.command or notify.url or notify.apprise):
        return None
    try:
        estimate = SlurmClient(timeout_s=_ESTIMATE_S, retries=Retries(attempts=1)).estimate_start(script)
    except ZslurmError:  # the submission shows what is wrong
        return None
    return None if estimate is None else estimate.time.timestamp()


def _limit_note(spec: RunSpec, job_id: str) -> list[str]:
    """Return a note on the time limit that Slurm gave a job that asked for none; nothing if that is not known."""
    if spec.cluster.launcher != "slurm" or spec.slurm.time is not None:
        return []
    try:
        job = SlurmClient(retries=Retries(attempts=1)).queue([job_id]).get(job_id)
    except ZslurmError:
        return []
    if job is None:
        return []
    limit = "no time limit" if job.time_limit is None else f"a time limit of {job.time_limit}"
    return [f"slurm.time is not given, so Slurm gave job {job_id} {limit}"]


def _indexed(job_id: str, run: RunDir, spec: RunSpec) -> list[str]:
    """Add the job to the per-user index; returns a note if that fails: the job is on its way already."""
    try:
        index.record(index.new_entry(job_id, run, spec.cluster.name, spec.cluster.launcher))
    except ZslurmError as error:
        return [f"{error}; until then commands find the run by its path, {run.path}"]
    return []


def spec_of(run: RunDir) -> RunSpec:
    """Return the run as it was submitted last, with the present location of its directory.

    Raises:
        ConfigError: config.json is missing or damaged, or the directory's name is no name of a run.
    """
    spec = load_spec(run.config)
    if run_dir_of(spec).path == run.path.absolute():
        return spec
    moved = {"name": run.path.absolute().name, "runs_dir": str(run.path.absolute().parent)}
    try:
        section = RunSection.model_validate({**spec.run.model_dump(mode="json"), **moved})
    except ValidationError as error:
        why = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{run.path}: rename the directory: run.name {why}") from error
    return spec.model_copy(update={"run": section})


def record_action(run: RunDir, event: Event, spec: RunSpec) -> None:
    """Append what was done to a job to submissions.jsonl, with the launcher and the cluster of its run.

    Raises:
        ZslurmError: the file cannot be written.
    """
    where = {"job_id": event.job_id, "launcher": spec.cluster.launcher, "cluster": spec.cluster.name}
    record_by_user(run, type(event)(**where | event.fields()))
