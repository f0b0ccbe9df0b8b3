"""`zslurm cluster ls|show|edit|check|use`."""

from __future__ import annotations

from typing import Annotated

import typer

from zslurm.cli.options import Json

app = typer.Typer(help="Cluster profiles: list, show, edit, check, choose.", no_args_is_help=True)

Name = Annotated[
    str | None, typer.Argument(metavar="[NAME]", help="Name of a profile; default: the one that is used.")
]


@app.command("ls")
def list_(json: Json = False) -> None:
    """List the profiles: yours, the site's, and those that ship.

    Example: zslurm cluster ls
    """
    from zslurm.report.cluster import list_profiles

    list_profiles(as_json=json)


@app.command()
def show(name: Name = None, json: Json = False) -> None:
    """Print a profile over everything it extends, each value with its origin.

    Example: zslurm cluster show mi300x-pollara
    """
    from zslurm.cluster.profile import default_name
    from zslurm.cluster.resolved import resolve_profile
    from zslurm.report.cluster import show_profile

    show_profile(resolve_profile(name or default_name()), as_json=json)


@app.command()
def edit(name: Name = None) -> None:
    """Edit a profile with $VISUAL or $EDITOR; it is replaced only by one that is valid.

    A profile of the site, or one that ships, gets one of yours that extends it.

    Example: zslurm cluster edit mi300x-pollara
    """
    from zslurm.cluster.edit import edit_profile, run_editor
    from zslurm.cluster.profile import default_name
    from zslurm.core.console import say

    written = edit_profile(name or default_name(), run_editor, say)
    say("unchanged" if written is None else f"wrote {written}")


@app.command()
def check(name: Name = None, json: Json = False) -> None:
    """Check a profile: against its rules, and against Slurm where it is here. Exit code 5 on faults.

    Example: zslurm cluster check
    """
    from zslurm.cluster.profile import default_name
    from zslurm.report.cluster import show_report
    from zslurm.submit.profile_check import check_profile

    show_report(check_profile(name or default_name()), as_json=json)


@app.command()
def use(name: Annotated[str, typer.Argument(help="Name of a profile.", show_default=False)]) -> None:
    """Make a profile the one that is used where none is named.

    Example: zslurm cluster use local
    """
    import os

    from zslurm.cluster.profile import set_default
    from zslurm.core.console import say

    set_default(name)
    say(f"{name} is now the default cluster")
    if os.environ.get("ZSLURM_CLUSTER", name) != name:
        say(f"note: ZSLURM_CLUSTER={os.environ['ZSLURM_CLUSTER']} is set and wins over it")
