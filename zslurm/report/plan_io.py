"""`zslurm plan io`: what a run will ask of its storage."""

from __future__ import annotations

from typing import Any

from checkpoint_tools.quantities import counted, show_bytes, show_count, show_duration
from train.plan.io import Reads, StoragePlan, plan_storage
from zslurm.config.spec import RunSpec
from zslurm.core.console import print_json, print_table, say

BUNDLED, FRAGMENTED = 2.0, 8.0
"""The largest sigma of bundled and of fragmented data, as published."""


def show_io(spec: RunSpec, *, step_time: float, budget: float, as_json: bool) -> None:
    """`zslurm plan io`: a row for each phase, and what checkpoints need."""
    plan = plan_storage(spec, step_time=step_time, ranks=spec.world_size)
    if as_json:
        print_json(_facts(spec, plan, step_time, budget))
        return
    phases = list(zip(spec.phases, plan.reads, strict=True))
    columns = ["phase", "a step", "pages", "sigma", "IOPS", "of budget", "IOPS, sigma 1", "2", "8"]
    print_table(columns, [_row(phase.name, reads, budget) for phase, reads in phases])
    saves = plan.saves
    say(
        f"a checkpoint has {show_bytes(saves.bytes)} and is due every {show_duration(saves.every_s)}: saving must "
        f"reach {show_bytes(int(saves.rate))}/s in all, {show_bytes(int(saves.rate / saves.ranks))}/s on each of "
        f"{counted(saves.ranks, 'rank')}, or it falls behind"
    )
    for phase, reads in phases:
        if reads.iops(reads.sigma) > budget:
            say(
                f"note: phase {phase.name} reads more than the {show_count(budget)} pages/s of the budget; "
                "copy the data to disks of the nodes"
            )


def _row(name: str, reads: Reads, budget: float) -> list[str]:
    own = reads.iops(reads.sigma)
    return [
        name,
        show_bytes(reads.bytes),
        f"{reads.pages(reads.sigma):,.0f}",
        f"{reads.sigma:.2f}",
        f"{own:,.0f}",
        f"{100 * own / budget:.3g} %",
        *(f"{reads.iops(sigma):,.0f}" for sigma in (1.0, BUNDLED, FRAGMENTED)),
    ]


def _facts(spec: RunSpec, plan: StoragePlan, step_time: float, budget: float) -> dict[str, Any]:
    return {
        "step_time_s": step_time,
        "budget_iops": budget,
        "reads": [
            {
                "phase": phase.name,
                "global_batch": reads.global_batch,
                "context": reads.context,
                "token_bytes": reads.token_bytes,
                "bytes_per_step": reads.bytes,
                "pages_per_step": reads.pages(1),
                "iops_per_sigma": reads.iops(1),
                "sigma": reads.sigma,
                "iops": reads.iops(reads.sigma),
                "of_budget": reads.iops(reads.sigma) / budget,
            }
            for phase, reads in zip(spec.phases, plan.reads, strict=True)
        ],
        "checkpoint": {
            "bytes": plan.saves.bytes,
            "every_s": plan.saves.every_s,
            "bytes_per_s": plan.saves.rate,
            "ranks": plan.saves.ranks,
        },
    }
