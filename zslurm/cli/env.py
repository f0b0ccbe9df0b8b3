"""`zslurm env`: the variables of RCCL and NCCL as a shell, a person and a program read them."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from zslurm.cli.options import Cluster, Json, Set
from zslurm.cluster.profile import default_name
from zslurm.cluster.rccl.conf_files import read_conf
from zslurm.cluster.rccl.environment import LeftOut, Setting, environment, left_out
from zslurm.cluster.rccl.lint import lint, overridden
from zslurm.cluster.site import resolve_profile
from zslurm.config.spec import ClusterSection
from zslurm.core.console import print_json, print_table, say
from zslurm.core.errors import CheckFailed
from zslurm.core.quoting import quote
from zslurm.core.redact import redact_value
from zslurm.hardware.sysfs import sysroot


def env(
    cluster: Cluster = None,
    overrides: Set = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say why each variable is set, who says so, and where it came from.")
    ] = False,
    diff: Annotated[
        str | None, typer.Option("--diff", metavar="OTHER", help="Only what differs from another profile.")
    ] = None,
    lint: Annotated[
        bool,
        typer.Option("--lint", help="Judge the profile's variables and this shell's; exit code 5 on faults."),
    ] = False,
    json: Json = False,
) -> None:
    """Print the environment of RCCL or NCCL on a cluster, for `eval "$(zslurm env)"`.

    Example: zslurm env --cluster mi300x-pollara --explain
    """
    name = cluster or default_name()
    resolved = resolve_profile(name, overrides or [])
    settings = environment(resolved.spec.cluster, resolved.origin_of_variable)
    if lint:
        show_lint(settings, os.environ, resolved.spec.cluster, as_json=json)
    elif diff is not None:
        other = resolve_profile(diff, overrides or [])
        others = environment(other.spec.cluster, other.origin_of_variable)
        show_difference(name, settings, diff, others, as_json=json)
    else:
        show_environment(settings, left_out(resolved.spec.cluster), explain=explain, as_json=json)


_WIDTH = 110


def show_environment(
    settings: Sequence[Setting], missing: Sequence[LeftOut], *, explain: bool, as_json: bool
) -> None:
    """Print `export` lines, with reasons as comments where asked for; secrets of cluster.env are left out.

    Args:
        settings: the variables.
        missing: rules that the profile leaves out, which `explain` lists.
        explain: with reasons, as comments.
        as_json: as JSON instead of shell lines.
    """
    for setting in settings:
        if _is_secret(setting):
            say(f"note: {setting.name} is left out: it looks like a secret")
    settings = [setting for setting in settings if not _is_secret(setting)]
    if as_json:
        print_json([asdict(setting) for setting in settings])
        return
    for setting in settings:
        if explain:
            for line in _comment(setting):
                print(line)
        print(f"export {setting.name}={quote(setting.value)}")
    for rule in missing if explain else ():
        for line in _wrapped([f"left out: {rule.line}"]):
            print(line)


def _is_secret(setting: Setting) -> bool:
    return bool(redact_value(setting.name, setting.value) != setting.value)


def _comment(setting: Setting) -> list[str]:
    source = [f"source: {setting.source}"] if setting.source else []
    return _wrapped([setting.reason, *source, f"origin: {setting.origin}"])


def _wrapped(lines: Sequence[str]) -> list[str]:
    """Comments of the shell, the first line less indented than the others."""
    wrapped = []
    for number, line in enumerate(lines):
        text = "".join(c if c.isprintable() else "?" for c in line)
        first = "# " if number == 0 else "#   "
        wrapped += textwrap.wrap(
            text, _WIDTH, initial_indent=first, subsequent_indent="#     ", break_on_hyphens=False
        )
    return wrapped


def show_difference(
    name: str, settings: Sequence[Setting], other: str, others: Sequence[Setting], *, as_json: bool
) -> None:
    """The variables in which two profiles differ."""
    ours = {setting.name: setting.value for setting in settings if not _is_secret(setting)}
    theirs = {setting.name: setting.value for setting in others if not _is_secret(setting)}
    differing = [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]
    if as_json:
        print_json({key: {name: ours.get(key), other: theirs.get(key)} for key in differing})
    else:
        rows = [[key, ours.get(key, "-"), theirs.get(key, "-")] for key in differing]
        print_table(["variable", name, other], rows)


def show_lint(
    settings: Sequence[Setting], shell: Mapping[str, str], cluster: ClusterSection, *, as_json: bool
) -> None:
    """What is wrong with a profile's variables and, over them, the shell's; and which of these a job replaces.

    Raises:
        CheckFailed: there are faults; one line for each.
    """
    job = {setting.name: setting.value for setting in settings}
    given = {**job, **shell}
    findings = lint(given, cluster, read_conf(given, cluster, sysroot()))
    listed = {finding.name for finding in findings}
    findings += [finding for finding in overridden(shell, job) if finding.name not in listed]
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            if finding.level != "fault":
                say(f"{finding.level}: {finding.line}")
    if faults := [finding.line for finding in findings if finding.level == "fault"]:
        raise CheckFailed("\n".join(faults))
