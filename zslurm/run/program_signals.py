"""What the program of a run does not show, in sentences: the commands that show a run state it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NO_STEPS = "no steps"
NO_CHECKPOINTS = "no checkpoints"


def not_shown(config: Mapping[str, Any], *, step: int | None, checkpoint_step: int | None) -> tuple[str, ...]:
    """Return what is missing of a program's progress, a clause each; nothing for zslurm's own trainer.

    Args:
        config: of the run, as config.json holds it.
        step: the newest step that the program has shown; None if it has shown none.
        checkpoint_step: the same of its checkpoints.
    """
    trainer = config.get("trainer")
    if not isinstance(trainer, Mapping):
        return ()
    progress = trainer.get("progress")
    source: Mapping[str, Any] = progress if isinstance(progress, Mapping) else {}
    missing = []
    if step is None:
        missing.append(_steps(source))
    elif not trainer.get("steps"):
        missing.append("no time left (trainer.steps is not set)")
    if not trainer.get("checkpoints"):
        missing.append(f"{NO_CHECKPOINTS} (trainer.checkpoints is not set)")
    elif checkpoint_step is None:
        missing.append(f"{NO_CHECKPOINTS} (nothing new matches trainer.checkpoints, {trainer['checkpoints']})")
    return tuple(missing)


def _steps(source: Mapping[str, Any]) -> str:
    if source.get("pattern"):
        return f"{NO_STEPS} (no line matches trainer.progress.pattern, and zslurm.progress.step was not called)"
    if source.get("grows"):
        return f"{NO_STEPS} (only the growth of {source['grows']} is watched)"
    return (
        f"{NO_STEPS} (zslurm.progress.step was not called, and trainer.progress is not set), so that a hang is "
        "not noticed"
    )
