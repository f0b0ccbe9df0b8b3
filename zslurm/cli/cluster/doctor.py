"""`zslurm doctor`: what the checks found, as a table for people and as a list of nodes for `--exclude`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from typer import Option

from zslurm.checkpoint_tools.quantities import counted
from zslurm.cli.options import Cluster, Json, complete_checks
from zslurm.cli.terminal.table import Column, print_table
from zslurm.core import log
from zslurm.core.console import print_json, say
from zslurm.core.errors import ConfigError
from zslurm.doctor.check import Status, all_checks, chosen_checks
from zslurm.doctor.report import LOGIN, CheckResult, DoctorReport
from zslurm.doctor.run_checks import ANSWER, STATE, Wanted, run_doctor, site_to_check
from zslurm.slurm.hostlist import compress, expand

_MOST_REASONS = 4
_MOST_LEFT_ALONE = 3
_Key = TypeVar("_Key")

COLUMNS = (
    Column("check"),
    Column("status", "state"),
    Column("nodes", drop=2),
    Column("where", drop=1, most=28),
    Column("what", "text"),
)


def doctor(
    cluster: Cluster = None,
    nodes: Annotated[int | None, Option(metavar="N", min=1, help="Check N nodes of Slurm's choice.")] = None,
    nodelist: Annotated[
        str | None, Option(metavar="LIST", help="Check these nodes; default: all that are idle.")
    ] = None,
    only: Annotated[
        list[str] | None,
        Option(metavar="CHECK", help="Run only this check (repeatable).", autocompletion=complete_checks),
    ] = None,
    skip: Annotated[
        list[str] | None,
        Option(metavar="CHECK", help="Leave this check out (repeatable).", autocompletion=complete_checks),
    ] = None,
    directory: Annotated[Path, Option(metavar="DIR", help="Where runs are written; shared by all nodes.")] = Path(
        "runs"
    ),
    path: Annotated[
        list[Path] | None, Option(metavar="DIR", help="A further directory whose mount is checked (repeatable).")
    ] = None,
    timeout: Annotated[float, Option(metavar="SECONDS", min=1, help="For the nodes, queueing included.")] = 300.0,
    list_checks: Annotated[bool, Option("--list", help="List the checks, and run none.")] = False,
    quiet: Annotated[bool, Option("-q", "--quiet", help="Print just the failing nodes, for --exclude.")] = False,
    json: Json = False,
) -> None:
    """Check this machine and the nodes. GPUs, network, limits, software and storage are checked.

    Example: zslurm doctor --nodelist node[0-3]
    """
    if list_checks:
        _list_checks(as_json=json)
        return
    if nodes is not None and nodelist is not None:
        raise ConfigError("--nodes and --nodelist exclude each other")
    if nodelist is not None and not expand(nodelist):
        raise ConfigError("--nodelist: names no node")
    wanted_checks = Wanted(
        checks=chosen_checks(only or [], skip or []),
        count=nodes,
        nodelist=nodelist,
        directory=directory,
        paths=tuple(path or []),
        timeout_s=timeout,
    )
    try:
        log.set_up()
        with log.detailed("zslurm.slurm.run_command"):  # why it takes so long
            report = run_doctor(site_to_check(cluster), wanted_checks)
    except KeyboardInterrupt:  # the job is cancelled by now
        raise typer.Abort from None
    unchecked = [f"the nodes were not checked: {report.slurm_error}"] if report.slurm_error else []
    if json:
        print_json(report.as_json())
    elif quiet:
        if report.exclude:
            print(report.exclude)
        for line in unchecked:
            say(line)
    else:
        print_table(COLUMNS, table(report))
        for line in (*remedies(report), *unchecked, *left_alone(report), summary(report)):
            say(line)
        if report.exclude:
            print(f"exclude\t{report.exclude}")
    raise typer.Exit(report.exit_code)


def _list_checks(*, as_json: bool) -> None:
    if as_json:
        names = {"check": "name"} | {key: key for key in ("group", "where", "about", "on_request")}
        print_json([{key: getattr(check, name) for key, name in names.items()} for check in all_checks()])
        return
    rows = [
        [check.name, check.group, check.where, check.about + (" (with --only)" if check.on_request else "")]
        for check in all_checks()
    ]
    print_table(["check", Column("group", drop=1), Column("where", drop=2), Column("what", "text")], rows)


def table(report: DoctorReport) -> list[list[str]]:
    """Return a row for each check and status; several if nodes differ, but not too many."""
    names = [STATE, ANSWER, *(check.name for check in report.checks)]
    rows = []
    for name in names:
        of_check = [result for result in report.results if result.check == name]
        for status in sorted({result.outcome.status for result in of_check}, key=lambda s: -s.rank):
            rows += _rows(name, status, [result for result in of_check if result.outcome.status is status])
    return rows


def _rows(name: str, status: Status, results: list[CheckResult]) -> list[list[str]]:
    by_reason = _grouped((result.outcome.reason, result.node) for result in results)
    if len(by_reason) > (_MOST_REASONS if status is not Status.PASS else 1):
        # What passes differs in its numbers only; of many different faults the first is the example.
        first = next(iter(by_reason))
        nodes = list(dict.fromkeys(result.node for result in results))
        by_reason = {f"e.g. {first}" if status is not Status.PASS else f"such as: {first}": nodes}
    return [[name, status, str(len(nodes)), _where(nodes), reason] for reason, nodes in by_reason.items()]


def _grouped(pairs: Iterable[tuple[_Key, str]]) -> dict[_Key, list[str]]:
    """Return the values of each key, the keys in the order of their first values."""
    groups: dict[_Key, list[str]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def _where(nodes: Iterable[str]) -> str:
    nodes = list(dict.fromkeys(nodes))
    listed = compress(node for node in nodes if node != LOGIN)
    return ", ".join(word for word in (LOGIN if LOGIN in nodes else "", listed) if word)


def remedies(report: DoctorReport) -> list[str]:
    """Return what to do about what failed or warned, a line for each check and remedy."""
    by_remedy = _grouped(
        ((result.check, result.outcome.remedy), result.node)
        for result in report.results
        if result.outcome.remedy and result.outcome.status in (Status.FAIL, Status.WARN)
    )
    return [f"{check} on {_where(nodes)}: {remedy}" for (check, remedy), nodes in by_remedy.items()]


def left_alone(report: DoctorReport) -> list[str]:
    """Return a line for each reason for which nodes were not asked."""
    by_reason = _grouped((reason, node) for node, reason in report.not_asked.items())
    lines = [f"not asked: {compress(nodes)}: {reason}" for reason, nodes in by_reason.items()]
    shown, more = lines[:_MOST_LEFT_ALONE], len(lines) - _MOST_LEFT_ALONE
    if more > 0:
        shown.append(f"and {counted(more, 'more group', 'more groups')} of nodes (--json has all)")
    return shown


def summary(report: DoctorReport) -> str:
    """Return in one line how many nodes were checked, and how they are."""
    if not report.asked:
        return f"this machine: {report.worst} ({report.took_s:.1f} s)"
    bad, nodes = len(report.failing), counted(len(report.asked), "node")
    outcome = f"{bad} of {nodes} {'fails' if bad == 1 else 'fail'}" if bad else f"{nodes}: no failure"
    return f"{outcome} ({report.took_s:.1f} s)"
