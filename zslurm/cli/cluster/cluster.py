"""`zslurm cluster`: list, show, edit, check and choose profiles."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Annotated, Any

import typer

from zslurm.cli.cluster import exclude
from zslurm.cli.cluster.env import env
from zslurm.cli.cluster.rails import rails
from zslurm.cli.options import Json, complete_clusters
from zslurm.cli.terminal.table import Column, print_table
from zslurm.cli.values import print_measurements, print_values
from zslurm.cluster.edit import edit_profile, run_editor
from zslurm.cluster.profile import Profile, default_name, find_profile, measurements_of, profiles, set_default
from zslurm.cluster.site import resolve_profile
from zslurm.core import log
from zslurm.core.console import print_json, say
from zslurm.core.errors import CheckFailed, ZslurmError
from zslurm.submit.checks.profile import check_profile

app = typer.Typer(help="Cluster profiles, RCCL environment, rails and excluded nodes.", no_args_is_help=True)

Name = Annotated[
    str | None,
    typer.Argument(
        metavar="[NAME]",
        help="Name of a profile; default: the one that is used.",
        autocompletion=complete_clusters,
    ),
]

_COLUMNS = (
    Column("name"),
    Column("where", drop=4),
    Column("default"),
    Column("launcher", drop=1),
    Column("partition", drop=5),
    Column("nodes", drop=6),
    Column("GPUs", drop=2),
    Column("network", drop=3),
    Column("problem", "below"),
)


app.command()(env)
app.command()(rails)
app.add_typer(exclude.app, name="exclude")


@app.command("ls")
def list_(json: Json = False) -> None:
    """List the profiles: yours, the site's, and those that ship.

    Example: zslurm cluster ls
    """
    try:
        default: str | None = default_name()
    except ZslurmError:
        default = None
    visible: dict[str, Profile] = {}
    for profile in profiles():
        visible.setdefault(profile.name, profile)
    facts = [_facts(profile, is_default=profile.name == default) for profile in visible.values()]
    if json:
        print_json(facts)
        return
    rows = [
        [
            fact["name"], fact["place"], "*" if fact["default"] else "", fact["launcher"] or "-",
            fact["partition"] or "-", str(fact["nodes"] or "-"), fact["gpus"] or "-", fact["network"] or "-",
            fact["fault"] or "",
        ]
        for fact in facts
    ]  # fmt: skip
    print_table(_COLUMNS, rows)


def _facts(profile: Profile, *, is_default: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "name": profile.name,
        "place": profile.place,
        "file": None if profile.path is None else str(profile.path),
        "default": is_default,
        **dict.fromkeys(("launcher", "partition", "nodes", "gpus", "network", "fault")),
    }
    try:
        resolved = resolve_profile(profile.name)
    except ZslurmError as error:
        return facts | {"fault": f"not valid: {str(error).splitlines()[0]}"}
    cluster, slurm = resolved.spec.cluster, resolved.spec.slurm
    gives_nodes = resolved.layers.leaf_origin(("slurm", "nodes")).layer != "default"
    return facts | {
        "launcher": cluster.launcher,
        "partition": slurm.partition,
        "nodes": slurm.nodes if gives_nodes else None,
        "gpus": f"{cluster.gpus_per_node} x {cluster.gpu_type or 'GPU'}" if cluster.gpus_per_node else None,
        "network": cluster.network,
    }


@app.command()
def show(
    name: Name = None,
    measured: Annotated[
        bool, typer.Option("--measured", help="Print what was measured, with spread, date and nodes.")
    ] = False,
    json: Json = False,
) -> None:
    """Print a profile, each value with its origin. What the profile extends is included.

    Example: zslurm cluster show mi300x-pollara
    """
    name = name or default_name()
    if not measured:
        print_values(resolve_profile(name).rows(), as_json=json)
        return
    find_profile(name)
    stored = measurements_of(name)
    if json:
        print_json(None if stored is None else {"file": str(stored[0]), **stored[1].model_dump(mode="json")})
    elif stored is not None:
        print_measurements(stored[1].values)
    if stored is None:
        say(f"nothing was measured with the profile {name}: see `zslurm bench --help`")


@app.command()
def edit(name: Name = None) -> None:
    """Edit a profile with $VISUAL or $EDITOR. It is replaced only by one that is valid.

    A profile of the site, or one that ships, gets one of yours that extends it.

    Example: zslurm cluster edit mi300x-pollara
    """
    log.set_up()
    written = edit_profile(name or default_name(), run_editor)
    say("unchanged" if written is None else f"wrote {written}")


@app.command()
def check(name: Name = None, json: Json = False) -> None:
    """Check a profile by its rules, and against Slurm. Exit code 5 on faults.

    Example: zslurm cluster check
    """
    report = check_profile(name or default_name())
    if json:
        print_json(asdict(report))
    else:
        for line in report.passed:
            print(f"ok: {line}")
        for line in report.warnings:
            say(f"note: {line}")
    if report.faults:
        raise CheckFailed("\n".join(f"{report.name}: {fault}" for fault in report.faults))


@app.command()
def use(name: Annotated[str, typer.Argument(help="Name of a profile.", autocompletion=complete_clusters)]) -> None:
    """Make a profile the one that is used if none is named.

    Example: zslurm cluster use local
    """
    set_default(name)
    say(f"{name} is now the default cluster")
    if os.environ.get("ZSLURM_CLUSTER", name) != name:
        say(f"note: ZSLURM_CLUSTER={os.environ['ZSLURM_CLUSTER']} is set and wins over it")
