"""`zslurm submit`."""

from __future__ import annotations

from typing import Annotated

import typer

from zslurm.cli.options import Cluster, Json, RunFile, Set


def submit(
    run_file: RunFile,
    cluster: Cluster = None,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="Nodes of the job.")] = None,
    overrides: Set = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the script and every value with its origin; submit nothing.")
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
    from zslurm.cli.output import print_json, say
    from zslurm.launch.resolve import resolve_run

    settings = [*(overrides or []), *([f"slurm.nodes={nodes}"] if nodes else [])]
    resolved = resolve_run(run_file, cluster=cluster, overrides=settings)
    if dry_run:
        from zslurm.report.dry_run import describe

        print(describe(resolved, as_json=json), end="")
        return
    from zslurm.launch.submission import submit as submit_run

    done = submit_run(resolved.spec, new=new)
    if quiet:
        print(done.job_id)
    elif json:
        print_json({"job_id": done.job_id, "run_dir": str(done.run.path), "continued": done.continued})
    else:
        for line in done.changed:
            say(f"changed: {line}")
        what = "continued" if done.continued else "submitted"
        say(f"{what} {done.run.name} as job {done.job_id}; run directory {done.run.path}")
        if not wait:
            say(f"follow it with: zslurm logs -f {done.run.name}    state: zslurm status {done.run.name}")
    if wait:
        from zslurm.report.follow import follow

        raise typer.Exit(follow(done.run, done.job_id))
