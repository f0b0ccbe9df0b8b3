"""`zslurm bench`: the group of its commands, and those that measure."""

from __future__ import annotations

import difflib
import json as json_text
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from zslurm.bench.run.work_directory import PREFIX
from zslurm.bench.storage_space import refusal
from zslurm.cli.bench.results import apply as apply_results
from zslurm.cli.bench.results import compare_results, plot_result
from zslurm.cli.bench.run import (
    Measure,
    chosen,
    format_of,
    measuring,
    numbers,
    run_benchmark,
    size_of,
    sizes_between,
)
from zslurm.cli.bench.tables import environments, show_products
from zslurm.cli.commands import SETTINGS
from zslurm.cli.options import Set
from zslurm.cli.planned_run import trains_on_cpus
from zslurm.cluster.profile import LOCAL
from zslurm.config.layers import Override
from zslurm.config.load import recipes
from zslurm.config.spec import RunSpec
from zslurm.core.errors import ConfigError, NotFound
from zslurm.hardware.gpus import read_gpus
from zslurm.hardware.sysfs import sysroot
from zslurm.submit.checks.gemm_tuning import calls_of
from zslurm.submit.resolve import resolve_run
from zslurm.submit.run_products import measured_products
from zslurm.submit.size import most_sequences

app = typer.Typer(
    help="Measure links, memory, matrix products, kernels and storage.",
    no_args_is_help=True,
    **SETTINGS,
)

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send_recv")
SCOPES = ("node", "all", "rail", "gpu_pair", "node_pair")
PATTERNS = ("copy", "scale", "add", "triad", "dot")
_HBM_FORMATS, _GEMM_FORMATS, _MLP_FORMATS = ("fp64", "fp32"), ("bf16", "fp32", "fp64"), ("bf16", "fp32")
_QUICK_PRODUCTS = {"m": [1024, 4096], "n": [1024, 4096], "k": [1024]}
_LEAST_BYTES = 4 << 20
_MOST_DEPTH = 1024
_CPU_RANKS = 2
SOLUTION_MS = 30
_SECTIONS = {"model", "optim", "parallel", "metrics"}


@app.command()
@measuring()
def collectives(
    operation: Annotated[
        list[str] | None,
        Option(metavar="NAME", help=f"One of {', '.join(OPERATIONS)} (repeatable); default: all."),
    ] = None,
    scope: Annotated[
        list[str] | None, Option(metavar="NAME", help=f"One of {', '.join(SCOPES)} (repeatable); default: all.")
    ] = None,
    smallest: Annotated[str, Option("--min", metavar="SIZE", help="Smallest message.")] = "1KiB",
    largest: Annotated[
        str | None,
        Option("--max", metavar="SIZE", help="Largest message; default: 16GiB, with --quick on CPUs 64MiB."),
    ] = None,
    env: Annotated[
        str | None,
        Option(metavar="NAME=A,B", help="Measure under both values of a variable, and show them side by side."),
    ] = None,
    *,
    measure: Measure,
) -> None:
    """Measure collectives between GPUs: bandwidth, latency, and whether the data is right.

    Example: zslurm bench collectives --nodes 2 --minutes 10
    """
    run_benchmark(
        "collectives",
        {
            "operations": chosen("--operation", operation, OPERATIONS),
            "scopes": chosen("--scope", scope, SCOPES),
            "levels": ["flat", "two_level"],
            "sizes": sizes_between(smallest, largest or "16GiB", factor=16 if measure.quick else 2),
            "quick": measure.quick and largest is None,
        },
        measure,
        environments=environments(env),
    )


@app.command()
@measuring("apply")
def hbm(
    pattern: Annotated[
        list[str] | None,
        Option(metavar="NAME", help=f"One of {', '.join(PATTERNS)} (repeatable); default: all."),
    ] = None,
    smallest: Annotated[str, Option("--min", metavar="SIZE", help="Bytes of each array, the smallest.")] = "1MiB",
    largest: Annotated[str, Option("--max", metavar="SIZE", help="The largest.")] = "8GiB",
    dtype: Annotated[str, Option(metavar="NAME", help=f"Format: {' or '.join(_HBM_FORMATS)}.")] = "fp64",
    *,
    measure: Measure,
) -> None:
    """Measure the memory of GPUs, or of this machine's CPUs, with BabelStream's patterns.

    Example: zslurm bench hbm --max 1GiB
    """
    run_benchmark(
        "hbm",
        {
            "patterns": chosen("--pattern", pattern, PATTERNS),
            "sizes": sizes_between(smallest, largest, factor=16 if measure.quick else 2),
            "dtype": format_of(dtype, _HBM_FORMATS),
        },
        measure,
    )


