"""`zslurm plan`: what a run will take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from checkpoint_tools.quantities import counted, show_bytes
from train.memory import MemoryPlan, plan_memory
from zslurm.cli.output import print_json, print_table, say
from zslurm.config.spec import RunSpec
from zslurm.report.checkpoint import as_user_errors


def show_memory(spec: RunSpec, ranks: Sequence[int], *, as_json: bool) -> None:
    """`zslurm plan memory`: one column for each number of ranks."""
    on_cpu, recompute = trains_on_cpus(spec), spec.parallel.recompute
    with as_user_errors():
        plans, others = (
            [plan_memory(_with_recompute(spec, value), count, on_cpu=on_cpu) for count in dict.fromkeys(ranks)]
            for value in (recompute, not recompute)
        )
    if as_json:
        print_json({"device": "cpu" if on_cpu else "gpu", "recompute": recompute, "plans": [*map(_facts, plans)]})
        return
    rows = _memory_rows(plans)
    rows.append([f"  {'without' if recompute else 'with'} recompute", *(show_bytes(plan.peak) for plan in others)])
    rows.append(["host: copy for a checkpoint", *(show_bytes(plan.staging) for plan in plans)])
    print_table(["ranks", *(str(plan.ranks) for plan in plans)], [*rows, *_packing_rows(plans)])
    for note in _notes(spec, plans, on_cpu=on_cpu):
        say(f"note: {note}")


def trains_on_cpus(spec: RunSpec) -> bool:
    """Whether the ranks will be CPUs: as asked, else where the cluster's nodes have no GPUs."""
    return spec.parallel.device == "cpu" or (spec.parallel.device == "auto" and not spec.cluster.gpus_per_node)


def _with_recompute(spec: RunSpec, value: bool) -> RunSpec:
    return spec.model_copy(update={"parallel": spec.parallel.model_copy(update={"recompute": value})})


def _facts(plan: MemoryPlan) -> dict[str, Any]:
    balance = plan.balance
    return {
        "ranks": plan.ranks,
        "peak_bytes": plan.peak,
        "peak_moment": plan.peak_moment,
        "resident_bytes": plan.resident,
        "moment_bytes": plan.moments,
        "microbatch_bytes": asdict(plan.microbatch),
        "host_staging_bytes": plan.staging,
        "matrices": plan.matrices,
        "packing": {**asdict(balance), "idle_share": round(plan.idle_share, 6)},
    }


def _memory_rows(plans: list[MemoryPlan]) -> list[list[str]]:
    """What lives throughout, the moments, and their sum."""

    def row(name: str, values: list[int]) -> list[str]:
        return [name, *map(show_bytes, values)]

    rows = [row(name, [plan.resident[name] for plan in plans]) for name in plans[0].resident]
    for name in plans[0].moments:
        rows.append(row(f"+ {name}", [plan.moments[name] for plan in plans]))
        if name == "forward and backward":
            rows.append(row("    kept of all layers", [plan.microbatch.layers for plan in plans]))
            rows.append(row("    logits of a chunk", [plan.microbatch.logits for plan in plans]))
    return [*rows, row("= peak", [plan.peak for plan in plans])]


def _packing_rows(plans: list[MemoryPlan]) -> list[list[str]]:
    """How evenly matrices are divided; nothing where AdamW trains them."""
    if not plans[0].matrices:
        return []
    balances = [plan.balance for plan in plans]
    return [
        ["whole matrices", *(str(plan.matrices) for plan in plans)],
        ["Newton-Schulz cost, most / mean", *(_over(b.cost, b.cost_mean) for b in balances)],
        ["Newton-Schulz cost, at best", *(_over(b.cost_bound, b.cost_mean) for b in balances)],
        ["elements of matrices, most / mean", *(_over(b.elements, b.elements_mean) for b in balances)],
        ["elements of matrices, at best", *(_over(b.elements_bound, b.elements_mean) for b in balances)],
        ["ranks without a matrix", *(str(b.idle_ranks) for b in balances)],
        ["idle in Newton-Schulz", *(f"{100 * plan.idle_share:.1f} %" for plan in plans)],
    ]


def _over(most: float, mean: float) -> str:
    return f"{most / mean:.3f}"


def _notes(spec: RunSpec, plans: list[MemoryPlan], *, on_cpu: bool) -> list[str]:
    """What a reader of the table must know."""
    notes = [f"on {'CPUs' if on_cpu else 'GPUs'}; the rank that owns most; of the lines with +, one at a time"]
    if spec.parallel.compile:
        notes.append("compiled layers usually keep less than is counted here")
    if spec.data.isolate_documents and not on_cpu:
        notes.append(
            "data.isolate_documents is counted with torch's own attention, which keeps all scores on GPUs"
        )
    notes += [
        f"on {counted(plan.ranks, 'rank')} {plan.balance.idle_ranks} "
        f"({plan.balance.idle_ranks / plan.ranks:.0%}) own no matrix: there are {plan.matrices}"
        for plan in plans
        if plan.matrices and plan.balance.idle_ranks
    ]
    return notes
