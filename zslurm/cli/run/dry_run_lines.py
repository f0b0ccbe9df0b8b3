"""What `zslurm submit --dry-run` prints of the fabric below a run, and of its phases."""

from __future__ import annotations

from typing import Any

from zslurm.checkpoint_tools.quantities import counted, show_bytes
from zslurm.cluster.rails.fabric import fabric_of
from zslurm.cluster.rails.placement import placements
from zslurm.config.spec import RunSpec
from zslurm.slurm.hostlist import expand
from zslurm.submit.phase_plan import ASSUMED_FLOPS

_LEVELS = ("inside", "rail", "off_rail")


def columns(rows: list[list[str]]) -> list[str]:
    """Return rows with their cells below each other, indented."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def fabric_json(spec: RunSpec, start: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return what the run's nodes cost, with what chose them; None if the cluster has no such fabric.

    Chosen are the nodes of slurm.nodelist, or else those on which Slurm would start the job now (`start`).
    """
    cluster, slurm = spec.cluster, spec.slurm
    fabric = fabric_of(cluster.fabric)
    if cluster.launcher != "slurm" or (fabric is None and not cluster.rails_only):
        return None
    if fabric is None:
        return {"chosen_by": None, "rails": None, "known_nodes": 0, "placements": {}}
    named = expand(slurm.nodelist or "")
    estimated = expand((start or {}).get("nodes") or "")
    by, nodes = ("slurm.nodelist", named) if len(named) >= slurm.nodes else ("Slurm's estimate", estimated)
    by_name = placements(cluster.fabric, slurm.nodes, chosen=nodes, excluded=expand(slurm.exclude or ""))
    return {
        "chosen_by": by if "chosen" in by_name else None,
        "rails": fabric.rails,
        "known_nodes": len(fabric.slices),
        "placements": {name: {**placed.as_json(), "line": placed.line()} for name, placed in by_name.items()},
    }


def fabric_lines(seen: dict[str, Any] | None, nodes: int) -> list[str]:
    """Return `fabric_json` in lines."""
    if seen is None:
        return []
    if not seen["known_nodes"]:
        return ["fabric: hops are not known: the profile lists no leaf slices (cluster.fabric.slices)"]
    by_name = seen["placements"]
    if not by_name:
        count_listed = counted(seen["known_nodes"], "node")
        return [
            f"fabric: hops are not known: the profile lists slices of {count_listed}, and the run needs {nodes}"
        ]
    step = f"a step of the ring over {counted(seen['rails'], 'rail')}"
    if "chosen" in by_name:
        placed = by_name["chosen"]
        return [
            f"fabric: {placed['nodes']} in the order of ranks (nodes by {seen['chosen_by']}), in {step}",
            f"  {placed['line']}",
        ]
    which = f"{counted(nodes, 'node')} of the {seen['known_nodes']} on slices of the profile"
    return [
        f"fabric: no nodes are chosen yet; {which}, in {step}",
        *(f"  {name} case, {placed['nodes']}: {placed['line']}" for name, placed in by_name.items()),
    ]


def phase_lines(phases: list[dict[str, Any]], sent: dict[str, Any]) -> list[str]:
    """Return lines for people; `phases` and `sent` are as in `--json`."""
    lines = ["phases, on each rank", *columns([_PHASE_HEAD, *map(_phase_row, phases)])]
    rows = _byte_rows(phases, sent)
    if rows:
        lines += ["", _how(sent), *columns([_BYTES_HEAD, *rows])]
    timed = [phase for phase in phases if phase["exposed_share"] is not None]
    if rows and timed:
        lines += ["", *_time_lines(timed, sent)]
    return lines


_PHASE_HEAD = ["phase", "context", "context groups", "data-parallel ranks", "sequences", "microbatches", "memory"]


def _phase_row(phase: dict[str, Any]) -> list[str]:
    groups = phase["context_groups"]
    return [
        phase["name"],
        f"{phase['context']:,}",
        f"{counted(phase['context_parallel'], 'rank')} of a node: {', '.join(groups)}" if groups else "-",
        f"{phase['data_parallel']:,}",
        f"{phase['sequences_per_rank']:,}",
        f"{phase['microbatches_per_rank']:,}",
        f"{show_bytes(phase['peak_bytes'])}, {show_bytes(phase['activation_bytes'])} of it for a microbatch",
    ]


_BYTES_HEAD = ["phase", "what", "inside the node", "along the rail", "off the rail", "if flat"]


def _byte_rows(phases: list[dict[str, Any]], sent: dict[str, Any]) -> list[list[str]]:
    """Return what a rank sends in a step, what is the same in every phase first; nothing if it is the only one."""
    rows = []
    for key, what in (
        ("reduce_scatter", "reduce-scatter"),
        ("exchange", "exchange"),
        ("all_gather", "all-gather"),
    ):
        if any(sent[key].values()):
            flat = sent["flat"].get(key)
            off_rail = show_bytes(flat["off_rail"]) + " off the rail" if flat and flat["off_rail"] else ""
            rows.append(["every", what, *_levels(sent[key]), off_rail])
    for phase in phases:
        if any(phase["context_bytes"].values()):
            rows.append([phase["name"], "keys, values, halos", *_levels(phase["context_bytes"]), ""])
    return rows


def _levels(traffic: dict[str, int]) -> list[str]:
    return [show_bytes(traffic[level]) if traffic[level] else "0" for level in _LEVELS]


def _how(sent: dict[str, Any]) -> str:
    """Return how collectives are made."""
    levels = "two levels" if sent["collectives"] == "two_level" else "one level"
    buckets = counted(sent["buckets"], "bucket")
    size = f" of {show_bytes(sent['bucket_bytes'])}" if sent["buckets"] else ""
    messages = counted(sent["most_exchange_messages"], "message")
    flat = sent["flat"]["most_exchange_messages"]
    instead = f" instead of {flat:,}" if flat != sent["most_exchange_messages"] else ""
    exchanged = f"at most {messages} of the exchange{instead}"
    return f"bytes that a rank sends in a step, in {levels}, {buckets}{size}, {exchanged}"


def _time_lines(phases: list[dict[str, Any]], sent: dict[str, Any]) -> list[str]:
    """Return the predicted times of phases on GPUs."""
    rows = [
        [
            phase["name"],
            f"{_seconds(phase['compute_s'])} of computation",
            f"{_seconds(phase['exposed_s'])} of waiting for communication",
            f"{100 * phase['exposed_share']:.1f} % of the step",
        ]
        for phase in phases
    ]
    return [
        f"predicted by a model, not measured (docs/plan.md): {_seconds(sent['predicted_s'])} of communication, "
        f"{100 * sent['latency_share']:.1f} % of it latency; GPUs at {ASSUMED_FLOPS / 1e12:g} TFLOPS",
        *columns(rows),
    ]


def _seconds(span: float) -> str:
    return f"{span:.2f} s" if span >= 0.9995 else f"{1000 * span:.3g} ms"
