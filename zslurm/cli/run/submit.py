"""`zslurm submit`: its options. What it does with them is in submission.py, which `--help` does not load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, BadParameter, Context, Option

from zslurm.cli.options import Cluster, Json, Set
from zslurm.slurm.sbatch_options import BY_NAME

PROGRAM = "zslurm.program"
"""The key of `Context.meta` that holds the words of a program after `--`, as a list."""


def of_sbatch(name: str, **more: Any) -> Any:
    """Return the option for one of sbatch, as the table of its options has it."""
    option = BY_NAME[name]
    return Option(*option.typed, metavar=option.metavar, help=option.help, **more)


def take_program(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the arguments of `submit` without the program after `--`, and the program's words.

    Options of sbatch after `--` remain arguments. A run file may come before the program or not, so the number of
    words does not show which of them are the program.
    """
    if "--" not in arguments:
        return arguments, []
    end = arguments.index("--")
    program = arguments[end + 1 :]
    if not program or program[0].startswith("-"):
        return arguments, []
    return arguments[:end], program


def submit(
    context: Context,
    run_file: Annotated[
        Path | None,
        Argument(
            metavar="[RUN_FILE]",
            help="The YAML run file, or the name of a recipe; may be left out before a program.",
        ),
    ] = None,
    sbatch_options: Annotated[
        list[str] | None,
        Argument(
            metavar="[-- PROGRAM...]", help="A program to run instead of the trainer; or long options of sbatch."
        ),
    ] = None,
    cluster: Cluster = None,
    nodes: Annotated[int | None, of_sbatch("nodes", min=1)] = None,
    spares: Annotated[
        int | None, Option(metavar="N", min=0, help="Nodes on top, for when one fails; the job outlives it.")
    ] = None,
    time: Annotated[str | None, of_sbatch("time")] = None,
    partition: Annotated[str | None, of_sbatch("partition")] = None,
    account: Annotated[str | None, of_sbatch("account")] = None,
    qos: Annotated[str | None, of_sbatch("qos")] = None,
    reservation: Annotated[str | None, of_sbatch("reservation")] = None,
    nodelist: Annotated[str | None, of_sbatch("nodelist")] = None,
    exclude: Annotated[str | None, of_sbatch("exclude")] = None,
    name: Annotated[str | None, of_sbatch("job-name")] = None,
    dependency: Annotated[
        list[str] | None,
        Option(
            metavar="[TYPE:]JOB",
            help="Start when this job or run has succeeded, or by another TYPE: afterany, ... (repeatable).",
        ),
    ] = None,
    overrides: Set = None,
    sweep: Annotated[
        list[str] | None,
        Option(metavar="KEY=A,B,...", help="A run for each value; several give every combination."),
    ] = None,
    sweep_file: Annotated[
        Path | None, Option(metavar="FILE", help="A run for each line KEY=VALUE KEY=VALUE ...")
    ] = None,
    max_concurrent: Annotated[
        int | None, Option(metavar="N", min=1, help="Members of a sweep that run side by side.")
    ] = None,
    checkpoint: Annotated[
        str | None, Option(metavar="CKPT", help="Continue from this checkpoint, and no other.")
    ] = None,
    profile: Annotated[
        str | None, Option(metavar="FIRST:LAST", help="Trace these steps of rank 0; see docs/metrics.md.")
    ] = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Show script, environment, placement, memory, start; submit nothing.")
    ] = False,
    wait: Annotated[
        bool, Option("--wait", help="Stay and show progress. Ctrl-C stops a local run, detaches from a Slurm job.")
    ] = False,
    new: Annotated[bool, Option("--new", help="Start over: an existing run of this name is moved aside.")] = False,
    quiet: Annotated[bool, Option("-q", "--quiet", help="Print just the job id.")] = False,
    json: Json = False,
) -> None:
    """Submit a run, or continue it.

    Example: zslurm submit run.yaml --nodes 4 --set phases.0.lr=3e-4
    """
    from zslurm.cli.run.submission import Request, submit_run, submit_sweep  # the whole of the submission

    options = {
        "nodes": nodes,
        "spares": spares,
        "time": time,
        "partition": partition,
        "account": account,
        "qos": qos,
        "reservation": reservation,
        "nodelist": nodelist,
        "exclude": exclude,
        "job-name": name,
        "checkpoint": checkpoint,
        "profile": profile,
    }
    request = Request.of(
        run_file,
        context.meta.get(PROGRAM, []),
        cluster=cluster,
        overrides=overrides or [],
        options=options,
        flags=sbatch_options or [],
        dependencies=dependency or [],
    )
    if sweep or sweep_file is not None:
        if wait:
            raise BadParameter("--wait follows one run; `zslurm status` shows a sweep's")
        submit_sweep(
            request,
            sweep or [],
            sweep_file,
            max_concurrent=max_concurrent,
            new=new,
            dry_run=dry_run,
            quiet=quiet,
            as_json=json,
        )
        return
    if max_concurrent is not None:
        raise BadParameter("--max-concurrent limits a sweep; there is no --sweep here")
    submit_run(request, new=new, dry_run=dry_run, wait=wait, quiet=quiet, as_json=json)
