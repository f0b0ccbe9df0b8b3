"""The phases of a run in `zslurm submit --dry-run`: groups, memory, bytes, and what time these should take."""

from __future__ import annotations

from typing import Any

from zslurm.checkpoint_tools.quantities import counted, show_bytes
from zslurm.cli.run.submission.columns import columns
from zslurm.submit.phase_plan import ASSUMED_FLOPS

_LEVELS = ("inside", "rail", "off_rail")


def phase_lines(phases: list[dict[str, Any]], sent: dict[str, Any]) -> list[str]:
    """Return lines for people; `phases` and `sent` are those of `--json`."""
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
    """Return what a rank sends in a step, what is the same in every phase first; nothing where it is alone."""
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
