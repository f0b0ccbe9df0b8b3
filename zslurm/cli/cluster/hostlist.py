"""`zslurm hostlist expand|compress`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from zslurm.cli.options import Json
from zslurm.core.console import print_json
from zslurm.slurm import hostlist

app = typer.Typer(help="Slurm's lists of nodes, without asking Slurm.", no_args_is_help=True)

Words = Annotated[
    list[str], typer.Argument(metavar="NODES...", help="Names and hostlists; - reads them from stdin.")
]


@app.command()
def expand(words: Words, json: Json = False) -> None:
    """Print every name of hostlists, one on a line.

    Example: zslurm hostlist expand rack[1-2]n[001-128]
    """
    names = _names(words)
    if json:
        print_json(names)
    else:
        print("\n".join(names), end="\n" if names else "")


@app.command()
def compress(words: Words, json: Json = False) -> None:
    """Print one hostlist for names and hostlists, each name once.

    Example: zslurm hostlist compress node1 node2 node3
    """
    text = hostlist.compress(_names(words))
    if json:
        print_json(text)
    elif text:
        print(text)


def _names(words: list[str]) -> list[str]:
    """Expand all hostlists; those of stdin may be on separate lines."""
    parts = [",".join(sys.stdin.read().split()) if word == "-" else word for word in words]
    return hostlist.expand(",".join(part for part in parts if part))
