"""`zslurm submit --dry-run`: what would be submitted. Writes nothing; asks Slurm only if there is one."""

from __future__ import annotations

import difflib
import json
import shlex
from typing import Any

from zslurm.checkpoint_tools.quantities import counted, show_bytes, show_count
from zslurm.cli.plan import planned
from zslurm.cli.planned_run import trains_on_cpus
from zslurm.cli.run.dry_run_lines import columns, fabric_json, fabric_lines, phase_lines
from zslurm.cli.values import without_secrets
from zslurm.cluster.rccl.environment import MEASURED, RULES, left_out_lines
from zslurm.config.load import Resolved
from zslurm.config.spec import RunSpec
from zslurm.core.errors import SlurmRefused, SlurmUnavailable, ZslurmError
from zslurm.core.redact import redact, redact_value
from zslurm.core.units import show_value
from zslurm.job.numa_bind import cores_of
from zslurm.run.state.run_state import last_job
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.jobs import time_limit
from zslurm.slurm.run_command import Retries
from zslurm.submit.checks.measured import sources_of_values
from zslurm.submit.checks.run import check_data, notes_on
from zslurm.submit.continuation import changed_keys, last_spec
from zslurm.submit.phase_plan import Communication, phase_json, phase_plans
from zslurm.submit.script.render import job_settings
from zslurm.submit.submit import Prepared, prepare
from zslurm.train.data.order import DataOrder
from zslurm.train.data.training_data import ALONE
from zslurm.train.schedule import Plan

_PATIENCE_S = 15.0
_ONE_EPOCH = 1.005
"""Epochs that still print as one."""


def describe(resolved: Resolved, *, new: bool, as_json: bool) -> str:
    """Return the script, environment, placement of ranks, what they take, when the job starts, and what changes.

    With `new` an existing run of its name would be moved aside.

    Raises:
        ConfigError: the run's data or template would be refused.
    """
    spec = resolved.spec
    prepared = prepare(spec, new=new)
    order = check_data(spec, needed=False)
    notes = [
        *notes_on(spec, order, continues=prepared.continues),
        *(
            f"left out of the environment: {line} (why: zslurm cluster env --explain)"
            for line in left_out_lines(spec.cluster)
        ),
    ]
    seen, script = _preview(resolved, prepared), redact(prepared.script.text)
    given_rows = without_secrets(row for row in resolved.rows() if row[2].layer != "default")
    mixtures = _mixtures(order) if order is not None else []
    if as_json:
        body = {
            "run_dir": str(prepared.run.path),
            "launcher": spec.cluster.launcher,
            "nodes": spec.slurm.nodes,
            "spares": spec.slurm.spares,
            "ranks": spec.world_size,
            "steps": spec.total_steps if spec.trainer is None else spec.trainer.steps,
            "mixtures": mixtures,
            **seen,
            "values": {key: {"value": value, "origin": origin} for key, value, origin in given_rows},
            "notes": notes,
            "script": script,
        }
        return json.dumps(body, indent=2) + "\n"
    spares = f" and {spec.slurm.spares} spare" if spec.slurm.spares else ""
    lines = [
        f"run {spec.run.name} in {prepared.run.path}",
        f"{counted(spec.slurm.nodes, 'node')}{spares} x {counted(spec.ranks_per_node, 'rank')} on "
        f"{spec.cluster.name}; {_work(spec, order)}",
        *map(_describe_mixture, mixtures),
        *_facts(seen, spec.slurm.nodes),
        *([""] if notes else []),
        *(f"note: {note}" for note in notes),
        "",
        "values that were given (all others are defaults: zslurm config show --origin)",
        *columns(
            [
                [key, show_value(value), f"[{origin}]"]
                for key, value, origin in given_rows
                if not key.startswith("cluster.fabric.slices[")  # four lines a slice; the script shows them in one
            ]
        ),
        "",
        "environment of the job (why: zslurm cluster env --explain)",
        *(
            f"  {name}={show_value(value)}    [{seen['environment_origins'][name]}]"
            for name, value in seen["environment"].items()
        ),
    ]
    # Comments stay comments, whatever a name or a path holds: a user may hand all of this to a shell.
    shown = (f"# {line}".rstrip() for line in lines)
    return "".join("".join(c if c.isprintable() else "?" for c in line) + "\n" for line in shown) + script


