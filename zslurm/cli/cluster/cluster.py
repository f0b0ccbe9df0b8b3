"""`zslurm cluster`: list, show, edit, check and choose profiles, and print the variables of RCCL and NCCL."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from typer import Option

from zslurm.api.environment import is_secret, settings_of
from zslurm.cli.cluster import exclude
from zslurm.cli.cluster.rails import rails
from zslurm.cli.options import Cluster, Json, Set, complete_clusters
from zslurm.cli.terminal.table import Column, print_table
from zslurm.cli.values import print_measurements, print_values
from zslurm.cluster.edit import edit_profile, run_editor
from zslurm.cluster.profile import (
    Profile,
    default_name,
    find_profile,
    measured_values,
    measurements_of,
    profiles,
    set_default,
)
from zslurm.cluster.rccl import environment as rccl
from zslurm.cluster.rccl.conf_files import read_conf
from zslurm.cluster.rccl.environment import Setting
from zslurm.cluster.rccl.lint import lint, overridden
from zslurm.cluster.site import resolve_profile
from zslurm.config.spec import ClusterSection
from zslurm.core import log
from zslurm.core.console import print_json, say
from zslurm.core.errors import CheckFailed, ZslurmError
from zslurm.core.quoting import quote
from zslurm.hardware.sysfs import sysroot
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
        print_json([{"file": str(path), **measurements.model_dump(mode="json")} for path, measurements in stored])
    elif stored:
        print_measurements(measured_values(name))
    if not stored:
        say(f"nothing was measured with the profile {name}: `zslurm calibrate` measures the cluster")


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


_WIDTH = 110


@app.command()
def env(
    cluster: Cluster = None,
    overrides: Set = None,
    explain: Annotated[
        bool, Option("--explain", help="Add why each variable is set, the source, and which layer it is from.")
    ] = False,
    diff: Annotated[str | None, Option(metavar="OTHER", help="Only what differs from another profile.")] = None,
    lint: Annotated[
        bool, Option("--lint", help="Check the profile's variables and this shell's; exit code 5 on faults.")
    ] = False,
    json: Json = False,
) -> None:
    """Print a cluster's environment for RCCL or NCCL. Into a shell: `eval "$(zslurm cluster env)"`.

    Example: zslurm cluster env --cluster mi300x-pollara --explain
    """
    name = cluster or default_name()
    section, settings = settings_of(name, overrides or [])
    if lint:
        _lint(settings, section, as_json=json)
        return
    shown = [setting for setting in settings if not is_secret(setting)]
    if diff is not None:
        values = {setting.name: setting.value for setting in shown}
        theirs = {s.name: s.value for s in settings_of(diff, overrides or [])[1] if not is_secret(s)}
        differing = [key for key in sorted({*values, *theirs}) if values.get(key) != theirs.get(key)]
        if json:
            print_json({key: {name: values.get(key), diff: theirs.get(key)} for key in differing})
        else:
            rows = [[key, values.get(key, "-"), theirs.get(key, "-")] for key in differing]
            print_table(["variable", Column(name, "text"), Column(diff, "text")], rows)
        return
    for setting in settings:
        if setting not in shown:
            say(f"note: {setting.name} is left out: it looks like a secret")
    if json:
        variables = section.measured.variables
        print_json(
            [
                asdict(shown_setting)
                | {
                    "measured": variables[shown_setting.name].model_dump()
                    if shown_setting.name in variables
                    else None
                }
                for shown_setting in shown
            ]
        )
        return
    for setting in shown:
        if explain:
            source = [f"source: {setting.source}"] if setting.source else []
            _print_comment(setting.reason, *source, f"origin: {setting.origin}", *_measured(setting, section))
        print(f"export {setting.name}={quote(setting.value)}")
    for rule in rccl.left_out(section) if explain else ():
        _print_comment(f"left out: {rule.line}")


def _measured(setting: Setting, section: ClusterSection) -> list[str]:
    """Return in a line what `zslurm bench collectives --env` measured of a variable here, if it did."""
    variable = section.measured.variables.get(setting.name)
    if variable is None:
        return []
    others = ", ".join(f"{ratio:.2f} times that of {value}" for value, ratio in variable.others.items())
    where = f"measured here {variable.date[:10]}: the bandwidth of {variable.best} is {others}"
    if setting.value in variable.others:
        where += f"; this value is the slower one: set cluster.env.{setting.name}"
    return [where]


def _print_comment(*lines: str) -> None:
    """Print comments of the shell, the first line less indented than the others."""
    for number, line in enumerate(lines):
        text = "".join(c if c.isprintable() else "?" for c in line)
        first = "#   " if number else "# "
        for wrapped in textwrap.wrap(
            text, _WIDTH, initial_indent=first, subsequent_indent="#     ", break_on_hyphens=False
        ):
            print(wrapped)


def _lint(settings: Sequence[Setting], cluster: ClusterSection, *, as_json: bool) -> None:
    """Check a profile's variables and, over them, the shell's, and which of these a job replaces.

    Raises:
        CheckFailed: there are faults; one line for each.
    """
    job = {setting.name: setting.value for setting in settings}
    variables = {**job, **os.environ}
    findings = lint(variables, cluster, read_conf(variables, cluster, sysroot()))
    listed = {finding.name for finding in findings}
    findings += [finding for finding in overridden(os.environ, job) if finding.name not in listed]
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            if finding.level != "fault":
                say(f"{finding.level}: {finding.line}")
    if faults := [finding.line for finding in findings if finding.level == "fault"]:
        raise CheckFailed("\n".join(faults))
