"""`zslurm plan memory|io`."""

from __future__ import annotations

from typing import Annotated

import typer

from zslurm.cli.options import Cluster, Json, RunFile, Set

app = typer.Typer(help="What a run will take, before it is submitted.", no_args_is_help=True)


@app.command()
def memory(
    run_file: RunFile,
    cluster: Cluster = None,
    dp: Annotated[
        list[int] | None,
        typer.Option("--dp", metavar="RANKS", min=1, help="Number of ranks (repeatable); default: the run's own."),
    ] = None,
    overrides: Set = None,
    json: Json = False,
) -> None:
    """Say what each rank's memory will hold, and how evenly matrices are divided.

    Example: zslurm plan memory run.yaml --dp 8 --dp 1024
    """
    from zslurm.report.plan import show_memory
    from zslurm.submit.resolve import resolve_run

    spec = resolve_run(run_file, cluster=cluster, overrides=overrides or []).spec
    show_memory(spec, dp or [spec.world_size], as_json=json)


@app.command()
def io(
    run_file: RunFile,
    step_time: Annotated[
        float,
        typer.Option("--step-time", metavar="SECONDS", min=1e-6, max=1e9, help="Time of one optimizer step."),
    ],
    cluster: Cluster = None,
    budget: Annotated[
        float,
        typer.Option("--iops", metavar="IOPS", min=1, max=1e12, help="Pages a second that the storage gives."),
    ] = 70_000,
    overrides: Set = None,
    json: Json = False,
) -> None:
    """Say what a run will ask of its storage: pages a second, and the bytes of checkpoints.

    Example: zslurm plan io run.yaml --step-time 2.5
    """
    from zslurm.report.plan_io import show_io
    from zslurm.submit.resolve import resolve_run

    spec = resolve_run(run_file, cluster=cluster, overrides=overrides or []).spec
    show_io(spec, step_time=step_time, budget=budget, as_json=json)
