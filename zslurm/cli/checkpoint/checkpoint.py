"""`zslurm checkpoint`: the group of its commands, and those that rewrite or remove checkpoints."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from zslurm import checkpoint_tools
from zslurm.api.checkpoint import reshaped_path
from zslurm.checkpoint_tools import Listing, acquire, plan_reshape, prunable
from zslurm.checkpoint_tools.quantities import counted, show_bytes, show_duration
from zslurm.cli.checkpoint.checkpoint_options import Checkpoint, Checkpoints, Threads
from zslurm.cli.checkpoint.convert import export, import_
from zslurm.cli.checkpoint.inspect import diff, list_, show, verify
from zslurm.cli.errors import as_user_errors
from zslurm.cli.options import Json, Slurm, run_locally_or_as_job
from zslurm.core.console import print_json, say
from zslurm.core.errors import ZslurmError
from zslurm.core.progress_bar import byte_bar
from zslurm.core.units import parse_size
from zslurm.run.checkpoints import find_checkpoint, find_checkpoints
from zslurm.slurm.environment import own_job_id


def reshape(
    checkpoint: Checkpoint,
    dp: Annotated[int, Option(metavar="N", help="Data-parallel ranks to write it for.")],
    destination: Annotated[
        Path | None, Argument(metavar="[DST]", help="The directory to make; default: CKPT-dpN next to it.")
    ] = None,
    workers: Threads = 4,
    max_memory: Annotated[str, Option(metavar="SIZE", help="Memory for buffers at most.")] = "256MiB",
    dry_run: Annotated[bool, Option("--dry-run", help="Print what would be written; write nothing.")] = False,
    slurm: Slurm = False,
    json: Json = False,
) -> None:
    """Rewrite a checkpoint for another number of ranks. It needs no GPU, and prints the new checkpoint's path.

    Resuming does not need it: a run loads a checkpoint of any number of ranks.

    Example: zslurm checkpoint reshape my-run --dp 768
    """
    run_locally_or_as_job(slurm)
    memory = parse_size(max_memory)
    source = find_checkpoint(checkpoint)
    destination = destination or reshaped_path(source, dp)
    started = time.monotonic()
    with as_user_errors(), byte_bar(f"reshaping {source.name}") as report:
        if dry_run:
            plan = plan_reshape(source, destination, dp, workers=workers, max_memory=memory)
        else:
            plan = checkpoint_tools.reshape(
                source,
                destination,
                dp,
                workers=workers,
                max_memory=memory,
                report=lambda stage, done, total: report(done, total, stage),
            )
    seconds = time.monotonic() - started
    if json:
        facts = {"path": str(plan.destination), "ranks": plan.to_ranks, **asdict(plan), "source": str(plan.source)}
        del facts["destination"], facts["to_ranks"]
        print_json({**facts, "written": not dry_run, "seconds": seconds})
        return
    what = f"{counted(plan.files, 'file')}, {show_bytes(plan.bytes)}, the largest {show_bytes(plan.largest_file)}"
    ranks = f"{counted(plan.from_ranks, 'rank')} to {plan.to_ranks}"
    if dry_run:
        say(f"would write {destination}: {what} ({ranks})")
        return
    say(f"{ranks} in {show_duration(seconds)}, verified: {what}")
    print(destination)


def prune(
    run: Checkpoints,
    keep_last: Annotated[int, Option(metavar="K", min=1, help="The newest K stay.")] = 3,
    keep_every: Annotated[int, Option(metavar="N", min=0, help="Multiples of N steps stay; 0: none.")] = 0,
    keep_best: Annotated[
        bool, Option("--keep-best/--drop-best", help="The one with the best validation loss stays.")
    ] = True,
    dry_run: Annotated[bool, Option("--dry-run", help="Print what would go; remove nothing.")] = False,
    json: Json = False,
) -> None:
    """Remove old checkpoints of a run that is not being trained. Prints the paths of those that were removed.

    A running run does this itself: checkpoint.keep_last and the settings next to it.

    Example: zslurm checkpoint prune my-run --keep-last 2 --keep-every 1000 --dry-run
    """
    root, listings = find_checkpoints(run)
    with as_user_errors():
        keep = _best(listings) if keep_best else set()
        going = prunable(root, keep_last, keep_every=keep_every, keep=keep)
        size = sum(file.stat().st_size for listing in going for file in listing.path.iterdir())
        if not dry_run and going:
            lock = acquire(root, job=own_job_id() or "")
            try:
                checkpoint_tools.prune(root, keep_last, keep_every=keep_every, keep=keep)
            finally:
                lock.release()
    if json:
        print_json({"removed": not dry_run, "bytes": size, "paths": [str(listing.path) for listing in going]})
        return
    say(f"{'would remove' if dry_run else 'removed'} {counted(len(going), 'checkpoint')}, {show_bytes(size)}")
    for listing in going:
        print(listing.path)


def _best(found: list[Listing]) -> set[int]:
    """Return the step that the newest complete checkpoint records as the best; empty if it records none."""
    newest = next((listing for listing in found if listing.complete), None)
    if newest is None:
        return set()
    with checkpoint_tools.Checkpoint.open(newest.path, check_files=False) as checkpoint:
        best = checkpoint.manifest.cursor.get("best")
    if not best:
        return set()
    if not isinstance(best, dict) or not isinstance(best.get("step"), int):
        raise ZslurmError(
            f"{newest.path}: the best checkpoint is not known: its cursor is damaged; give --drop-best to "
            "prune without it"
        )
    return {best["step"]}


app = typer.Typer(help="Checkpoints: list, show, verify, compare, reshape, convert.", no_args_is_help=True)
app.command("ls")(list_)
for command in (show, verify, diff, reshape, prune, export):
    app.command()(command)
app.command("import")(import_)
