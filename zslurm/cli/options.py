"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zslurm.cli.complete import complete_clusters, complete_runs

RunFile = Annotated[Path, typer.Argument(metavar="RUN_FILE", help="The YAML run file.", show_default=False)]
Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run's name, its directory, or a job id.",
        show_default=False,
        autocompletion=complete_runs,
    ),
]
Runs = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN...",
        help="Names, directories or job ids.",
        show_default=False,
        autocompletion=complete_runs,
    ),
]
SomeRuns = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN]...",
        help="Names, directories or job ids; default: all your runs.",
        autocompletion=complete_runs,
    ),
]
Cluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="NAME",
        help="Cluster profile; `local` trains on this machine.",
        autocompletion=complete_clusters,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a value, e.g. phases[0].lr=3e-4 (repeatable)."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
TokenizerFile = Annotated[
    Path | None,
    typer.Option("--tokenizer", metavar="FILE", help="A tokenizer.json to use instead of the weights' own."),
]
NoTokenizer = Annotated[bool, typer.Option("--no-tokenizer", help="Leave the tokenizer out.")]
RopeBase = Annotated[
    float | None,
    typer.Option(
        "--rope-base", metavar="BASE", min=1, help="Base of the rotary embedding; default: that of the run."
    ),
]
Context = Annotated[
    int | None,
    typer.Option("--context", metavar="TOKENS", min=1, help="Longest sequence; default: that of the run."),
]
