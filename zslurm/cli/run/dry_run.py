"""`zslurm submit --dry-run`: what would be submitted. Writes nothing; asks Slurm only where there is one."""

from __future__ import annotations

import json
from typing import Any

from zslurm.checkpoint_tools.quantities import counted, show_bytes, show_count
from zslurm.cli.run.preview import preview
from zslurm.cli.values import without_secrets
from zslurm.cluster.rccl.environment import left_out
from zslurm.config.load import Resolved
from zslurm.core.redact import redact
from zslurm.core.units import show_value
from zslurm.submit.checks import check_data, notes_on
from zslurm.submit.submit import prepare
from zslurm.train.data.order import DataOrder
from zslurm.train.data.training_data import ALONE


def describe(resolved: Resolved, *, new: bool, as_json: bool) -> str:
    """Return the script, the environment, where ranks go, what they take, when it starts, and what changes.

    Args:
        resolved: the run.
        new: whether an existing run of its name would be moved aside.
        as_json: as JSON instead of text.

    Raises:
        ConfigError: the run's data or template would be refused.
    """
    spec = resolved.spec
    prepared = prepare(spec, new=new)
    order = check_data(spec)
    notes = [
        *notes_on(spec, order, continues=prepared.continues),
        *(f"left out of the environment: {rule.line}" for rule in left_out(spec.cluster)),
    ]
    seen, script = preview(resolved, prepared), redact(prepared.script.text)
    given = without_secrets(row for row in resolved.rows() if row[2].layer != "default")
    mixtures = _mixtures(order)
    if as_json:
        body = {
            "run_dir": str(prepared.run.path),
            "launcher": spec.cluster.launcher,
            "nodes": spec.slurm.nodes,
            "spares": spec.slurm.spares,
            "ranks": spec.world_size,
            "steps": spec.total_steps,
            "mixtures": mixtures,
            **seen,
            "values": {key: {"value": value, "origin": origin} for key, value, origin in given},
            "notes": notes,
            "script": script,
        }
        return json.dumps(body, indent=2) + "\n"
    spares = f" and {spec.slurm.spares} spare" if spec.slurm.spares else ""
    tokens = order.plan.total_tokens
    lines = [
        f"run {spec.run.name} in {prepared.run.path}",
        f"{counted(spec.slurm.nodes, 'node')}{spares} x {counted(spec.ranks_per_node, 'rank')} on "
        f"{spec.cluster.name}; {counted(spec.total_steps, 'step')}, "
        f"{counted(tokens, 'token', shown=show_count(tokens))} of {show_count(order.data.token_count)} in the "
        "data",
        *map(_describe_mixture, mixtures),
        *(f"note: {note}" for note in notes),
        *_facts(seen),
        "",
        "values that were given (all others are defaults: zslurm config show --origin)",
        *_columns([[key, show_value(value), f"[{origin}]"] for key, value, origin in given]),
        "",
        "environment of the job (why: zslurm env --explain)",
        *(
            f"  {name}={show_value(value)}    [{seen['environment_origins'][name]}]"
            for name, value in seen["environment"].items()
        ),
    ]
    # Comments stay comments, whatever a name or a path holds: a user may hand all of this to a shell.
    shown = (f"# {line}".rstrip() for line in lines)
    return "".join("".join(c if c.isprintable() else "?" for c in line) + "\n" for line in shown) + script


def _facts(seen: dict[str, Any]) -> list[str]:
    """Describe memory, start, placement and changes."""
    memory, changes = seen["memory"], seen["changes"]
    lines = [
        f"memory of a rank: {show_bytes(memory['peak_bytes'])} on its {memory['device'].upper()} at the peak "
        f"({memory['peak_moment']}), {show_bytes(memory['host_staging_bytes'])} of the host's for a checkpoint"
    ]
    if seen["start"] is not None:
        lines.append(f"start: {seen['start']['words']}")
    if any(place["gpu"] is not None for place in seen["placement"]):
        lines += ["", "on every node: rank = node x ranks + local rank"]
        lines += _columns(
            [
                [
                    f"local rank {place['local_rank']}",
                    "-" if place["gpu"] is None else f"GPU {place['gpu']}",
                    "NIC of Slurm's or RCCL's choice" if place["nic"] is None else place["nic"],
                    place["cores"],
                ]
                for place in seen["placement"]
            ]
        )
    if changes is not None:
        lines += ["", f"since the last submission (job {changes['job_id']})"]
        lines += [f"  {line}" for line in [*changes["keys"], *changes["script"]] or ["nothing changes"]]
    return lines


def _columns(rows: list[list[str]]) -> list[str]:
    """Return rows with their cells below each other, indented."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]


def _mixtures(order: DataOrder) -> list[dict[str, Any]]:
    """Return what each phase takes of each source; nothing for a run with one path."""
    mixtures = []
    for index, phase in enumerate(order.plan.phases if order.data.names != (ALONE,) else ()):
        shares = order.mixtures[index].shares()
        sources = {
            name: {
                "share": shares[name],
                "tokens": count * phase.context,
                "epochs": count / order.data.sequences(name, phase.context),
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
