"""Options that all measurements share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

Nodes = Annotated[
    int | None, Option(metavar="N", min=1, help="As a Slurm job on N nodes; default: on this machine.")
]
Nodelist = Annotated[str | None, Option(metavar="LIST", help="As a Slurm job on these nodes.")]
Ranks = Annotated[
    int | None, Option(metavar="R", min=1, help="Ranks on each node; default: one for each GPU, two on CPUs.")
]
Minutes = Annotated[
    float | None,
    Option(metavar="M", min=0.01, help="Measure what fits into so many minutes, the shortest points first."),
]
Quick = Annotated[bool, Option("--quick", help="Measure a few points only.")]
Out = Annotated[
    Path | None, Option(metavar="FILE", help="Write the result here; default: in the user's state directory.")
]
Apply = Annotated[bool, Option("--apply", help="Write what follows from the result into the cluster's profile.")]
Plot = Annotated[Path | None, Option(metavar="DIR", help="Draw plots of the result there (SVG and PNG).")]
