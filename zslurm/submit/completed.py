"""A run that has trained all its steps is not started again: it would load its last checkpoint and end."""

from __future__ import annotations

from pathlib import Path

from zslurm.checkpoint_tools import Checkpoint, CheckpointError, list_checkpoints
from zslurm.config.spec import RunSpec
from zslurm.core.errors import RunCompleted, ZslurmError
from zslurm.run.run_dir import RunDir
from zslurm.train.config import RESUMED_FROM


def refuse_completed(spec: RunSpec, run: RunDir) -> None:
    """Refuse to start a run whose checkpoint to resume from is that of its last step.

    Raises:
        RunCompleted: nothing is left to train; the message names how to train further, or to start over.
        ZslurmError: the directory of checkpoints cannot be listed.
    """
    try:
        step, total = _resumes_at(spec, run), spec.total_steps
    except CheckpointError as error:
        raise ZslurmError(str(error)) from error
    if step is None or step < total:
        return
    last = len(spec.phases) - 1
    more = 2 * spec.phases[last].tokens
    raise RunCompleted(
        f"{run.name}: the run is complete: step {step} of {total} is saved, and there is nothing left to train; "
        f"give it more tokens to continue (now phases[{last}].tokens={spec.phases[last].tokens}; for example "
        f"`zslurm submit RUN_FILE --set phases[{last}].tokens={more}`), or start over with --new"
    )


def _resumes_at(spec: RunSpec, run: RunDir) -> int | None:
    """The step that the trainer would resume at, as the trainer chooses; None where it would start anew."""
    asked = spec.checkpoint.resume_from
    for listing in list_checkpoints(run.checkpoints):
        if listing.complete and (asked is None or _cursor(listing.path).get(RESUMED_FROM) == asked):
            return listing.step
    return _step_of(Path(asked)) if asked is not None else None


def _cursor(path: Path) -> dict[str, object]:
    with Checkpoint.open(path, check_files=False) as checkpoint:
        return dict(checkpoint.manifest.cursor)


def _step_of(path: Path) -> int | None:
    try:
        with Checkpoint.open(path, check_files=False) as checkpoint:
            return checkpoint.manifest.step
    except CheckpointError:  # the trainer names what is wrong with it
        return None
