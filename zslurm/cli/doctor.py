"""`zslurm doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zslurm.cli.options import Cluster, Json


def doctor(
    cluster: Cluster = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", metavar="N", min=1, help="Examine N nodes of Slurm's choice.")
    ] = None,
    nodelist: Annotated[
        str | None,
        typer.Option("--nodelist", metavar="LIST", help="Examine these nodes; default: all that are idle."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="CHECK", help="Run only this check (repeatable).")
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option("--skip", metavar="CHECK", help="Leave this check out (repeatable).")
    ] = None,
    bars: Annotated[
        bool, typer.Option("--bars", help="Measure the GPUs too: matrix product, memory, all-reduce.")
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
    from zslurm.core.console import print_json, say
    from zslurm.core.errors import ConfigError
    from zslurm.doctor.check import all_checks, chosen_checks
    from zslurm.slurm.hostlist import expand

    if list_checks:
        from zslurm.report.doctor import show_checks

        show_checks(all_checks(), as_json=json)
        return
    if nodes is not None and nodelist is not None:
        raise ConfigError("--nodes and --nodelist exclude each other")
    if nodelist is not None and not expand(nodelist):
        raise ConfigError("--nodelist: names no node")
    from zslurm.doctor.run_checks import Wanted, examine
    from zslurm.doctor.site import site

    wanted = Wanted(
        checks=chosen_checks(only or [], skip or [], bars=bars),
        count=nodes,
        nodelist=nodelist,
        directory=directory,
        paths=tuple(path or []),
        timeout_s=timeout,
    )
    try:
        report = examine(site(cluster), wanted, say)
    except KeyboardInterrupt:  # the job is cancelled by now
        raise typer.Abort from None
    if json:
        print_json(report.as_json())
    elif quiet:
        if report.exclude:
            print(report.exclude)
        if report.slurm_error:
            say(f"the nodes were not examined: {report.slurm_error}")
    else:
        from zslurm.report.doctor import show_report

        show_report(report)
    raise typer.Exit(report.exit_code)
