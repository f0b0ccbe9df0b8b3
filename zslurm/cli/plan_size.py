"""`zslurm plan size`: a run's matrix products, the sizing rules that it breaks, and the time of a step."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from zslurm.checkpoint_tools.quantities import counted, show_count
from zslurm.cli.options import Cluster, Json, RunFile, Set
from zslurm.cli.planned_run import planned_run, trains_on_cpus
from zslurm.cli.terminal.table import Column, print_table
from zslurm.config.spec import RunSpec
from zslurm.core.console import print_json, say
from zslurm.core.errors import ConfigError, Exit
from zslurm.submit.calibrated_rates import calibrated_rates
from zslurm.submit.size import Card, PhaseSize, RunSize, card_of, proposals, run_size
from zslurm.train.context.layout import check_phases
from zslurm.train.errors import ConfigError as TrainConfigError
from zslurm.train.plan.gpu_parts import Gain, PartOfMicrobatch, largest_gains, parts_of_microbatch
from zslurm.train.plan.matmuls import Matmul
from zslurm.train.plan.memory import largest_head_chunk
from zslurm.train.plan.newton_schulz import matrix_batches
from zslurm.train.plan.rates import ASSUMED_MEMORY_GB_S, ASSUMED_TFLOPS, Rates, RateTable, load_rates
from zslurm.train.plan.shape_search import ShapeProposal
from zslurm.train.plan.step_time import PARTS_OF_A_STEP

_GAINS = 3
FEWEST_PARAMETERS, MOST_PARAMETERS = 1e5, 1e13


def size(
    run_file: RunFile,
    cluster: Cluster = None,
    rates: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Result of `zslurm bench gemm`, or of `hbm` next to it (repeatable); default: what "
            "`zslurm calibrate` measured on the cluster.",
        ),
    ] = None,
    gpu_memory: Annotated[
        float | None,
        typer.Option(metavar="GIB", min=1, max=1e6, help="Memory of a GPU; default: by the GPUs' name, if known."),
    ] = None,
    search: Annotated[
        float | None,
        typer.Option(metavar="PARAMS", help="Propose shapes with about this many parameters, e.g. 3e9."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 5 if a rule is broken.")] = False,
    overrides: Set = None,
    json: Json = False,
) -> None:
    """Show a run's matrix products, and how its time divides. Sizing rules that the run breaks are named.

    Example: zslurm plan size run.yaml --rates gemm.json --strict
    """
    spec = planned_run(run_file, cluster, overrides or [])
    on_cpu = trains_on_cpus(spec)
    table, origin = _table(rates, spec, on_cpu=on_cpu)
    _check_contexts(spec)
    card = card_of(spec, gpu_memory, table.device if table else "", on_cpu=on_cpu)
    if search is not None:
        _search(spec, search, card, on_cpu=on_cpu, json=json)
        return
    known_rates = Rates(table, on_cpu=on_cpu)
    run_sizes = run_size(spec, card, known_rates, on_cpu=on_cpu)
    assumptions = _assumptions(spec, run_sizes, card, known_rates, origin, on_cpu=on_cpu)
    parts, gains = _parts(spec, run_sizes, card, known_rates, on_cpu=on_cpu)
    if json:
        facts = _facts(run_sizes, known_rates, card, assumptions, on_cpu=on_cpu)
        print_json(facts | {"parts": [asdict(part) for part in parts], "gains": [asdict(gain) for gain in gains]})
    else:
        _print_products(run_sizes, known_rates)
        _print_steps(run_sizes)
        _print_parts(parts, gains)
        for finding in run_sizes.findings:
            say(f"rule {finding.rule}: {finding.line}")
        for line in assumptions:
            say(f"note: {line}")
    if strict and run_sizes.findings:
        raise typer.Exit(Exit.CHECK_FAILED)


def _table(rates: list[Path] | None, spec: RunSpec, *, on_cpu: bool) -> tuple[RateTable | None, str]:
    """Return the rates that are given, or were measured on the run's cluster, and their origin in a line."""
    if not rates:
        return calibrated_rates(spec, on_cpu=on_cpu) or (None, "")
    try:
        return load_rates(rates, spec.parallel.dtype), ", ".join(map(str, rates))
    except TrainConfigError as error:
        raise ConfigError(f"--rates: {error}") from error


def _check_contexts(spec: RunSpec) -> None:
    """Raise ConfigError if ranks cannot divide a phase's sequences."""
    try:
        check_phases(spec.model, spec.phases)
    except TrainConfigError as error:
        raise ConfigError(str(error)) from error


