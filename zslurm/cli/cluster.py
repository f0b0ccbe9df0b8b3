"""`zslurm cluster ls|show|check`: profiles as people read them."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Annotated, Any

import typer

from zslurm.cli.options import Json
from zslurm.cluster.edit import edit_profile, run_editor
from zslurm.cluster.profile import Profile, default_name, profiles, set_default
from zslurm.cluster.site import ResolvedProfile, resolve_profile
from zslurm.config.layers import show_path
from zslurm.core.console import print_json, print_table, say
from zslurm.core.errors import CheckFailed, ZslurmError
from zslurm.core.redact import redact_value
from zslurm.core.units import show_value
from zslurm.submit.profile_check import Report, check_profile

app = typer.Typer(help="Cluster profiles: list, show, edit, check, choose.", no_args_is_help=True)

Name = Annotated[
    str | None, typer.Argument(metavar="[NAME]", help="Name of a profile; default: the one that is used.")
]


@app.command("ls")
def list_(json: Json = False) -> None:
    """List the profiles: yours, the site's, and those that ship.

    Example: zslurm cluster ls
    """
    list_profiles(as_json=json)


@app.command()
def show(name: Name = None, json: Json = False) -> None:
    """Print a profile over everything it extends, each value with its origin.

    Example: zslurm cluster show mi300x-pollara
    """
    show_profile(resolve_profile(name or default_name()), as_json=json)


@app.command()
def edit(name: Name = None) -> None:
    """Edit a profile with $VISUAL or $EDITOR; it is replaced only by one that is valid.

    A profile of the site, or one that ships, gets one of yours that extends it.

    Example: zslurm cluster edit mi300x-pollara
    """
    written = edit_profile(name or default_name(), run_editor, say)
    say("unchanged" if written is None else f"wrote {written}")


@app.command()
def check(name: Name = None, json: Json = False) -> None:
    """Check a profile: against its rules, and against Slurm where it is here. Exit code 5 on faults.

    Example: zslurm cluster check
    """
    show_report(check_profile(name or default_name()), as_json=json)


@app.command()
def use(name: Annotated[str, typer.Argument(help="Name of a profile.", show_default=False)]) -> None:
    """Make a profile the one that is used where none is named.

    Example: zslurm cluster use local
    """
    set_default(name)
    say(f"{name} is now the default cluster")
    if os.environ.get("ZSLURM_CLUSTER", name) != name:
        say(f"note: ZSLURM_CLUSTER={os.environ['ZSLURM_CLUSTER']} is set and wins over it")


def list_profiles(*, as_json: bool) -> None:
    """Every profile that can be named; one that is hidden by another of its name is left out."""
    try:
        default: str | None = default_name()
    except ZslurmError:
        default = None
    known: dict[str, Profile] = {}
    for profile in profiles():
        known.setdefault(profile.name, profile)
    rows = [_row(profile, is_default=profile.name == default) for profile in known.values()]
    if as_json:
        print_json(rows)
        return
    print_table(
        ["name", "where", "default", "launcher", "partition", "nodes", "GPUs", "network"],
        [
            [
                row["name"], row["place"], "*" if row["default"] else "", row["launcher"] or row["fault"],
                row["partition"] or "-", str(row["nodes"] or "-"), row["gpus"] or "-", row["network"] or "-",
            ]
            for row in rows
        ],
    )  # fmt: skip


def _row(profile: Profile, *, is_default: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": profile.name,
        "place": profile.place,
        "file": None if profile.path is None else str(profile.path),
        "default": is_default,
        **dict.fromkeys(("launcher", "partition", "nodes", "gpus", "network", "fault")),
    }
    try:
        resolved = resolve_profile(profile.name)
    except ZslurmError as error:
        return row | {"fault": f"not valid: {str(error).splitlines()[0]}"}
    cluster, slurm = resolved.spec.cluster, resolved.spec.slurm
    gpus = f"{cluster.gpus_per_node} x {cluster.gpu_type or 'GPU'}" if cluster.gpus_per_node else None
    nodes = slurm.nodes if resolved.layers.leaf_origin(("slurm", "nodes")).layer != "default" else None
    return row | {
        "launcher": cluster.launcher,
        "partition": slurm.partition,
        "nodes": nodes,
        "gpus": gpus,
        "network": cluster.network,
    }


def show_profile(resolved: ResolvedProfile, *, as_json: bool) -> None:
    """Every value of a profile with its origin."""
    rows = [(path, redact_value(str(path[-1]), value), origin) for path, value, origin in resolved.rows()]
    if as_json:
        print_json({show_path(path): {"value": value, "origin": str(origin)} for path, value, origin in rows})
    else:
        print_table(
            ["key", "value", "origin"],
            [[show_path(path), show_value(value), str(origin)] for path, value, origin in rows],
        )


def show_report(report: Report, *, as_json: bool) -> None:
    """What `cluster check` found.

    Raises:
        CheckFailed: there are faults; one line for each.
    """
    if as_json:
        print_json(asdict(report))
    else:
        for line in report.passed:
            print(f"ok: {line}")
        for line in report.warnings:
            say(f"note: {line}")
    if report.faults:
        raise CheckFailed("\n".join(f"{report.name}: {fault}" for fault in report.faults))
