"""`zslurm submit`."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from zslurm.cli.dry_run import describe
from zslurm.cli.follow import follow
from zslurm.cli.options import Cluster, Json, RunFile, Set
from zslurm.cli.submit_sweep import show_sweep, submit_sweep
from zslurm.core.console import print_json, say
from zslurm.run.checkpoints import find_checkpoint
from zslurm.submit.options import dependency, flag_settings, sbatch_flags, slurm_settings
from zslurm.submit.resolve import resolve_run
from zslurm.submit.submit import submit as submit_run
from zslurm.submit.sweep import members


def submit(
    run_file: RunFile,
    sbatch_options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- SBATCH_OPTION...]", help="Any other long option of sbatch, behind `--`."),
    ] = None,
    cluster: Cluster = None,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="Nodes of the job.")] = None,
    spares: Annotated[
        int | None, typer.Option("--spares", min=0, help="Nodes on top, for when one fails; the job outlives it.")
    ] = None,
    time: Annotated[
        str | None, typer.Option("--time", metavar="TIME", help="Time limit: 24:00:00, 2-12, or minutes.")
    ] = None,
    partition: Annotated[str | None, typer.Option("--partition", metavar="NAME", help="Partition.")] = None,
    account: Annotated[str | None, typer.Option("--account", metavar="NAME", help="Account to charge.")] = None,
    qos: Annotated[str | None, typer.Option("--qos", metavar="NAME", help="Quality of service.")] = None,
    reservation: Annotated[
        str | None, typer.Option("--reservation", metavar="NAME", help="Reservation to run in.")
    ] = None,
    exclude: Annotated[
        str | None, typer.Option("--exclude", metavar="NODES", help="Nodes that must not be used: node[3,7-9].")
    ] = None,
    after: Annotated[
        list[str] | None,
        typer.Option(
            "--after",
            metavar="[TYPE:]JOB",
            help="Start when this job or run has succeeded, or as TYPE says: afterany, ... (repeatable).",
        ),
    ] = None,
    overrides: Set = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep", metavar="KEY=A,B,...", help="A run for each value; several give every combination."
        ),
    ] = None,
    sweep_file: Annotated[
        Path | None,
        typer.Option("--sweep-file", metavar="FILE", help="A run for each line KEY=VALUE KEY=VALUE ..."),
    ] = None,
    at_once: Annotated[
        int | None, typer.Option("--at-once", metavar="N", min=1, help="Members of a sweep that run side by side.")
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", metavar="CKPT", help="Go on from this checkpoint, and no other."),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option("--profile", metavar="FIRST:LAST", help="Trace these steps of rank 0; see docs/metrics.md."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show script, environment, placement, memory, start; submit nothing."),
    ] = False,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait", help="Stay and show progress. Ctrl-C stops a local run, detaches from a Slurm job."
        ),
    ] = False,
    new: Annotated[
        bool, typer.Option("--new", help="Start over: an existing run of this name is moved aside.")
    ] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print just the job id.")] = False,
    json: Json = False,
) -> None:
    """Submit a run, or continue it.

    Example: zslurm submit run.yaml --nodes 4 --set phases[0].lr=3e-4
    """
    settings = [
        *(overrides or []),
        *slurm_settings(nodes=nodes, spares=spares, time=time, partition=partition, account=account, qos=qos),
        *slurm_settings(exclude=exclude),
    ]
    flags = sbatch_flags(sbatch_options or [])
    flags |= {"reservation": reservation} if reservation is not None else {}
    waits_for = dependency(after or [])
    flags |= {"dependency": waits_for} if waits_for is not None else {}
    settings += flag_settings(flags)
    if checkpoint is not None:
        settings.append(f"checkpoint.resume_from={dumps(str(find_checkpoint(checkpoint).absolute()))}")
    settings += [f"metrics.profile={profile}"] if profile is not None else []
    if sweep or sweep_file is not None:
        if wait:
            raise typer.BadParameter("--wait follows one run; `zslurm status` shows a sweep's")
        outcomes = submit_sweep(
            members(sweep or [], sweep_file),
            lambda more: resolve_run(run_file, cluster=cluster, overrides=[*settings, *more]).spec,
            at_once=at_once,
            new=new,
            dry_run=dry_run,
        )
        show_sweep(outcomes, quiet=quiet, as_json=json)
        return
    if at_once is not None:
        raise typer.BadParameter("--at-once limits a sweep; there is no --sweep here")
    resolved = resolve_run(run_file, cluster=cluster, overrides=settings)
    if dry_run:
        print(describe(resolved, as_json=json), end="")
        return

    done = submit_run(resolved.spec, new=new)
    if quiet:
        print(done.job_id)
    elif json:
        print_json({"job_id": done.job_id, "run_dir": str(done.run.path), "continued": done.continued})
    else:
        for line in done.changed:
            say(f"changed: {line}")
        for line in done.notes:
            say(f"note: {line}")
        what = "continued" if done.continued else "submitted"
        say(f"{what} {done.run.name} as job {done.job_id}; run directory {done.run.path}")
        if not wait:
            say(f"follow it with: zslurm logs -f {done.run.name}    state: zslurm status {done.run.name}")
    if wait:
        raise typer.Exit(follow(done.run, done.job_id))
