"""Submit a run: check it, prepare or continue its directory, hand it to a launcher, and remember the job.

A run is its name under runs_dir. Submitting it again continues it from its last checkpoint; the keys that
changed are told; another model or tokenizer is refused; a run that is active is refused.
"""

from __future__ import annotations

import getpass
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from zslurm.checkpoint_tools import Checkpoint, CheckpointError, list_checkpoints
from zslurm.cluster.rccl.environment import lint, overridden, read_conf
from zslurm.cluster.xgmi import group_cost
from zslurm.config.layers import show_path
from zslurm.config.load import load_spec
from zslurm.config.spec import RunSection, RunSpec
from zslurm.core.errors import ConfigError, RunActive, ZslurmError
from zslurm.core.files import read_json
from zslurm.core.redact import redact_value
from zslurm.hardware.sysfs import sysroot
from zslurm.job.code_copy import copied_code
from zslurm.job.container import check_container
from zslurm.job.successor import dismiss_leftover, successor_spec
from zslurm.run import index
from zslurm.run.identity import forget_original, location
from zslurm.run.run_dir import RunDir, not_writable
from zslurm.run.secrets import (
    read_secrets,
    refuse_misplaced_secrets,
    split_secrets,
    with_secrets,
    without_secrets,
    write_secrets,
)
from zslurm.run.state import look, recorded_job
from zslurm.slurm.jobs import time_limit
from zslurm.submit.code_version import code_version
from zslurm.submit.completed import refuse_completed
from zslurm.submit.script.render import job_environment, render
from zslurm.submit.script.template_check import refuse_broken_script
from zslurm.submit.submit_lock import submit_lock
from zslurm.train.config import model_fingerprint
from zslurm.train.data.order import DataOrder
from zslurm.train.data.training_data import TrainingData
from zslurm.train.errors import TrainError
from zslurm.train.evaluation.validation_data import open_validation_data
from zslurm.train.jsonl import JsonLinesWriter
from zslurm.train.schedule import Plan, check_ranks, compare

Launch = Callable[[RunSpec, RunDir], tuple[str, dict[str, Any]]]
"""Starts a run: returns a job id, and the process that holds a local run."""


@dataclass(frozen=True)
class Submission:
    """A submitted run."""

    job_id: str
    run: RunDir
    continued: bool
    changed: list[str]
    notes: list[str]


def run_dir_of(spec: RunSpec) -> RunDir:
    """Where a run lives: its name under runs_dir."""
    return RunDir(Path(spec.run.runs_dir) / spec.run.name)


def check_data(spec: RunSpec) -> DataOrder:
    """Open the run's data, and its held-out text if it has any, as the trainer will; returns the data's order.

    Raises:
        ConfigError: there is none, it is damaged, it does not fit the model or the phases, or its parts were made
            with other tokenizers.
    """
    with _as_config_error():
        data = TrainingData.open(spec.data)
        data.check_fits(spec.model.vocab_size)
        order = DataOrder(data, Plan(spec.phases), spec.run.seed)
        if spec.evaluation.data is not None:
            tokenizer = data.header.tokenizer_sha256
            open_validation_data(
                spec.evaluation.data, tokenizer_sha256=tokenizer, model=spec.model, phases=spec.phases
            )
    return order


def check_steps(spec: RunSpec, order: DataOrder, continues: RunDir | None) -> list[str]:
    """Check the run's steps, and what it starts or continues from; returns what is worth knowing, a line each.

    Args:
        order: of the run's data.
        continues: the run that is continued, if it exists; without a checkpoint of its own it starts anew.

    Raises:
        ConfigError: a batch has fewer sequences than there are ranks; steps that are done would move; the
            weights to start from cannot be read, or are of another model or tokenizer.
    """
    with _as_config_error():
        notes = check_ranks(spec.phases, spec.world_size)
        saved = list_checkpoints(continues.checkpoints) if continues is not None else []
        newest = next((found.path for found in saved if found.complete), None)
        if newest is not None:
            with Checkpoint.open(newest, check_files=False) as checkpoint:
                manifest = checkpoint.manifest
            notes += compare(manifest.cursor.get("plan"), order.plan, manifest.step)
            notes += order.changes(manifest.cursor, manifest.step)
            assert continues is not None
            refuse_completed(spec, continues)
        elif spec.init is not None:
            from zslurm.train.checkpointing.init_weights import open_init

            open_init(spec.init, spec.model, order.data.header.tokenizer_sha256).close()
    return notes


def lint_environment(spec: RunSpec, environ: Mapping[str, str] = os.environ) -> list[str]:
    """What is wrong with the variables of RCCL, NCCL and PyTorch that the ranks will see, a line each.

    Args:
        spec: the run.
        environ: the environment that the job inherits where it sets nothing itself.
    """
    job, inherited = job_environment(spec), _exported(spec, environ)
    given = {"HOME": environ.get("HOME", ""), **inherited, **job}
    conf = read_conf(given, spec.cluster, sysroot())
    findings = [*lint(given, spec.cluster, conf), *overridden(inherited, job)]
    return [finding.line for finding in findings]


