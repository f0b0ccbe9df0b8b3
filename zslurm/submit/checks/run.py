"""Check a run before it is submitted, and collect what is worth knowing about it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from zslurm.checkpoint_tools import Checkpoint, CheckpointError, Manifest, list_checkpoints
from zslurm.checkpoint_tools.quantities import counted
from zslurm.cluster.gemm_tables import table_of
from zslurm.cluster.rccl.conf_files import read_conf
from zslurm.cluster.rccl.lint import lint, overridden
from zslurm.cluster.xgmi import xgmi_costs
from zslurm.config.spec import RunSpec
from zslurm.core.errors import ConfigError
from zslurm.hardware.sysfs import sysroot
from zslurm.job.preparation.container import check_container
from zslurm.run.run_dir import RunDir
from zslurm.run.secrets import refuse_misplaced_secrets
from zslurm.slurm.jobs import time_limit
from zslurm.submit.checks.fits import check_fits, check_fits_here
from zslurm.submit.checks.gemm_tuning import untuned
from zslurm.submit.checks.measured import about_measurements, off_measured
from zslurm.submit.checks.program import check_program, notes_on_program
from zslurm.submit.continuation import options_to_repeat, refuse_completed
from zslurm.submit.group_exclusions import about_group
from zslurm.submit.script.render import JobScript, job_environment
from zslurm.submit.script.template_check import checked_script
from zslurm.train.context.layout import check_phases
from zslurm.train.data.order import DataOrder
from zslurm.train.data.training_data import TrainingData
from zslurm.train.errors import TrainError
from zslurm.train.evaluation.validation_data import open_validation_data
from zslurm.train.schedule import Plan, check_ranks, compare


def check_before_submission(spec: RunSpec, run: RunDir, *, start_over: bool = False) -> JobScript:
    """Find what would go wrong in the job, as far as this machine can see; returns the script of the job.

    Raises:
        ConfigError: a secret that would be written down, a path that no container can have, a table of tuned
            products that was tuned for something else, a template or a shell line of the site's that is broken.
        NotFound: there is no such template, or no such table.
    """
    refuse_misplaced_secrets(spec)
    _check_time(spec)
    _check_heal(spec)
    check_container(spec, run)
    table_of(spec)
    return checked_script(spec, run, start_over=start_over)


def _check_heal(spec: RunSpec) -> None:
    """Raise ConfigError if helper jobs are asked for that could not bring nodes into the run."""
    if spec.aegis.heal == "helper" and spec.why_no_helper:
        raise ConfigError(f"aegis.heal: helper {spec.why_no_helper}")


def _check_time(spec: RunSpec) -> None:
    """Raise ConfigError if the run would be asked to save and stop as soon as it has started."""
    limit = time_limit(spec.slurm.time) if spec.slurm.time else None
    if limit is not None and limit.total_seconds() <= spec.slurm.save_margin_s:
        raise ConfigError(
            f"slurm.time: {limit} is not longer than slurm.save_margin_s ({spec.slurm.save_margin_s} s), "
            "the time before the limit at which the run saves and stops; ask for more time, or lower the margin"
        )


_NO_DATA = "no data are named yet (data.path): what depends on them was not checked, and submit refuses the run"


def check_data(spec: RunSpec, *, needed: bool = True) -> DataOrder | None:
    """Open the run's data, its validation data and its tasks, as the trainer will; returns the data's order.

    None for another program than zslurm's trainer, which has its own data; the program itself is checked. None as
    well if the run names no data and they are not `needed`.

    Raises:
        ConfigError: there is none, it is damaged, it does not fit the model or the phases, or its parts were made
            with other tokenizers.
    """
    if spec.trainer is not None:
        check_program(spec)
        return None
    if not needed and spec.data.path is None and not spec.data.sources:
        return None
    with _as_config_error():
        data = TrainingData.open(spec.data)
        data.check_fits(spec.model.vocab_size)
        order = DataOrder(data, Plan(spec.phases), spec.run.seed, spec.data.packing)
        order.check_epochs(spec.data.max_epochs)
        if spec.evaluation.data is not None:
            tokenizer = data.header.tokenizer_sha256
            open_validation_data(
                spec.evaluation.data,
                tokenizer_sha256=tokenizer,
                model=spec.model,
                phases=spec.phases,
                training=spec.data,
            )
        if spec.evaluation.tasks:
            from zslurm.train.evaluation.run_tasks import load_run_tasks

            load_run_tasks(spec.evaluation, spec.checkpoint.best_by)
    return order


def check_steps(spec: RunSpec, order: DataOrder | None, continues: RunDir | None) -> list[str]:
    """Check the run's steps, and what it starts or continues from; returns what is worth knowing, a line each.

    A run that is continued without having a checkpoint starts again. Without `order` the data are not compared.

    Raises:
        ConfigError: a node has fewer GPUs than ranks; a phase's context_parallel ranks have no place in a node, or
            cannot divide its sequences; a batch has fewer sequences than there are data-parallel ranks; steps that
            are done would move; the weights to start from cannot be read, or are of another model or tokenizer.
    """
    with _as_config_error():
        _check_gpus(spec)
        notes = check_ranks(spec.phases, spec.world_size, spec.ranks_per_node)
        check_phases(spec.model, spec.phases)
        saved = list_checkpoints(continues.checkpoints) if continues is not None else []
        newest = next((listing.path for listing in saved if listing.complete), None)
        if order is None:
            return notes
        if newest is not None:
            with Checkpoint.open(newest, check_files=False) as checkpoint:
                manifest = checkpoint.manifest
            assert continues is not None
            notes += _changed_phases(spec, continues, manifest, order.plan)
            notes += order.changes(manifest.cursor, manifest.step)
            refuse_completed(spec, continues)
        elif spec.init is not None:
            from zslurm.train.checkpointing.init_weights import open_init

            open_init(spec.init, spec.model, order.data.header.tokenizer_sha256).close()
    return notes


def _changed_phases(spec: RunSpec, run: RunDir, manifest: Manifest, plan: Plan) -> list[str]:
    """Describe what has changed in the phases of a run since its checkpoint, a line for each change.

    Raises:
        ConfigError: the steps that are done would move; names the options that the last submission had.
    """
    try:
        return compare(manifest.cursor.get("plan"), plan, manifest.step)
    except TrainError as error:
        options = options_to_repeat(run, spec)
        if not options:
            raise
        raise ConfigError(
            f"{error}; options hold for one submission: to continue as before, submit with {options}, or write "
            "that into the run file"
        ) from error


def _check_gpus(spec: RunSpec) -> None:
    """Raise ConfigError if some ranks of a node would have no GPU."""
    gpus = spec.cluster.gpus_per_node
    if gpus and spec.parallel.device != "cpu" and spec.ranks_per_node > gpus:
        raise ConfigError(
            f"slurm.ranks_per_node ({spec.ranks_per_node}) exceeds the {counted(gpus, 'GPU')} of a node; "
            f"use {gpus}, or parallel.device: cpu"
        )


def notes_on(spec: RunSpec, order: DataOrder | None, *, continues: RunDir | None) -> list[str]:
    """Return what is worth knowing about a run before it is submitted, a line each.

    Raises:
        ConfigError: see `check_steps`.
        RunCompleted: nothing is left to train.
    """
    if spec.trainer is not None:
        with _as_config_error():
            _check_gpus(spec)
        notes = notes_on_program(spec, continues)
    else:
        about_data = [_NO_DATA] if order is None else order.notes()
        notes = [*about_data, *check_steps(spec, order, continues=continues)]
    notes += about_group(spec, continues or RunDir(Path(spec.run.runs_dir, spec.run.name)))
    cluster = spec.cluster
    cores_are_known = cluster.launcher == "local" or spec.slurm.cpus_per_task or cluster.cpus_per_node
    if cluster.gpus_per_node and not cores_are_known:
        notes.append(
            "each rank gets 1 core, which starves its GPU: set cluster.cpus_per_node in the profile "
            "(`zslurm init` does), or slurm.cpus_per_task"
        )
    on_gpus = spec.parallel.device != "cpu" and cluster.gpus_per_node > 0
    if on_gpus and any(spec.data.isolates(phase) and phase.context_parallel > 1 for phase in spec.phases):
        key = "isolate_documents" if spec.data.isolate_documents else "packing: best_fit"
        notes.append(
            f"data.{key}: where ranks share sequences, attention then runs as fp32 products, slower "
            "than torch's flash kernel; without it, sequences are one stream"
        )
    if spec.trainer is None and on_gpus:
        notes += check_fits(spec)
    if spec.trainer is None and not on_gpus and cluster.launcher == "local":
        notes += check_fits_here(spec)
    if spec.trainer is None:
        notes += [
            *untuned(spec),
            *about_measurements(spec),
            *off_measured(spec),
            *(line for _, line in xgmi_costs(spec)),
        ]
    return [*notes, *_lint_environment(spec)]


def _lint_environment(spec: RunSpec) -> list[str]:
    """Return what is wrong with the variables of RCCL, NCCL and PyTorch that the ranks will see, a line each."""
    job, inherited = job_environment(spec), _exported(spec, os.environ)
    variables = {"HOME": os.environ.get("HOME", ""), **inherited, **job}
    findings = [
        *lint(variables, spec.cluster, read_conf(variables, spec.cluster, sysroot())),
        *overridden(inherited, job),
    ]
    return [finding.line for finding in findings]


def _exported(spec: RunSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """Return what of the login environment reaches the job, by slurm.export."""
    if spec.cluster.launcher == "local" or spec.slurm.export == "ALL":
        return dict(environ)
    names = () if spec.slurm.export == "NONE" else spec.slurm.export.split(",")
    return {name: environ[name] for name in names if name in environ}


@contextmanager
def _as_config_error() -> Iterator[None]:
    """Raise errors of the trainer as errors of the configuration."""
    try:
        yield
    except (TrainError, CheckpointError) as error:
        raise ConfigError(str(error)) from error