def _assumptions(
    spec: RunSpec, found: RunSize, card: Card, rates: Rates, origin: str, *, on_cpu: bool
) -> list[str]:
    """Return what a reader of the tables must know."""
    lines = ["no choice is taken to fall on the skip class, and experts have equal shares of the rows"]
    if rates.table:
        products = [product for phase in found.phases for product in phase.products]
        measured_count = sum(
            (rate := rates.of(product)) is not None and rate.origin in ("measured", "near") for product in products
        )
        assert rates.default is not None
        lines.append(
            f"measured rates: {measured_count} of {counted(len(products), 'product')} ({origin}); the others are "
            f"taken to make the table's median, {rates.default.tflops:.3g} TFLOPS"
        )
        if not rates.table.parts:
            lines.append(
                "parts of a microbatch were not measured: other operations are what moves at the memory's rate; "
                "`zslurm bench gemm --run RUN` measures them"
            )
        if unmeasured := [batch for batch in matrix_batches(spec) if rates.newton_schulz_s(batch) is None]:
            lines.append(
                f"Newton-Schulz steps of {counted(len(unmeasured), 'shape')} of matrices in {unmeasured[0].dtype} "
                "were not measured: they are taken to be as fast as the run's products together"
            )
    elif not on_cpu:
        lines.append(
            f"not measured, assumed: every product makes {ASSUMED_TFLOPS:g} TFLOPS, and memory gives "
            f"{ASSUMED_MEMORY_GB_S:,.0f} GB/s; `zslurm calibrate` measures both"
        )
    if on_cpu:
        lines.append(
            "on CPUs: only the rule for ranks applies; --set parallel.device=cuda applies those for GPUs"
            + ("" if rates.table else "; step times need --rates FILE, as no rate is assumed")
        )
        return lines
    lines.append(
        "communication follows from the model of the network in docs/plan.md, which was not measured either"
    )
    if card.memory is None:
        lines.append("the memory of the GPUs is not known: give it with --gpu-memory GIB to have it checked")
    if card.peak is None:
        lines.append("the peak of the GPUs is not known, so there is no MFU: set metrics.peak_tflops")
    if spec.parallel.recompute == "auto":
        lines.append(f"parallel.recompute: auto recomputes {counted(found.memory.recomputed, 'layer')} here")
    return lines


def _same_products(phases: list[PhaseSize]) -> list[tuple[str, PhaseSize]]:
    """Return phases with the same products once, under all their names."""
    groups: list[tuple[str, PhaseSize]] = []
    for phase in phases:
        for index, (name, earlier) in enumerate(groups):
            if earlier.products == phase.products:
                groups[index] = (f"{name}, {phase.phase.name}", earlier)
                break
        else:
            groups.append((phase.phase.name, phase))
    return groups


_PRODUCT_COLUMNS = (
    *(Column(name) for name in ("product", "pass", "M", "N", "K")),
    Column("batch", drop=4),
    Column("calls", drop=3),
    Column("GFLOP", drop=5),
    Column("share", drop=2),
    Column("TFLOPS", drop=1),
)


def _print_products(found: RunSize, rates: Rates) -> None:
    """Print the products: on a terminal a table for each phase, elsewhere one for all."""
    tables: dict[str, list[list[str]]] = {}
    for name, phase in _same_products(found.phases):
        rows = tables.setdefault(name, [])
        for product in phase.products:
            sizes = [f"{number:,}" for number in (product.m, product.n, product.k, product.batch, product.calls)]
            share = f"{100 * product.total_flops / phase.all_flops:.2f} %"
            cells = [*sizes, f"{product.flops / 1e9:,.4g}", share, _rate(product, rates)]
            rows.append([product.name, product.pass_name, *cells])
    if not sys.stdout.isatty():
        all_rows = [[name, *row] for name, rows in tables.items() for row in rows]
        print_table([Column("phase"), *_PRODUCT_COLUMNS], all_rows)
        return
    for name, rows in tables.items():
        print(f"phase {name}")
        print_table(_PRODUCT_COLUMNS, rows)


def _rate(product: Matmul, rates: Rates) -> str:
    rate = rates.of(product)
    if rate is None or rate.origin in ("assumed", "median"):
        return "not measured"
    return f"{'~' if rate.origin == 'near' else ''}{rate.tflops:.4g}"


def _print_steps(found: RunSize) -> None:
    rows = []
    for size in found.phases:
        row = [size.phase.name, f"{size.microbatch.tokens:,}", f"{size.sequences:,}"]
        if size.time is None:
            rows.append([*row, *["not measured"] * (2 + len(PARTS_OF_A_STEP))])
            continue
        parts = asdict(size.time).values()
        mfu = "-" if size.mfu is None else f"{100 * size.mfu:.1f} %"
        shares = (f"{100 * seconds / size.time.seconds:.1f} %" for seconds in parts)
        rows.append([*row, f"{size.time.seconds:.4g} s", mfu, *shares])
    columns = ["phase", "tokens of a microbatch", "sequences of a rank", "step", "MFU"]
    print()
    print_table([*columns, *PARTS_OF_A_STEP], rows)