def _exported(spec: RunSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """What of the login environment reaches the job, by slurm.export."""
    if spec.cluster.launcher == "local" or spec.slurm.export == "ALL":
        return dict(environ)
    names = () if spec.slurm.export == "NONE" else spec.slurm.export.split(",")
    return {name: environ[name] for name in names if name in environ}


def lint_cores(spec: RunSpec) -> list[str]:
    """Whether ranks with a GPU get a single core because nobody said how many a node has."""
    known = spec.slurm.cpus_per_task or spec.cluster.cpus_per_node
    if spec.cluster.launcher == "local" or not spec.cluster.gpus_per_node or known:
        return []
    return [
        "each rank gets 1 core, which starves its GPU: set cluster.cpus_per_node in the profile (`zslurm init` "
        "does), or slurm.cpus_per_task"
    ]


def lint_groups(spec: RunSpec) -> list[str]:
    """Return what ranks per node cost that use only some of a node's xGMI links."""
    cost = group_cost(spec.cluster, spec.ranks_per_node) if spec.parallel.device != "cpu" else None
    return [cost] if cost is not None else []


def remarks(spec: RunSpec, order: DataOrder, *, continues: RunDir | None) -> list[str]:
    """What is worth knowing about a run before it is submitted, a line each.

    Raises:
        ConfigError: see `check_steps`.
    """
    steps = check_steps(spec, order, continues=continues)
    return [*steps, *lint_cores(spec), *lint_groups(spec), *lint_environment(spec)]


@contextmanager
def _as_config_error() -> Iterator[None]:
    """The trainer's complaints as the launcher's."""
    try:
        yield
    except (TrainError, CheckpointError) as error:
        raise ConfigError(str(error)) from error


def changed_keys(old: RunSpec, new: RunSpec) -> list[str]:
    """Every key whose value differs, as `key: old -> new`."""
    before, after = _flat(old.model_dump(mode="json")), _flat(new.model_dump(mode="json"))
    return [
        f"{key}: {_shown(key, before.get(key))} -> {_shown(key, after.get(key))}"
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key)
    ]


def _shown(key: str, value: Any) -> str:
    return json.dumps(redact_value(key.rpartition(".")[2], value))


def _flat(value: Any, path: tuple[str | int, ...] = ()) -> dict[str, Any]:
    if isinstance(value, dict):
        items: Any = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        return {show_path(path): value}
    return {key: leaf for name, item in items for key, leaf in _flat(item, (*path, name)).items()}


def check_continues(run: RunDir, spec: RunSpec, tokenizer_sha256: str) -> list[str]:
    """What would change if `spec` were submitted to an existing run.

    Raises:
        RunActive: it is being trained right now.
        ConfigError: it is of another model or tokenizer.
    """
    state = look(run)
    if state.active:
        raise RunActive(
            f"{run.name}: the run is {state.state} as job {state.job_id}; `zslurm cancel {run.name}` first, "
            "or give the new run another name"
        )
    old = last_spec(run)
    if model_fingerprint(old.model) != model_fingerprint(spec.model):
        differing = [line for line in changed_keys(old, spec) if line.startswith("model.")]
        raise ConfigError(
            f"{run.path}: the run has another model ({'; '.join(differing)}); "
            "set the model back, choose another run.name, or start over with --new"
        )
    data = (read_json(run.code) or {}).get("tokenizer_sha256")
    if data is not None and data != tokenizer_sha256:
        raise ConfigError(
            f"{run.path}: the run was started with another tokenizer than {spec.data.path or 'data.sources'} has; "
            "set data.path back, choose another run.name, or start over with --new"
        )
    return changed_keys(old, spec)


def last_spec(run: RunDir) -> RunSpec:
    """The run as it was submitted last, its secrets included as far as they are still there."""
    old = load_spec(run.config)
    try:
        return with_secrets(old, run.secrets)
    except ConfigError:
        return old


def _set_aside(run: RunDir) -> Path:
    """Move an existing run out of the way; nothing is deleted."""
    aside = run.path.with_name(f"{run.name}.{time.strftime('%Y%m%dT%H%M%S')}")
    try:
        run.path.rename(aside)
    except OSError as error:
        raise ZslurmError(f"{run.path}: cannot be moved aside: {error.strerror}") from error
    return aside


def submit(spec: RunSpec, *, new: bool = False) -> Submission:
    """Submit a resolved run.

    Args:
        spec: the run.
        new: start over; an existing run of the name is moved aside.

    Raises:
        ConfigError: the data, the template or the run directory is not usable, or it is another run's.
        RunActive: the run is active.
        SlurmUnavailable, SlurmRefused: from the launcher.
    """
    order = check_data(spec)
    tokenizer = order.data.header.tokenizer_sha256
    run = run_dir_of(spec)
    # What can be found wrong is found before anything is written or moved.
    check_before_submission(spec, run)
    launch = _launcher(spec)
    with submit_lock(run):
        changed: list[str] = []
        if run.submitted and not new:
            changed = check_continues(run, spec, tokenizer)
        notes = remarks(spec, order, continues=None if new else run)
        if run.submitted and new:
            check_idle(run)
            _set_aside(run)
        if run.submitted:
            dismiss_leftover(run)
        continued = run.submitted
        run.create(group_readable=spec.run.group_readable)
        _leave_original(run)
        with _restored_on_error(run), copied_code(spec, run) as left_out:
            notes += left_out
            _write_files(run, spec, tokenizer)
            job_id, process = launch(spec, run)
        record_action(run, "submit", job_id, spec, changed=changed, **location(run), **process)
        notes += _indexed(job_id, run, spec)
        if spec.wants_successor:
            notes.append(_queue_successor(launch, spec, run, job_id))
        return Submission(job_id, run, continued, changed, notes)