def _work(spec: RunSpec, order: DataOrder | None) -> str:
    """Describe what is to be done: steps and tokens, or the program."""
    if spec.trainer is not None:
        return f"in {spec.trainer.directory}: {shlex.join(spec.trainer.command)}"
    tokens = Plan(spec.phases).total_tokens
    shown = counted(tokens, "token", shown=show_count(tokens))
    of_data = "" if order is None else f" of {show_count(order.data.token_count)} in the data{_repeats(order)}"
    return f"{counted(spec.total_steps, 'step')}, {shown}{of_data}"


def _repeats(order: DataOrder) -> str:
    """Describe how often a run goes through its data if it does so more than once.

    A run of several sources has a line for each phase instead.
    """
    if order.data.names != (ALONE,):
        return ""
    epochs = order.progress(order.plan.total_steps)[ALONE].epochs
    return f", {epochs:.3g} epochs" if epochs > _ONE_EPOCH else ""


def _facts(seen: dict[str, Any], nodes: int) -> list[str]:
    """Describe memory, start, fabric, placement and changes."""
    memory, changes = seen["memory"], seen["changes"]
    lines = (
        []
        if memory is None
        else [
            f"memory of a rank: {show_bytes(memory['peak_bytes'])} on its {memory['device'].upper()} at the peak "
            f"({memory['peak_moment']}), {show_bytes(memory['host_staging_bytes'])} of the host's for a checkpoint"
        ]
    )
    if seen["start"] is not None:
        lines.append(f"start: {seen['start']['words']}")
    lines += fabric_lines(seen["fabric"], nodes)
    if seen["sources"]:
        lines += ["", "what a measurement decides (zslurm calibrate), and its source"]
        lines += columns([[row["key"], row["value"], row["source"]] for row in seen["sources"]])
    if memory is not None:
        lines += ["", *phase_lines(seen["phases"], seen["communication"])]
    if any(placed["gpu"] is not None for placed in seen["placement"]):
        lines += ["", "on every node: rank = node x ranks + local rank"]
        lines += columns(
            [
                [
                    f"local rank {placed['local_rank']}",
                    "-" if placed["gpu"] is None else f"GPU {placed['gpu']}",
                    "NIC of Slurm's or RCCL's choice" if placed["nic"] is None else placed["nic"],
                    placed["cores"],
                ]
                for placed in seen["placement"]
            ]
        )
    if changes is not None:
        lines += ["", f"since the last submission (job {changes['job_id']})"]
        lines += [f"  {line}" for line in [*changes["keys"], *changes["script"]] or ["nothing changes"]]
    return lines


def _mixtures(order: DataOrder) -> list[dict[str, Any]]:
    """Return what each phase takes of each source; nothing for a run with one path."""
    mixtures = []
    for index, phase in enumerate(order.plan.phases if order.data.names != (ALONE,) else ()):
        shares = order.mixtures[index].shares()
        sources = {
            name: {
                "share": shares[name],
                "tokens": count * phase.context,
                "epochs": count / order.sequences(name, index),
            }
            for name, count in order.counts(index).items()
        }
        mixtures.append({"phase": phase.name, "sources": sources})
    return mixtures


def _describe_mixture(mixture: dict[str, Any]) -> str:
    parts = [
        f"{name} {100 * taken['share']:.3g} % "
        f"({counted(taken['tokens'], 'token', shown=show_count(taken['tokens']))}, {taken['epochs']:.3g} epochs)"
        for name, taken in mixture["sources"].items()
    ]
    return f"phase {mixture['phase']} mixes {', '.join(parts)}"


