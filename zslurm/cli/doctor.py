"""`zslurm doctor`: what was found, as a table for people and as a list of nodes for `--exclude`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from zslurm.checkpoint_tools.quantities import counted
from zslurm.cli.options import Cluster, Json
from zslurm.core.console import print_json, print_table, say
from zslurm.core.errors import ConfigError
from zslurm.doctor.check import Check, Status, all_checks, chosen_checks
from zslurm.doctor.report import LOGIN, Report, Result
from zslurm.doctor.run_checks import ANSWER, STATE, Wanted, run_doctor, site_to_check
from zslurm.slurm.hostlist import compress, expand


def doctor(
    cluster: Cluster = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", metavar="N", min=1, help="Check N nodes of Slurm's choice.")
    ] = None,
    nodelist: Annotated[
        str | None,
        typer.Option("--nodelist", metavar="LIST", help="Check these nodes; default: all that are idle."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="CHECK", help="Run only this check (repeatable).")
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option("--skip", metavar="CHECK", help="Leave this check out (repeatable).")
    ] = None,
    benchmark: Annotated[
        bool, typer.Option("--benchmark", help="Measure the GPUs too: matrix product, memory, all-reduce.")
    ] = False,
    directory: Annotated[
        Path, typer.Option("--directory", metavar="DIR", help="Where runs are written; shared by all nodes.")
    ] = Path("runs"),
    path: Annotated[
        list[Path] | None,
        typer.Option("--path", metavar="DIR", help="A further directory whose mount is checked (repeatable)."),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=1, help="For the nodes, queueing included.")
    ] = 300.0,
    list_checks: Annotated[bool, typer.Option("--list", help="List the checks, and run none.")] = False,
    quiet: Annotated[
        bool, typer.Option("-q", "--quiet", help="Print just the failing nodes, for --exclude.")
    ] = False,
    json: Json = False,
) -> None:
    """Check this machine and the nodes: GPUs, network, limits, software, storage.

    Example: zslurm doctor --nodelist node[0-3]
    """
    if list_checks:
        show_checks(all_checks(), as_json=json)
        return
    if nodes is not None and nodelist is not None:
        raise ConfigError("--nodes and --nodelist exclude each other")
    if nodelist is not None and not expand(nodelist):
        raise ConfigError("--nodelist: names no node")

    wanted = Wanted(
        checks=chosen_checks(only or [], skip or [], benchmark=benchmark),
        count=nodes,
        nodelist=nodelist,
        directory=directory,
        paths=tuple(path or []),
        timeout_s=timeout,
    )
    try:
        report = run_doctor(site_to_check(cluster), wanted, say)
    except KeyboardInterrupt:  # the job is cancelled by now
        raise typer.Abort from None
    if json:
        print_json(report.as_json())
    elif quiet:
        if report.exclude:
            print(report.exclude)
        if report.slurm_error:
            say(f"the nodes were not checked: {report.slurm_error}")
    else:
        show_report(report)
    raise typer.Exit(report.exit_code)


COLUMNS = ("check", "status", "nodes", "where", "what")
_MOST_REASONS = 4
_MOST_LEFT_ALONE = 3


def show_checks(checks: Iterable[Check], *, as_json: bool = False) -> None:
    """`zslurm doctor --list`."""
    if as_json:
        print_json(
            [
                {"check": c.name, "group": c.group, "where": c.where, "about": c.about, "on_request": c.on_request}
                for c in checks
            ]
        )
        return
    rows = [
        [check.name, check.group, check.where, check.about + (" (with --benchmark)" if check.on_request else "")]
        for check in checks
    ]
    print_table(["check", "group", "where", "what"], rows)


def show_report(report: Report) -> None:
    """The table, what to do, and the nodes to exclude."""
    print_table(COLUMNS, table(report))
    for line in remedies(report):
        say(line)
    if report.slurm_error:
        say(f"the nodes were not checked: {report.slurm_error}")
    for line in left_alone(report):
        say(line)
    say(summary(report))
    if report.exclude:
        print(f"exclude\t{report.exclude}")


def table(report: Report) -> list[list[str]]:
    """A row for each check and status; several where nodes have different things to say, but not too many."""
    names = [STATE, ANSWER, *(check.name for check in report.checks)]
    rows = []
    for name in names:
        of_check = [result for result in report.results if result.check == name]
        for status in sorted({result.outcome.status for result in of_check}, key=lambda s: -s.rank):
            rows += _rows(name, status, [result for result in of_check if result.outcome.status is status])
    return rows


def _rows(name: str, status: Status, results: list[Result]) -> list[list[str]]:
    by_reason: dict[str, list[str]] = {}
    for result in results:
        by_reason.setdefault(result.outcome.reason, []).append(result.node)
    if len(by_reason) > (_MOST_REASONS if status is not Status.PASS else 1):
        # What passes differs in its numbers only; of many different faults the first stands for all.
        first = next(iter(by_reason))
        nodes = list(dict.fromkeys(result.node for result in results))
        by_reason = {f"e.g. {first}" if status is not Status.PASS else f"such as: {first}": nodes}
    return [[name, status, str(len(nodes)), _where(nodes), reason] for reason, nodes in by_reason.items()]


def _where(nodes: Iterable[str]) -> str:
    nodes = list(dict.fromkeys(nodes))
    listed = compress(node for node in nodes if node != LOGIN)
    return ", ".join(part for part in (LOGIN if LOGIN in nodes else "", listed) if part)


def remedies(report: Report) -> list[str]:
    """What to do about what failed or warned, a line for each check and remedy."""
    found: dict[tuple[str, str], list[str]] = {}
    for result in report.results:
        if result.outcome.remedy and result.outcome.status in (Status.FAIL, Status.WARN):
            found.setdefault((result.check, result.outcome.remedy), []).append(result.node)
    return [f"{check} on {_where(nodes)}: {remedy}" for (check, remedy), nodes in found.items()]


def left_alone(report: Report) -> list[str]:
    """Nodes that were not asked."""
    by_reason: dict[str, list[str]] = {}
    for node, reason in report.not_asked.items():
        by_reason.setdefault(reason, []).append(node)
    lines = [f"not asked: {compress(nodes)}: {reason}" for reason, nodes in by_reason.items()]
    more = len(lines) - _MOST_LEFT_ALONE
    return [
        *lines[:_MOST_LEFT_ALONE],
        *([f"and {counted(more, 'more group', 'more groups')} of nodes (--json has all)"] if more > 0 else []),
    ]


def summary(report: Report) -> str:
    """One line: how many nodes, and how they are."""
    if not report.asked:
        return f"this machine: {report.worst} ({report.took_s:.1f} s)"
    bad = len(report.failing)
    shown = (
        f"{bad} of {counted(len(report.asked), 'node')} {'fails' if bad == 1 else 'fail'}"
        if bad
        else f"{counted(len(report.asked), 'node')}: no failure"
    )
    return f"{shown} ({report.took_s:.1f} s)"