def check_before_submission(spec: RunSpec, run: RunDir) -> None:
    """Find what would go wrong in the job, as far as this machine can tell.

    Raises:
        ConfigError: a secret where it would be written down, a path that no container can have, a template or a
            shell line of the site's that is broken.
        NotFound: there is no such template.
    """
    refuse_misplaced_secrets(spec)
    _check_time(spec)
    check_container(spec, run)
    refuse_broken_script(spec, run)


def _check_time(spec: RunSpec) -> None:
    """Raises ConfigError where the run would be asked to save and stop as soon as it has started."""
    limit = time_limit(spec.slurm.time) if spec.slurm.time else None
    if limit is not None and limit.total_seconds() <= spec.slurm.save_margin_s:
        raise ConfigError(
            f"slurm.time: {limit} is not longer than slurm.save_margin_s ({spec.slurm.save_margin_s} s), "
            "the time before the limit at which the run saves and stops; ask for more time, or lower the margin"
        )


def _write_files(run: RunDir, spec: RunSpec, tokenizer_sha256: str) -> None:
    """What the job and the next submission read."""
    body, diff = code_version(Path.cwd())
    run.write_text(run.code, json.dumps({**body, "tokenizer_sha256": tokenizer_sha256}, indent=1) + "\n")
    run.write_text(run.code_diff, diff)
    run.write_text(run.config, json.dumps(without_secrets(spec).model_dump(mode="json"), indent=1) + "\n")
    write_secrets(run.secrets, split_secrets(job_environment(spec))[1])
    run.write_text(run.script, render(spec, run))


@contextmanager
def _restored_on_error(run: RunDir) -> Iterator[None]:
    """Put the files of the last accepted submission back where the launcher refuses this one."""
    files = (run.code, run.code_diff, run.config, run.script)
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
    """What starts the run: returns a job id, and the process that holds a local run."""
    if spec.cluster.launcher == "slurm":
        from zslurm.submit.slurm_launcher import SlurmLauncher

        slurm = SlurmLauncher()
        slurm.check(spec)
        return lambda spec, run: (slurm.submit(spec, run), {})
    from zslurm.submit.local_launcher import LocalLauncher

    return LocalLauncher().submit


def _queue_successor(launch: Launch, spec: RunSpec, run: RunDir, job_id: str) -> str:
    """Queue the job that continues the run where this one ends early; returns what is to be said of it."""
    try:
        successor, _ = launch(successor_spec(spec, job_id), run)
    except ZslurmError as error:
        return f"job {job_id} has no successor: {error}"
    record_action(run, "successor", job_id, spec, successor=successor)
    _indexed(successor, run, spec)
    return f"job {successor} waits to continue the run if job {job_id} ends early"


def _leave_original(run: RunDir) -> None:
    """Take the processes of its original out of a copied run, before a job of its own starts there."""
    recorded = recorded_job(run)
    if recorded is None or recorded.original is None:
        return
    try:
        forget_original(run)
    except OSError as error:
        raise not_writable(error, run.path) from error


def _indexed(job_id: str, run: RunDir, spec: RunSpec) -> list[str]:
    """Add the job to the per-user index; returns a note where that cannot be: the job is on its way already."""
    try:
        index.record(index.new_entry(job_id, run, spec.cluster.name, spec.cluster.launcher))
    except ZslurmError as error:
        return [f"{error}; until then commands find the run by its path, {run.path}"]
    return []


def spec_of(run: RunDir) -> RunSpec:
    """The run as it was submitted last, at the place where its directory is now.

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


def check_idle(run: RunDir) -> None:
    """Raises RunActive while the run is being trained."""
    state = look(run)
    if state.active:
        raise RunActive(f"{run.name}: the run is {state.state} as job {state.job_id}; `zslurm cancel` it first")


def record_action(run: RunDir, action: str, job_id: str, spec: RunSpec, **fields: Any) -> None:
    """Append to submissions.jsonl.

    Raises:
        ZslurmError: the file cannot be written.
    """
    try:
        with JsonLinesWriter(run.submissions) as lines:
            lines.append(
                {
                    "time": time.time(),
                    "action": action,
                    "job_id": job_id,
                    "launcher": spec.cluster.launcher,
                    "cluster": spec.cluster.name,
                    "user": getpass.getuser(),
                    **fields,
                }
            )
    except OSError as error:
        raise ZslurmError(f"{run.submissions}: cannot be written: {error.strerror}") from error
