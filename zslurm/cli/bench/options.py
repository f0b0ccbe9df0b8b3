"""The options that all measurements share, declared once: a measurement's own class extends one of these."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from zslurm.cli.options import Cluster, Json


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Where to measure, for how long, and where the result goes."""

    cluster: Cluster = None
    nodes: Annotated[
        int | None, Option(metavar="N", min=1, help="As a Slurm job on N nodes; default: on this machine.")
    ] = None
    nodelist: Annotated[str | None, Option(metavar="LIST", help="As a Slurm job on these nodes.")] = None
    ranks: Annotated[
        int | None,
        Option(metavar="R", min=1, help="Ranks on each node; default: one for each GPU, two on CPUs."),
    ] = None
    quick: Annotated[bool, Option("--quick", help="Measure a few points only.")] = False
    minutes: Annotated[
        float | None,
        Option(metavar="M", min=0.01, help="Measure what fits into so many minutes, the shortest points first."),
    ] = None
    out: Annotated[
        Path | None, Option(metavar="FILE", help="Write the result here; default: in the user's state directory.")
    ] = None
    plot: Annotated[Path | None, Option(metavar="DIR", help="Draw plots of the result there (SVG and PNG).")] = (
        None
    )
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class MeasureForProfile(Measure):
    """The same, where settings of the cluster's profile follow from the result."""

    apply: Annotated[
        bool, Option("--apply", help="Write what follows from the result into the cluster's profile.")
    ] = False
