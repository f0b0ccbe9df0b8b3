"""`zslurm bench mlp`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from typer import Option

from zslurm.cli.bench.choices import format_of
from zslurm.cli.bench.options import Measure
from zslurm.cli.bench.run import run_benchmark
from zslurm.cli.options import command_of

FORMATS = ("bf16", "fp32")


@dataclass(frozen=True, kw_only=True)
class Mlp(Measure):
    """What `zslurm bench mlp` takes on its command line."""

    layers: Annotated[
        int | None, Option(metavar="N", min=1, help="Layers of the stack; default: 8, on CPUs 2.")
    ] = None
    hidden: Annotated[int | None, Option(metavar="N", min=1, help="Width; default: 8192, on CPUs 256.")] = None
    inner: Annotated[int | None, Option(metavar="N", min=1, help="Inner width; default: 32768, on CPUs 1024.")] = (
        None
    )
    tokens: Annotated[
        int | None, Option(metavar="N", min=1, help="Tokens of each GPU; default: 16384, on CPUs 256.")
    ] = None
    dtype: Annotated[
        str | None, Option(metavar="NAME", help=f"Format: {' or '.join(FORMATS)}; default: bf16, on CPUs fp32.")
    ] = None


def _mlp(given: Mlp) -> None:
    """Let all GPUs compute at once, forward and backward through MLPs, and name the slow ones.

    Example: zslurm bench mlp --nodes 16
    """
    options: dict[str, Any] = {name: getattr(given, name) for name in ("layers", "hidden", "inner", "tokens")}
    options["dtype"] = None if given.dtype is None else format_of(given.dtype, FORMATS)
    options["moments"] = 20 if given.quick else None
    run_benchmark("mlp", options, given)


mlp = command_of(Mlp, _mlp)
