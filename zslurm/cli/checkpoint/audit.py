"""`zslurm audit`: whether a run is one chain of checkpoints, and whether a step computes as it did."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

from typer import Option

from zslurm.checkpoint_tools.quantities import counted
from zslurm.cli.checkpoint.checkpoint_options import Checkpoints
from zslurm.cli.errors import as_user_errors
from zslurm.cli.options import Json
from zslurm.core.console import print_json, say
from zslurm.core.errors import CheckFailed, ConfigError
from zslurm.run.checkpoints import find_checkpoints
from zslurm.train.checkpointing.chain import ChainEntry, chain_of


def audit(
    run: Checkpoints,
    recompute: Annotated[
        int | None, Option(metavar="STEP", help="Compute this step again from the checkpoint before it.")
    ] = None,
    json: Json = False,
) -> None:
    """Show the chain of a run's checkpoints, with its gaps. Exit code 5 if it has one, or a step differs.

    Each checkpoint names the one before it, and what made it: code, kernels, settings, data and ranks.

    Example: zslurm audit my-run
    """
    root, _ = find_checkpoints(run)
    with as_user_errors():
        entries = chain_of(root)
    faults = [f"step {entry.step}: {gap}" for entry in entries for gap in entry.gaps]
    if not json:
        for entry in entries:
            print(_line(entry))
    recomputed = None
    if recompute is not None:
        with as_user_errors():
            recomputed = _recompute(root, entries, recompute)
        faults += recomputed
    if json:
        rows = [
            {
                **entry.link,
                "path": None if entry.path is None else str(entry.path),
                "gaps": entry.gaps,
                "changes": entry.changes,
            }
            for entry in entries
        ]
        print_json({"links": rows, "recomputed": recomputed})
    if faults:
        raise CheckFailed("\n".join(faults))
    say(f"one chain of {counted(len(entries), 'checkpoint')}, from step {entries[0].step} to {entries[-1].step}")


def _line(entry: ChainEntry) -> str:
    where = "saved" if entry.path is not None else "deleted"
    words = [f"step {entry.step}: {where}, by {counted(int(entry.link['ranks']), 'rank')}"]
    words += [f"changed: {change}" for change in entry.changes] + [f"GAP: {gap}" for gap in entry.gaps]
    return "; ".join(words)


def _recompute(root: Path, entries: list[ChainEntry], step: int) -> list[str]:
    """Return in what a step differs if it is computed again, a line each."""
    from zslurm.train.recompute import recompute  # imports torch

    before: list[tuple[int, Path | None]] = [(0, None)] if entries[0].link["previous"] is None else []
    before += [(entry.step, entry.path) for entry in entries if entry.path is not None and entry.step < step]
    after = [entry for entry in entries if entry.step >= step]
    if step < 1 or not before or not after:
        saved = ", ".join(str(entry.step) for entry in entries if entry.path is not None)
        raise ConfigError(
            f"--recompute {step}: needs a checkpoint before the step, and one at it or after it; there are those "
            f"of steps {saved}"
        )
    (start, path), end = before[-1], after[0]
    links = [entry.link for entry in entries if start < entry.step <= end.step]
    with tempfile.TemporaryDirectory() as folder:
        weights, steps, differences = recompute(root.parent, path, links, step, Path(folder))
    lines = [
        f"step {difference.step}: {difference.name} was {difference.recorded!r}, and is {difference.computed!r}"
        for difference in differences
    ]
    if end.step == step and weights != end.link["weights"]:
        lines.append(f"step {step}: the weights are other ones than the checkpoint's link records")
    if not lines:
        compared = " and the weights" if end.step == step else ""
        say(f"step {step}: computed again from step {start}, {counted(steps, 'step')}{compared} bit for bit")
    return lines
