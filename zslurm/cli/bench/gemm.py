"""`zslurm bench gemm`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from zslurm.cli.bench.choices import format_of, numbers
from zslurm.cli.bench.heat_map import show_products
from zslurm.cli.bench.options import MeasureForProfile
from zslurm.cli.bench.run import run_benchmark
from zslurm.cli.bench.run_file import run_named
from zslurm.cli.options import Set, command_of
from zslurm.cli.plan import trains_on_cpus
from zslurm.core.errors import ConfigError
from zslurm.submit.run_products import measured_products

FORMATS = ("bf16", "fp32", "fp64")
_QUICK = {"m": [1024, 4096], "n": [1024, 4096], "k": [1024]}


@dataclass(frozen=True, kw_only=True)
class Gemm(MeasureForProfile):
    """What `zslurm bench gemm` takes on its command line."""

    run: Annotated[
        str | None, Option(metavar="RUN", help="Measure every product of this run file or recipe instead.")
    ] = None
    m: Annotated[str | None, Option("--m", metavar="LIST", help="Values of M, with commas.")] = None
    n: Annotated[str | None, Option("--n", metavar="LIST", help="Values of N, with commas.")] = None
    k: Annotated[str | None, Option("--k", metavar="LIST", help="Values of K, with commas.")] = None
    dtype: Annotated[
        str | None, Option(metavar="NAME", help=f"Format: {', '.join(FORMATS)}; default: bf16, or the run's.")
    ] = None
    overrides: Set = None


def _gemm(given: Gemm) -> None:
    """Measure matrix products: a sweep of M, N and K, or every product of a run, for `zslurm size --rates`.

    Example: zslurm bench gemm --run run.yaml --out gemm.json
    """
    sizes = {"m": numbers("--m", given.m), "n": numbers("--n", given.n), "k": numbers("--k", given.k)}
    if given.quick:
        sizes = {name: listed or _QUICK[name] for name, listed in sizes.items()}
    products, chosen = None, "bf16"
    if given.run is None and given.overrides:
        raise ConfigError("--set changes a run: name one with --run")
    if given.run is not None:
        if given.m or given.n or given.k or given.quick:
            raise ConfigError("--run has its own sizes: leave out --m, --n, --k and --quick")
        spec = run_named(given.run, cluster=given.cluster, overrides=given.overrides or [])
        on_cpu, chosen = trains_on_cpus(spec), spec.parallel.dtype
        products = measured_products(spec, on_cpu=on_cpu)
    run_benchmark(
        "gemm",
        {"run": given.run, "products": products, **sizes, "dtype": format_of(given.dtype or chosen, FORMATS)},
        given,
        show=show_products,
    )


gemm = command_of(Gemm, _gemm)