def _parts(
    spec: RunSpec, run_sizes: RunSize, card: Card, rates: Rates, *, on_cpu: bool
) -> tuple[list[PartOfMicrobatch], list[Gain]]:
    """Return the parts of the first phase's microbatch and the largest gains; for MI300X and MI325X, in bf16."""
    named = f"{spec.cluster.gpu_family or spec.cluster.gpu_type or ''} {rates.table.device if rates.table else ''}"
    is_stated = any(name in named.lower() for name in ("mi300", "mi325"))
    if on_cpu or not is_stated or spec.parallel.dtype != "bf16":
        return [], []
    first = run_sizes.phases[0]
    chunk = largest_head_chunk(spec, spec.world_size, card.memory, local=spec.ranks_per_node)
    arguments = spec, first.microbatch, first.products, rates
    return parts_of_microbatch(*arguments, chunk=chunk), largest_gains(*arguments, chunk)[:_GAINS]


def _print_parts(parts: list[PartOfMicrobatch], gains: list[Gain]) -> None:
    if not parts:
        return
    whole = sum(part.seconds for part in parts)
    rows = [
        [
            part.name,
            f"{1e3 * part.seconds:.1f} ms",
            f"{100 * part.seconds / whole:.0f} %",
            part.limit,
            "measured" if part.measured else "stated",
        ]
        for part in parts
    ]
    print()
    print_table(["part of the first phase's microbatch", "time", "share", "limited by", "rates"], rows)
    most = max(parts, key=lambda part: part.seconds)
    say(
        f"a microbatch takes {1e3 * whole:.0f} ms by stated rates of these GPUs' kernels, each good to a quarter; "
        f"most of it in `{most.name}`, limited by {most.limit}"
    )
    for gain in gains:
        say(f"gain: {1e3 * gain.seconds:.0f} ms of it by {gain.what}")


def _facts(found: RunSize, rates: Rates, card: Card, assumptions: list[str], *, on_cpu: bool) -> dict[str, Any]:
    return {
        "device": "cpu" if on_cpu else "gpu",
        "peak_flops": card.peak,
        "card_bytes": card.memory,
        "memory_peak_bytes": found.memory.peak,
        "recomputed_layers": found.memory.recomputed,
        "assumptions": assumptions,
        "findings": [asdict(finding) for finding in found.findings],
        "phases": [_phase_facts(phase, rates) for phase in found.phases],
    }


def _phase_facts(size: PhaseSize, rates: Rates) -> dict[str, Any]:
    return {
        "name": size.phase.name,
        "microbatch_tokens": size.microbatch.tokens,
        "sequences_per_rank": size.sequences,
        "flops_per_microbatch": size.flops,
        "step_s": None if size.time is None else size.time.seconds,
        "mfu": size.mfu,
        "parts_s": None if size.time is None else asdict(size.time),
        "products": [_product_facts(product, size, rates) for product in size.products],
    }


def _product_facts(product: Matmul, size: PhaseSize, rates: Rates) -> dict[str, Any]:
    rate = rates.of(product)
    return {
        "name": product.name,
        "pass": product.pass_name,
        "kind": product.kind,
        **{key: getattr(product, key) for key in ("m", "n", "k", "batch", "calls", "flops")},
        "share": product.total_flops / size.all_flops,
        "tflops": None if rate is None else rate.tflops,
        "rate": None if rate is None else rate.origin,
    }


def _search(spec: RunSpec, parameters: float, card: Card, *, on_cpu: bool, json: bool) -> None:
    """Print shapes near a number of parameters.

    Raises:
        ConfigError: that is no number of parameters, or there is no such shape.
    """
    if not math.isfinite(parameters) or not FEWEST_PARAMETERS <= parameters <= MOST_PARAMETERS:
        raise ConfigError(
            f"--search {parameters:g}: must be a number of parameters from {FEWEST_PARAMETERS:g} to "
            f"{MOST_PARAMETERS:g}, such as 3e9"
        )
    shapes, broken = proposals(spec, parameters, card, on_cpu=on_cpu)
    if not shapes:
        why = f"the nearest breaks a rule: {broken[0].line}" if broken else "none is near with this vocabulary"
        raise ConfigError(f"--search {parameters:g}: no shape within 10 % breaks no rule; {why}")
    if json:
        print_json({"parameters": parameters, "shapes": [_shape_facts(shape) for shape in shapes]})
        return
    columns = ["parameters", "active", "hidden_size", "layers", "experts", "expert_hidden_size", "query_heads"]
    columns += ["kv_heads", "head_dim"]
    rows = []
    for shape in shapes:
        facts = _shape_facts(shape)
        counts = [show_count(shape.parameters), show_count(shape.active)]
        rows.append([*counts, *(str(facts["model"][name]) for name in columns[2:])])
    print_table(columns, rows)
    say("note: parameters include the embedding, active ones do not; all else of `model` is the run's")


def _shape_facts(shape: ShapeProposal) -> dict[str, Any]:
    names = ("hidden_size", "layers", "experts", "expert_hidden_size", "query_heads", "kv_heads", "head_dim")
    model = {name: getattr(shape.model, name) for name in names}
    return {"parameters": shape.parameters, "active": shape.active, "model": model}
