"""`zslurm init`."""

from __future__ import annotations

from typing import Annotated

import typer


def init(
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the profile; default: the cluster's.")
    ] = None,
    partition: Annotated[
        str | None, typer.Option("--partition", help="Partition to use; default: Slurm's default one.")
    ] = None,
    yes: Annotated[
        bool, typer.Option("-y", "--yes", help="Ask nothing; replace an existing profile of the name.")
    ] = False,
) -> None:
    """Write a cluster profile from what Slurm says.

    Example: zslurm init --yes
    """
    from zslurm.cli.output import say
    from zslurm.cluster.detect import detect
    from zslurm.cluster.profile import profile_path, save_profile

    found = detect(name=name, partition=partition)
    choices = found.partition_choices
    if partition is None and len(choices) > 1 and not yes:
        chosen = typer.prompt(f"partition ({', '.join(choices)})", default=choices[0], err=True)
        found = detect(name=name, partition=chosen)
    path = profile_path(found.name)
    if path.exists() and not yes:
        typer.confirm(f"{path} exists; replace it?", abort=True, err=True)
    save_profile(found.name, found.text, make_default=True)
    print(found.text, end="")
    say(f"wrote {path}; it is now the default cluster")
