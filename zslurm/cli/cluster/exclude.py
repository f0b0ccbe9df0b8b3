"""`zslurm cluster exclude`: the nodes that runs do not use any more, and how to take them back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from zslurm.cli.options import Json, Run, SomeRuns
from zslurm.cli.terminal.table import Column, print_table
from zslurm.core.console import print_json, say
from zslurm.core.errors import NotFound, ZslurmError
from zslurm.core.units import show_time
from zslurm.run.exclusions import Exclusion, active_exclusions, read_exclusions
from zslurm.run.find import find_all, find_to_change
from zslurm.run.index import known_runs
from zslurm.run.run_dir import RunDir
from zslurm.run.state.run_state import RunState, look_all
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.hostlist import compress, expand
from zslurm.slurm.run_command import Retries
from zslurm.submit.control import readmit
from zslurm.submit.group_exclusions import readmit_for_group

app = typer.Typer(help="Nodes that runs do not use any more: list them, allow them again.", no_args_is_help=True)

_COLUMNS = (
    Column("nodes", most=40),
    Column("run"),
    Column("by", drop=1),
    Column("until", drop=2),
    Column("why", "text"),
)


@dataclass(frozen=True)
class Excluded:
    """Nodes that a run does not use.

    Attributes:
        nodes: a hostlist.
        by: `Aegis`, `group` for those that another run of the group found, or `job` for those on the list of the
            run's job in Slurm.
        since: when Aegis excluded them (UNIX seconds).
        until: when it will use them again.
    """

    nodes: str
    run: str
    by: str
    since: float | None
    until: float | None
    reason: str


@app.command("ls")
def list_(runs: SomeRuns = None, json: Json = False) -> None:
    """List the nodes that runs do not use, and why.

    Example: zslurm cluster exclude ls
    """
    exclusions = [
        exclusion
        for state in look_all(find_all(runs) if runs else known_runs(), cached=True)
        for exclusion in excluded_nodes(state)
    ]
    if json:
        print_json([asdict(exclusion) for exclusion in exclusions])
    elif exclusions:
        rows = [
            [
                exclusion.nodes,
                exclusion.run,
                exclusion.by,
                show_time(exclusion.until) if exclusion.until else "-",
                exclusion.reason,
            ]
            for exclusion in exclusions
        ]
        print_table(_COLUMNS, rows)
    else:
        say("no run excludes a node")


def excluded_nodes(state: RunState) -> Iterator[Excluded]:
    """Yield the nodes that Aegis excludes from a run now, and those that are on the list of its job besides."""
    run = state.run
    by_aegis: set[str] = set()
    groups: dict[Exclusion, list[str]] = {}
    for node, exclusion in active_exclusions(read_exclusions(run), time.time()).items():
        by_aegis.add(node)
        groups.setdefault(exclusion, []).append(node)
    for exclusion, nodes in groups.items():
        by = "group" if exclusion.shared else "Aegis"
        yield Excluded(compress(nodes), run.name, by, exclusion.since, exclusion.expires, exclusion.reason)
    if listed := sorted(_on_list_of_job(state) - by_aegis):
        yield Excluded(compress(listed), run.name, "job", None, None, "slurm.exclude, or requeue --exclude")


def _on_list_of_job(state: RunState) -> set[str]:
    """Ask Slurm for the nodes that an active job must not use; none if it does not answer."""
    if not state.active or state.launcher != "slurm" or state.as_of is not None:
        return set()
    try:
        return set(expand(SlurmClient(retries=Retries(attempts=1)).excluded_nodes(state.job_id or "")))
    except ZslurmError:
        return set()


@app.command()
def rm(
    run: Run,
    nodes: Annotated[str, typer.Argument(metavar="NODES", help="A hostlist: node[3,7].")],
    group: Annotated[
        bool, typer.Option("--group", help="For every run of the group as well (cluster.exclusions).")
    ] = False,
) -> None:
    """Let a run use excluded nodes again.

    From its next attempt on; of a job that waits in the queue the list is changed as well.

    Example: zslurm cluster exclude rm my-run node[3,7]
    """
    run_dir: RunDir = find_to_change(run, "cluster exclude rm")
    removed = readmit_for_group(run_dir, nodes) if group else []
    try:
        say(f"{run_dir.name} may use {compress(readmit(run_dir, nodes))} again")
    except NotFound:
        if not removed:
            raise
    if removed:
        say(f"no run of the group excludes {compress(removed)} any more")
