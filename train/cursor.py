"""What a checkpoint holds besides tensors, as plain JSON: where the run is, and what decides its next steps."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from zslurm.train.config import RESUMED_FROM, TrainConfig
from zslurm.train.data.order import DataOrder
from zslurm.train.evaluation.evaluate import Best
from zslurm.train.optim.stability import StepGuard


def cursor_of(
    step: int, order: DataOrder, guard: StepGuard, best: Best | None, config: TrainConfig
) -> dict[str, Any]:
    """Return the cursor of the checkpoint after `step`, which is the same on all ranks."""
    return {
        "step": step,
        **order.record(step),
        "plan": order.plan.record(),
        "recent": guard.recent.record(),
        "best": asdict(best) if best is not None else None,
        RESUMED_FROM: config.checkpoint.resume_from,
    }
