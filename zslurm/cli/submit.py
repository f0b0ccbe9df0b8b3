"""`zslurm submit`."""

from __future__ import annotations

from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from zslurm.cli.dry_run import describe
from zslurm.cli.follow import follow
from zslurm.cli.options import Cluster, Json, RunFile, Set, command_of
from zslurm.cli.submit_sweep import show_sweep, submit_sweep
from zslurm.core.console import print_json, say
from zslurm.run.checkpoints import find_checkpoint
from zslurm.submit.options import dependency, flag_settings, sbatch_flags, slurm_settings
from zslurm.submit.resolve import resolve_run
from zslurm.submit.submit import Submission
from zslurm.submit.submit import submit as submit_run
from zslurm.submit.sweep import members


@dataclass(frozen=True)
class SubmitOptions:
    """What `zslurm submit` takes on its command line."""

    run_file: RunFile
    sbatch_options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- SBATCH_OPTION...]", help="Any other long option of sbatch, behind `--`."),
    ] = None
    cluster: Cluster = None
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="Nodes of the job.")] = None
    spares: Annotated[
        int | None, typer.Option("--spares", min=0, help="Nodes on top, for when one fails; the job outlives it.")
    ] = None
    time: Annotated[
        str | None, typer.Option("--time", metavar="TIME", help="Time limit: 24:00:00, 2-12, or minutes.")
    ] = None
    partition: Annotated[str | None, typer.Option("--partition", metavar="NAME", help="Partition.")] = None
    account: Annotated[str | None, typer.Option("--account", metavar="NAME", help="Account to charge.")] = None
    qos: Annotated[str | None, typer.Option("--qos", metavar="NAME", help="Quality of service.")] = None
    reservation: Annotated[
        str | None, typer.Option("--reservation", metavar="NAME", help="Reservation to run in.")
    ] = None
    exclude: Annotated[
        str | None, typer.Option("--exclude", metavar="NODES", help="Nodes that must not be used: node[3,7-9].")
    ] = None
    dependency: Annotated[
        list[str] | None,
        typer.Option(
            "--dependency",
            metavar="[TYPE:]JOB",
            help="Start when this job or run has succeeded, or as TYPE says: afterany, ... (repeatable).",
        ),
    ] = None
    overrides: Set = None
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep", metavar="KEY=A,B,...", help="A run for each value; several give every combination."
        ),
    ] = None
    sweep_file: Annotated[
        Path | None,
        typer.Option("--sweep-file", metavar="FILE", help="A run for each line KEY=VALUE KEY=VALUE ..."),
    ] = None
    max_concurrent: Annotated[
        int | None,
        typer.Option("--max-concurrent", metavar="N", min=1, help="Members of a sweep that run side by side."),
    ] = None
    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", metavar="CKPT", help="Continue from this checkpoint, and no other."),
    ] = None
    profile: Annotated[
        str | None,
        typer.Option("--profile", metavar="FIRST:LAST", help="Trace these steps of rank 0; see docs/metrics.md."),
    ] = None
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show script, environment, placement, memory, start; submit nothing."),
    ] = False
    wait: Annotated[
        bool,
        typer.Option(
            "--wait", help="Stay and show progress. Ctrl-C stops a local run, detaches from a Slurm job."
        ),
    ] = False
    new: Annotated[
        bool, typer.Option("--new", help="Start over: an existing run of this name is moved aside.")
    ] = False
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print just the job id.")] = False
    json: Json = False

    def settings(self) -> list[str]:
        """Return the overrides of the run that these options are.

        Raises:
            ConfigError, NotFound: an option of sbatch, a dependency or the checkpoint is not valid.
        """
        flags = sbatch_flags(self.sbatch_options or [])
        if self.reservation is not None:
            flags["reservation"] = self.reservation
        if (waits_for := dependency(self.dependency or [])) is not None:
            flags["dependency"] = waits_for
        settings = [
            *(self.overrides or []),
            *slurm_settings(
                nodes=self.nodes,
                spares=self.spares,
                time=self.time,
                partition=self.partition,
                account=self.account,
                qos=self.qos,
                exclude=self.exclude,
            ),
            *flag_settings(flags),
        ]
        if self.checkpoint is not None:
            settings.append(f"checkpoint.resume_from={dumps(str(find_checkpoint(self.checkpoint).absolute()))}")
        return settings + ([f"metrics.profile={self.profile}"] if self.profile is not None else [])


def run_submit(options: SubmitOptions) -> None:
    """Submit a run, or continue it.

    Example: zslurm submit run.yaml --nodes 4 --set phases[0].lr=3e-4
    """
    if options.sweep or options.sweep_file is not None:
        _submit_sweep(options)
        return
    if options.max_concurrent is not None:
        raise typer.BadParameter("--max-concurrent limits a sweep; there is no --sweep here")
    resolved = resolve_run(options.run_file, cluster=options.cluster, overrides=options.settings())
    if options.dry_run:
        print(describe(resolved, new=options.new, as_json=options.json), end="")
        return
    done = submit_run(resolved.spec, new=options.new)
    _show(done, options)
    if options.wait:
        raise typer.Exit(follow(done.run, done.job_id))


submit = command_of(SubmitOptions, run_submit)


def _submit_sweep(options: SubmitOptions) -> None:
    if options.wait:
        raise typer.BadParameter("--wait follows one run; `zslurm status` shows a sweep's")
    settings = options.settings()
    outcomes = submit_sweep(
        members(options.sweep or [], options.sweep_file),
        lambda more: resolve_run(options.run_file, cluster=options.cluster, overrides=[*settings, *more]).spec,
        max_concurrent=options.max_concurrent,
        new=options.new,
        dry_run=options.dry_run,
    )
    show_sweep(outcomes, quiet=options.quiet, as_json=options.json)


def _show(done: Submission, options: SubmitOptions) -> None:
    if options.quiet:
        print(done.job_id)
        return
    if options.json:
        print_json({"job_id": done.job_id, "run_dir": str(done.run.path), "continued": done.continued})
        return
    for line in done.changed:
        say(f"changed: {line}")
    for line in done.notes:
        say(f"note: {line}")
    what = "continued" if done.continued else "submitted"
    say(f"{what} {done.run.name} as job {done.job_id}; run directory {done.run.path}")
    if not options.wait:
        say(f"follow it with: zslurm logs -f {done.run.name}    state: zslurm status {done.run.name}")
