"""`zslurm bench gemm`."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from zslurm.cli.bench.choices import format_of, numbers
from zslurm.cli.bench.heat_map import show_products
from zslurm.cli.bench.options import Apply, Minutes, Nodelist, Nodes, Out, Plot, Quick, Ranks
from zslurm.cli.bench.run import Common, run_benchmark
from zslurm.cli.bench.run_file import run_named
from zslurm.cli.options import Cluster, Json, Set
from zslurm.cli.plan import trains_on_cpus
from zslurm.core.errors import ConfigError
from zslurm.submit.run_products import run_parts, run_products

FORMATS = ("bf16", "fp32", "fp64")
_QUICK = {"m": [1024, 4096], "n": [1024, 4096], "k": [1024]}


def gemm(
    cluster: Cluster = None,
    nodes: Nodes = None,
    nodelist: Nodelist = None,
    ranks: Ranks = None,
    run: Annotated[
        str | None, Option(metavar="RUN", help="Measure every product of this run file or recipe instead.")
    ] = None,
    m: Annotated[str | None, Option("--m", metavar="LIST", help="Values of M, with commas.")] = None,
    n: Annotated[str | None, Option("--n", metavar="LIST", help="Values of N, with commas.")] = None,
    k: Annotated[str | None, Option("--k", metavar="LIST", help="Values of K, with commas.")] = None,
    dtype: Annotated[
        str | None, Option(metavar="NAME", help=f"Format: {', '.join(FORMATS)}; default: bf16, or the run's.")
    ] = None,
    overrides: Set = None,
    quick: Quick = False,
    minutes: Minutes = None,
    out: Out = None,
    plot: Plot = None,
    apply: Apply = False,
    json: Json = False,
) -> None:
    """Measure matrix products: a sweep of M, N and K, or every product of a run, for `zslurm size --rates`.

    Example: zslurm bench gemm --run run.yaml --out gemm.json
    """
    sizes = {"m": numbers("--m", m), "n": numbers("--n", n), "k": numbers("--k", k)}
    if quick:
        sizes = {name: given or _QUICK[name] for name, given in sizes.items()}
    products, chosen = None, "bf16"
    if run is None and overrides:
        raise ConfigError("--set changes a run: name one with --run")
    if run is not None:
        if m or n or k or quick:
            raise ConfigError("--run has its own sizes: leave out --m, --n, --k and --quick")
        spec = run_named(run, cluster=cluster, overrides=overrides or [])
        on_cpu, chosen = trains_on_cpus(spec), spec.parallel.dtype
        products = [*run_products(spec, on_cpu=on_cpu), *run_parts(spec, on_cpu=on_cpu)]
    run_benchmark(
        "gemm",
        {"run": run, "products": products, **sizes, "dtype": format_of(dtype or chosen, FORMATS)},
        Common(cluster, nodes, nodelist, ranks, minutes, out, plot, json, apply),
        show=show_products,
    )
