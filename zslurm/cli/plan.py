"""`zslurm plan`: the memory and the storage traffic that a run will take; plan_run.py has its time and cost."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from zslurm.checkpoint_tools.quantities import counted, show_bytes, show_count, show_duration
from zslurm.cli.errors import as_user_errors
from zslurm.cli.options import Cluster, Json, RunFile, Set
from zslurm.cli.plan_run import run
from zslurm.cli.plan_size import size
from zslurm.cli.planned_run import planned_run, trains_on_cpus
from zslurm.cli.terminal.table import print_table
from zslurm.config.spec import RunSpec
from zslurm.core.console import print_json, say
from zslurm.submit.size import shares_memory
from zslurm.train.config import Recompute
from zslurm.train.plan.io import PUBLISHED_BUDGET, Reads, StoragePlan, plan_storage
from zslurm.train.plan.memory import LEFT_FREE, MemoryPlan, plan_memory, with_least_recompute

app = typer.Typer(help="What a run will take, before it is submitted.", no_args_is_help=True)
app.command()(run)
app.command()(size)


BUNDLED, FRAGMENTED = 2.0, 8.0
"""The largest sigma of bundled and of fragmented data, as published."""


@app.command()
def memory(
    run_file: RunFile,
    cluster: Cluster = None,
    dp: Annotated[
        list[int] | None,
        typer.Option(metavar="RANKS", min=1, help="Number of ranks (repeatable); default: the run's own."),
    ] = None,
    gpu_memory: Annotated[
        float | None,
        typer.Option(
            metavar="GIB", min=1, max=1e6, help="Memory of a GPU: shows the least recomputation that fits."
        ),
    ] = None,
    overrides: Set = None,
    json: Json = False,
) -> None:
    """Show what each rank's memory will hold. The table also shows how evenly matrices are divided.

    Example: zslurm plan memory run.yaml --dp 8 --dp 1024 --gpu-memory 192
    """
    spec = planned_run(run_file, cluster, overrides or [])
    on_cpu, counts = trains_on_cpus(spec), dict.fromkeys(dp or [spec.world_size])
    limit = None if gpu_memory is None else int(gpu_memory * 2**30)
    recompute, names = spec.parallel.recompute, [phase.name for phase in spec.phases]
    with as_user_errors():
        plans = [planned(spec, count, limit, on_cpu=on_cpu) for count in counts]
        others = [planned(_with_recompute(spec, not recompute), count, limit, on_cpu=on_cpu) for count in counts]
        fewest: list[int | None] = []
        if limit is not None and not on_cpu:
            least = (planned(_with_recompute(spec, "auto"), count, limit, on_cpu=on_cpu) for count in counts)
            fewest = [plan.recomputed if plan.peak <= (1 - LEFT_FREE) * limit else None for plan in least]
    if json:
        facts = [_facts(plan, names) for plan in plans]
        for phase_facts, layers in zip(facts, fewest, strict=False):
            phase_facts["least_recomputed_layers"] = layers
        print_json({"device": "cpu" if on_cpu else "gpu", "recompute": recompute, "plans": facts})
        return
    rows = [
        *_memory_rows(plans, names),
        [f"  {'without' if recompute else 'with'} recompute", *(show_bytes(plan.peak) for plan in others)],
        ["layers that are recomputed", *(str(plan.recomputed) for plan in plans)],
        *(
            [["fewest that fit", *("none fits" if layers is None else str(layers) for layers in fewest)]]
            if fewest
            else []
        ),
        *_copies_rows(spec, plans, on_cpu=on_cpu),
    ]
    print_table(["ranks", *(str(plan.ranks) for plan in plans)], [*rows, *_packing_rows(plans)])
    for note in _notes(spec, plans, on_cpu=on_cpu, limited=limit is not None):
        say(f"note: {note}")


def planned(spec: RunSpec, ranks: int, memory: int | None, *, on_cpu: bool) -> MemoryPlan:
    """Return the plan, for `parallel.recompute: auto` with what GPUs of so many bytes ask for."""
    local = spec.ranks_per_node
    config = with_least_recompute(spec, ranks, memory, on_cpu=on_cpu, local=local)
    return plan_memory(config, ranks, on_cpu=on_cpu, local=local)


def _copies_rows(spec: RunSpec, plans: list[MemoryPlan], *, on_cpu: bool) -> list[list[str]]:
    """Return what copies of the state take: of the host, or of the same memory on an MI300A."""
    is_shared = shares_memory(spec) and not on_cpu
    prefix = "in the GPU's memory too" if is_shared else "host"
    rows = [[f"{prefix}: copy for a checkpoint", *(show_bytes(plan.staging) for plan in plans)]]
    if spec.recovers_in_memory:
        rows.append([f"{prefix}: copies for recovery", *(show_bytes(plan.copies) for plan in plans)])
    if is_shared:
        recovers = spec.recovers_in_memory
        sums = (plan.peak + plan.staging + (plan.copies if recovers else 0) for plan in plans)
        rows.append(["= peak with copies", *map(show_bytes, sums)])
    return rows


def _with_recompute(spec: RunSpec, value: Recompute) -> RunSpec:
    return spec.model_copy(update={"parallel": spec.parallel.model_copy(update={"recompute": value})})


def _facts(plan: MemoryPlan, names: list[str]) -> dict[str, Any]:
    balance = plan.balance
    return {
        "ranks": plan.ranks,
        "peak_bytes": plan.peak,
        "peak_moment": plan.peak_moment,
        "recomputed_layers": plan.recomputed,
        "resident_bytes": plan.resident,
        "moment_bytes": plan.moments,
        "microbatch_bytes": asdict(plan.microbatch),
        "phases": [
            {"name": name, "peak_bytes": plan.peak_in(index), "microbatch_bytes": asdict(plan.microbatches[index])}
            for index, name in enumerate(names)
        ],
        "host_staging_bytes": plan.staging,
        "host_copies_bytes": plan.copies,
        "matrices": plan.matrices,
        "packing": {**asdict(balance), "idle_share": round(plan.idle_share, 6)},
    }


def _memory_rows(plans: list[MemoryPlan], names: list[str]) -> list[list[str]]:
    """Return what is allocated throughout, the moments, and their sum."""

    def row(name: str, values: list[int]) -> list[str]:
        return [name, *map(show_bytes, values)]

    rows = [row(name, [plan.resident[name] for plan in plans]) for name in plans[0].resident]
    for name in plans[0].moments:
        rows.append(row(f"+ {name}", [plan.moments[name] for plan in plans]))
        if name == "forward and backward":
            for index, phase in enumerate(names if len(names) > 1 else ()):
                rows.append(row(f"    of phase {phase}", [plan.microbatches[index].peak for plan in plans]))
            rows.append(row("    kept of all layers", [plan.microbatch.layers for plan in plans]))
            rows.append(row("    logits of a chunk", [plan.microbatch.logits for plan in plans]))
    return [*rows, row("= peak", [plan.peak for plan in plans])]


def _packing_rows(plans: list[MemoryPlan]) -> list[list[str]]:
    """Return how evenly matrices are divided; nothing if AdamW trains them."""
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


def _notes(spec: RunSpec, plans: list[MemoryPlan], *, on_cpu: bool, limited: bool) -> list[str]:
    """Return what a reader of the table must know."""
    notes = [f"on {'CPUs' if on_cpu else 'GPUs'}; the rank that owns most; of the lines with +, one at a time"]
    if spec.parallel.recompute == "auto" and not on_cpu and not limited:
        notes.append(
            "parallel.recompute: auto depends on the GPUs' memory: give it with --gpu-memory; shown is none"
        )
    if spec.parallel.compile:
        notes.append("compiled layers usually keep less than is counted here")
    if any(map(spec.data.isolates, spec.phases)) and not on_cpu:
        key = "isolate_documents" if spec.data.isolate_documents else "packing: best_fit"
        notes.append(f"data.{key} is counted with torch's own attention, which keeps all scores on GPUs")
    notes += [
        f"on {counted(plan.ranks, 'rank')} {plan.balance.idle_ranks} "
        f"({plan.balance.idle_ranks / plan.ranks:.0%}) own no matrix: there are {plan.matrices}"
        for plan in plans
        if plan.matrices and plan.balance.idle_ranks
    ]
    return notes


@app.command()
def io(
    run_file: RunFile,
    step_time: Annotated[
        float, typer.Option(metavar="SECONDS", min=1e-6, max=1e9, help="Time of one optimizer step.")
    ],
    cluster: Cluster = None,
    iops: Annotated[
        float | None,
        typer.Option(
            metavar="IOPS",
            min=1,
            max=1e12,
            help="Pages of 4 KiB a second that the storage gives; default: the profile's `cluster.storage_iops`.",
        ),
    ] = None,
    overrides: Set = None,
    json: Json = False,
) -> None:
    """Show what a run will ask of its storage. Pages a second, and the bytes of checkpoints.

    Example: zslurm plan io run.yaml --step-time 2.5
    """
    spec = planned_run(run_file, cluster, overrides or [])
    plan = plan_storage(spec, step_time=step_time, ranks=spec.world_size)
    budget, source = _budget(spec, iops)
    if json:
        print_json(_io_facts(spec, plan, step_time, budget, source))
        return
    phases = list(zip(spec.phases, plan.reads, strict=True))
    columns = ["phase", "a step", "pages", "sigma", "IOPS", "of budget", "IOPS, sigma 1", "2", "8"]
    print_table(columns, [_row(phase.name, reads, budget) for phase, reads in phases])
    say(f"budget: {show_count(budget)} pages/s, {_SOURCES[source]}")
    for phase, reads in phases:
        say(f"phase {phase.name}: {_margin_line(reads, budget)}")
    saves = plan.saves
    say(
        f"a checkpoint has {show_bytes(saves.bytes)} and is due every {show_duration(saves.every_s)}: saving must "
        f"reach {show_bytes(int(saves.rate))}/s in all, {show_bytes(int(saves.rate / saves.ranks))}/s on each of "
        f"{counted(saves.ranks, 'rank')}, or it falls behind"
    )
    for phase, reads in phases:
        if reads.margin(reads.sigma, budget) < 1:
            say(
                f"note: phase {phase.name} reads more than the {show_count(budget)} pages/s of the budget; "
                "copy the data to disks of the nodes"
            )


_SOURCES = {
    "option": "as given with --iops",
    "profile": "cluster.storage_iops of the profile",
    "published": "what ZAYA1's cluster gave; `zslurm bench storage` measures yours, for cluster.storage_iops",
}


def _budget(spec: RunSpec, asked: float | None) -> tuple[float, str]:
    """Return the pages a second that the storage gives, and the source of the figure, a key of `_SOURCES`."""
    if asked is not None:
        return asked, "option"
    if spec.cluster.storage_iops is not None:
        return spec.cluster.storage_iops, "profile"
    return PUBLISHED_BUDGET, "published"


def _margin_line(reads: Reads, budget: float) -> str:
    (own_steps, margin), (worst, least) = (
        (_seconds(reads.break_even(sigma, budget)), _times(reads.margin(sigma, budget)))
        for sigma in (reads.sigma, FRAGMENTED)
    )
    return (
        f"break-even at steps of {own_steps}, margin {margin} "
        f"({worst} and {least} for fragmented data, sigma {FRAGMENTED:g})"
    )


def _times(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 0.1 else f"{1e3 * value:.3g} ms"


def _row(name: str, reads: Reads, budget: float) -> list[str]:
    own_rate = reads.iops(reads.sigma)
    return [
        name,
        show_bytes(reads.bytes),
        f"{reads.pages(reads.sigma):,.0f}",
        f"{reads.sigma:.2f}",
        f"{own_rate:,.0f}",
        f"{100 * own_rate / budget:.3g} %",
        *(f"{reads.iops(sigma):,.0f}" for sigma in (1.0, BUNDLED, FRAGMENTED)),
    ]


def _io_facts(spec: RunSpec, plan: StoragePlan, step_time: float, budget: float, source: str) -> dict[str, Any]:
    return {
        "step_time_s": step_time,
        "budget_iops": budget,
        "budget_from": source,
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
                "break_even_s": reads.break_even(reads.sigma, budget),
                "margin": reads.margin(reads.sigma, budget),
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