@app.command()
@measuring("apply")
def gemm(
    run: Annotated[
        str | None, Option(metavar="RUN", help="Measure every product of this run file or recipe instead.")
    ] = None,
    m: Annotated[str | None, Option("--m", metavar="LIST", help="Values of M, with commas.")] = None,
    n: Annotated[str | None, Option("--n", metavar="LIST", help="Values of N, with commas.")] = None,
    k: Annotated[str | None, Option("--k", metavar="LIST", help="Values of K, with commas.")] = None,
    dtype: Annotated[
        str | None,
        Option(metavar="NAME", help=f"Format: {', '.join(_GEMM_FORMATS)}; default: bf16, or the run's."),
    ] = None,
    overrides: Set = None,
    *,
    measure: Measure,
) -> None:
    """Measure matrix products: a sweep of M, N and K, or every product of a run, for `zslurm plan size --rates`.

    Example: zslurm bench gemm --run run.yaml --out gemm.json
    """
    sizes = {"m": numbers("--m", m), "n": numbers("--n", n), "k": numbers("--k", k)}
    if measure.quick:
        sizes = {name: listed or _QUICK_PRODUCTS[name] for name, listed in sizes.items()}
    products, run_format = None, "bf16"
    if run is None and overrides:
        raise ConfigError("--set changes a run: name one with --run")
    if run is not None:
        if m or n or k or measure.quick:
            raise ConfigError("--run has its own sizes: leave out --m, --n, --k and --quick")
        spec = run_named(run, measure, overrides or [])
        on_cpu, run_format = trains_on_cpus(spec), spec.parallel.dtype
        products = measured_products(spec, on_cpu=on_cpu)
    run_benchmark(
        "gemm",
        {"run": run, "products": products, **sizes, "dtype": format_of(dtype or run_format, _GEMM_FORMATS)},
        measure,
        show=show_products,
    )


@app.command()
@measuring("apply")
def mlp(
    layers: Annotated[
        int | None, Option(metavar="N", min=1, help="Layers of the stack; default: 8, on CPUs 2.")
    ] = None,
    hidden: Annotated[int | None, Option(metavar="N", min=1, help="Width; default: 8192, on CPUs 256.")] = None,
    inner: Annotated[int | None, Option(metavar="N", min=1, help="Inner width; default: 32768, on CPUs 1024.")] = (
        None
    ),
    tokens: Annotated[
        int | None, Option(metavar="N", min=1, help="Tokens of each GPU; default: 16384, on CPUs 256.")
    ] = None,
    dtype: Annotated[
        str | None,
        Option(metavar="NAME", help=f"Format: {' or '.join(_MLP_FORMATS)}; default: bf16, on CPUs fp32."),
    ] = None,
    *,
    measure: Measure,
) -> None:
    """Let all GPUs compute at once, forward and backward through MLPs, and name the slow ones.

    Example: zslurm bench mlp --nodes 16
    """
    options: dict[str, Any] = {
        "layers": layers,
        "hidden": hidden,
        "inner": inner,
        "tokens": tokens,
        "dtype": None if dtype is None else format_of(dtype, _MLP_FORMATS),
        "moments": 20 if measure.quick else None,
    }
    run_benchmark("mlp", options, measure)


