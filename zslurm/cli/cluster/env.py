"""`zslurm cluster env`: the variables of RCCL and NCCL for a shell, a person and a program."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

from typer import Option

from zslurm.api.environment import is_secret, settings_of
from zslurm.cli.options import Cluster, Json, Set
from zslurm.cli.terminal.table import Column, print_table
from zslurm.cluster.profile import default_name
from zslurm.cluster.rccl import environment as rccl
from zslurm.cluster.rccl.conf_files import read_conf
from zslurm.cluster.rccl.environment import Setting
from zslurm.cluster.rccl.lint import lint, overridden
from zslurm.config.spec import ClusterSection
from zslurm.core.console import print_json, say
from zslurm.core.errors import CheckFailed
from zslurm.core.quoting import quote
from zslurm.hardware.sysfs import sysroot

_WIDTH = 110


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