def _preview(resolved: Resolved, prepared: Prepared) -> dict[str, Any]:
    """Return what submitting a prepared run would do, as `--dry-run --json` prints it; nothing is written.

    Secrets are not in it. `start` is null if there is no Slurm to ask, `changes` for a run that was never
    submitted.
    """
    spec = prepared.spec
    settings = job_settings(spec, lambda name: str(resolved.layers.leaf_origin(("cluster", "env", name))))
    return {
        "environment": {setting.name: redact_value(setting.name, setting.value) for setting in settings},
        "environment_origins": {
            setting.name: {RULES: f"rule: {setting.reason}", MEASURED: setting.reason}.get(
                setting.origin, setting.origin
            )
            for setting in settings
        },
        "placement": _placement(spec),
        **(_planned(spec) if spec.trainer is None else dict.fromkeys(("memory", "phases", "communication"))),
        "sources": [] if spec.trainer is not None else sources_of_values(spec, resolved.layers),
        "start": (start := _start(spec, prepared.script.text)),
        "fabric": fabric_json(spec, start),
        "changes": _changes(prepared),
    }


def _planned(spec: RunSpec) -> dict[str, Any]:
    """Return what zslurm's own trainer will take and send."""
    on_cpu = trains_on_cpus(spec)
    memory = planned(spec, spec.world_size, None, on_cpu=on_cpu)
    sent = Communication.of(spec)
    phases = phase_plans(spec, memory, sent.traffic, on_cpu=on_cpu)
    return {
        "memory": {
            "device": "cpu" if on_cpu else "gpu",
            "peak_bytes": memory.peak,
            "peak_moment": memory.peak_moment,
            "host_staging_bytes": memory.staging,
        },
        "phases": [phase_json(phase, spec.ranks_per_node) for phase in phases],
        "communication": sent.as_json(),
    }


def _placement(spec: RunSpec) -> list[dict[str, Any]]:
    """Return GPU, NIC and cores of each local rank, as far as the profile names them; the same on every node."""
    cluster = spec.cluster
    places = []
    for local_rank in range(spec.ranks_per_node):
        gpu = local_rank if local_rank < cluster.gpus_per_node else None
        nic = None
        if gpu is not None and cluster.nics:
            nic = cluster.nics[cluster.gpu_nics[gpu] if cluster.gpu_nics else gpu]
        places.append({"local_rank": local_rank, "gpu": gpu, "nic": nic, "cores": cores_of(spec, gpu)})
    return places


def _start(spec: RunSpec, script: str) -> dict[str, Any] | None:
    """Ask Slurm when and where the job would start, without submitting it."""
    client = SlurmClient(timeout_s=_PATIENCE_S, retries=Retries(attempts=1))
    if spec.cluster.launcher != "slurm" or not client.available():
        return None
    try:
        estimate = client.estimate_start(script)
    except SlurmRefused as error:
        return {"refused": str(error), "words": f"never; {error}"}
    except SlurmUnavailable as error:
        return {"words": f"unknown; {error}"}
    if (why := _beyond_partition(spec, client)) is not None:
        return {"refused": why, "words": f"never; {why}"}
    if estimate is None:
        return {"words": "unknown; Slurm names no time"}
    when = estimate.time.isoformat(timespec="seconds")
    words = f"about {estimate.time:%Y-%m-%d %H:%M:%S} UTC on {estimate.nodes}"
    return {"time": when, "nodes": estimate.nodes, "partition": estimate.partition, "words": words}


def _beyond_partition(spec: RunSpec, client: SlurmClient) -> str | None:
    """Return why a job would wait forever in its partition, which `sbatch --test-only` does not report."""
    limit = time_limit(spec.slurm.time) if spec.slurm.time else None
    try:
        partitions = client.partitions()
    except ZslurmError:
        return None
    for partition in partitions:
        named = partition.name == spec.slurm.partition or (spec.slurm.partition is None and partition.is_default)
        if named and limit is not None and partition.max_time is not None and limit > partition.max_time:
            return f"partition {partition.name} allows at most {partition.max_time}, slurm.time is {limit}"
    return None


def _changes(prepared: Prepared) -> dict[str, Any] | None:
    """Return what differs from the last submission."""
    run = prepared.run
    job = last_job(run)
    if job is None or not run.exists:
        return None
    before = run.script.read_text(encoding="utf-8") if run.script.is_file() else ""
    lines = difflib.unified_diff(
        before.splitlines(), prepared.script.text.splitlines(), "script before", "script", "", "", 0, ""
    )
    return {
        "job_id": job.job_id,
        "keys": changed_keys(last_spec(run), prepared.spec),
        "script": [redact(line) for line in lines],
    }