@app.command()
@measuring("apply")
def train(
    run: Annotated[str, Option(metavar="RUN", help="A run file or a recipe.")],
    phase: Annotated[
        list[str] | None, Option(metavar="NAME", help="A phase of the run (repeatable); default: its first.")
    ] = None,
    steps: Annotated[int, Option(metavar="N", min=1, max=10_000, help="Steps that are measured.")] = 20,
    microbatches: Annotated[
        int, Option(metavar="N", min=1, max=10_000, help="Microbatches of a rank in a step, at most.")
    ] = 4,
    overrides: Set = None,
    *,
    measure: Measure,
) -> None:
    """Measure a run's training step with its parts, on synthetic tokens.

    Example: zslurm bench train --run zaya1-1b --ranks 8
    """
    spec = run_named(run, measure, overrides or [])
    phase_names = [phase_config.name for phase_config in spec.phases]
    if unknown := [name for name in phase or [] if name not in phase_names]:
        raise ConfigError(f"--phase {unknown[0]}: the run's phases are {', '.join(phase_names)}")
    chosen_phases = [
        phase_config for phase_config in spec.phases if phase_config.name in (phase or phase_names[:1])
    ]
    has = {
        phase_config.name: -(-most_sequences(spec, phase_config) // phase_config.micro_batch)
        for phase_config in chosen_phases
    }
    run_benchmark(
        "train",
        {
            "run": run,
            "sections": spec.model_dump(mode="json", include=_SECTIONS),
            "phases": [phase_config.model_dump(mode="json") for phase_config in chosen_phases],
            "steps": min(steps, 5) if measure.quick else steps,
            "microbatches": {name: min(count, microbatches) for name, count in has.items()},
        },
        measure,
    )


@app.command()
@measuring()
def storage(
    path: Annotated[
        Path, Option(metavar="DIR", help="Directory to measure; on a cluster one that the nodes see.")
    ],
    size: Annotated[str, Option(metavar="SIZE", help="Bytes that each rank reads and writes.")] = "1GiB",
    checkpoint_size: Annotated[str, Option(metavar="SIZE", help="Bytes of each rank's shard.")] = "1GiB",
    depth: Annotated[
        list[int] | None,
        Option(metavar="N", min=1, max=_MOST_DEPTH, help="Random reads at a time on each rank (repeatable)."),
    ] = None,
    files: Annotated[int, Option(metavar="N", min=10, max=10**6, help="Empty files that each rank makes.")] = 1000,
    *,
    measure: Measure,
) -> None:
    """Measure storage: random and sequential reads, writes, saves of checkpoints, operations on names.

    Example: zslurm bench storage --path /scratch/ada --nodes 8
    """
    most = 1 << 26 if measure.quick else 1 << 62
    options = {
        "path": str(path.absolute()),
        "work": PREFIX + secrets.token_hex(6),
        "size": min(_size("--size", size), most),
        "checkpoint": min(_size("--checkpoint-size", checkpoint_size), most),
        "depths": sorted(set(depth or ([1, 16] if measure.quick else [1, 4, 16, 64]))),
        "files": min(files, 200) if measure.quick else files,
        "seconds": 0.5 if measure.quick else 3.0,
        "saves": 1 if measure.quick else 3,
    }
    if not measure.on_cluster or path.exists():  # else it may be a disk that only the nodes have
        _check(path, options, measure.ranks or _CPU_RANKS, measure.nodes or 1)
    try:
        run_benchmark("storage", options, measure)
    finally:
        shutil.rmtree(path / str(options["work"]), ignore_errors=True)


@app.command()
@measuring("quick", "plot")
def speed(
    *,
    measure: Measure,
) -> None:
    """Measure each GPU in seconds: matrix product, memory, all-reduce; `zslurm doctor --only speed` compares.

    Example: zslurm bench speed --nodes 2
    """
    run_benchmark("speed", {}, measure)


@app.command()
@measuring("ranks", "quick", "plot")
def kernels(
    only: Annotated[
        list[str] | None, Option(metavar="OPERATION", help="Measure only this operation (repeatable).")
    ] = None,
    *,
    measure: Measure,
) -> None:
    """Time every kernel of zslurm on one GPU. With --apply runs choose by it, for each size.

    Example: zslurm bench kernels --nodes 1 --apply
    """
    run_benchmark("kernels", {"only": only or []}, replace(measure, ranks=1))


@app.command()
@measuring("ranks", "quick", "plot")
def tuning(
    run: Annotated[str, Option(metavar="RUN", help="A run file or a recipe.")],
    overrides: Set = None,
    solution_ms: Annotated[
        int, Option(metavar="MS", min=1, help="Longest time to measure one solution.")
    ] = SOLUTION_MS,
    *,
    measure: Measure,
) -> None:
    """Tune a run's matrix products on one GPU by torch's TunableOp. With --apply every rank gets the table.

    Example: zslurm bench tuning --run run.yaml --nodes 1 --apply
    """
    spec = run_named(run, measure, overrides or [])
    run_benchmark("tuning", tuning_options(spec, solution_ms), replace(measure, ranks=1))


def tuning_options(spec: RunSpec, solution_ms: int = SOLUTION_MS) -> dict[str, Any]:
    """Return the options of the benchmark `tuning` for a run."""
    return {"calls": [asdict(call) for call in calls_of(spec)], "solution_ms": solution_ms}


app.command("compare")(compare_results)
app.command("plot")(plot_result)
app.command("apply")(apply_results)


def _check(path: Path, options: dict[str, object], ranks: int, nodes: int) -> None:
    size, checkpoint = options["size"], options["checkpoint"]
    assert isinstance(size, int) and isinstance(checkpoint, int)
    reason = refusal(path, size=size, checkpoint=checkpoint, ranks_per_node=ranks, nodes=nodes)
    if reason is not None:
        raise ConfigError(f"--path {reason}")


def _size(option: str, text: str) -> int:
    """Return a size in bytes, a multiple of the largest block."""
    size = size_of(option, text)
    if size < _LEAST_BYTES:
        raise ConfigError(f"{option} {text}: at least 4MiB")
    return size // _LEAST_BYTES * _LEAST_BYTES


def run_named(name: str, measure: Measure, overrides: Sequence[Override] = ()) -> RunSpec:
    """Return a run: of a file, or a recipe's on the cluster that is measured.

    Raises:
        NotFound: neither a file nor a recipe has this name, or there is no such profile.
        ConfigError: the run is not valid.
    """
    path = Path(name)
    if path.is_file():
        return resolve_run(path, cluster=measure.cluster, overrides=overrides).spec
    recipe_names = recipes()
    if name not in recipe_names:
        near = difflib.get_close_matches(name, recipe_names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"recipes: {', '.join(recipe_names)}"
        raise NotFound(f"--run {name}: no file and no recipe has this name; {hint}")
    cluster = measure.profile
    body: dict[str, object] = {"extends": name, "data": {"path": "tokens.h5"}}
    if cluster == LOCAL and read_gpus(sysroot()):
        body["parallel"] = {"device": "cuda"}
    with tempfile.TemporaryDirectory(prefix="zslurm-bench-") as folder:
        file = Path(folder, f"{name}.yaml")
        file.write_text(json_text.dumps(body))
        return resolve_run(file, cluster=cluster, overrides=overrides).spec
