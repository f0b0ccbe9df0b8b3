"""Which steps are not taken: those whose loss or gradient is not finite, or stands far above the recent ones.

A skipped step counts, and its data are spent, but it leaves weights, optimizer state and balancing as they were.
A loss or gradient norm is a spike when it exceeds `optim.spike_factor` times the median of the last
`optim.spike_window` steps that were taken; a phase is not judged before it has taken so many. More than
`optim.skip_limit` skipped steps in a row mean that training has diverged.

Decisions are functions of numbers that all ranks have from the same all-reduce, and of `Recent`, two lists of at
most `spike_window` numbers that checkpoints keep: every rank decides alike, and a resumed run as an uninterrupted
one. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.config import OptimConfig


@dataclass(frozen=True)
class Recent:
    """What is remembered of the steps before.

    Attributes:
        losses, grad_norms: of the last steps that were taken, oldest first; empty where spikes are not looked for.
        skipped: steps that were skipped in a row just before now.
    """

    losses: tuple[float, ...] = ()
    grad_norms: tuple[float, ...] = ()
    skipped: int = 0

    def taken(self, loss: float, grad_norm: float, config: OptimConfig) -> Recent:
        """After a step that was taken."""
        if config.spike_factor is None:
            return Recent()
        window = -config.spike_window
        return Recent((*self.losses, loss)[window:], (*self.grad_norms, grad_norm)[window:])

    def left_out(self) -> Recent:
        """After a step that was skipped."""
        return replace(self, skipped=self.skipped + 1)

    def in_new_phase(self) -> Recent:
        """Before the first step of a phase: other data and other batches have other losses."""
        return Recent(skipped=self.skipped)

    def record(self) -> dict[str, Any]:
        """As plain JSON, which keeps every bit of a finite number."""
        return {"losses": list(self.losses), "grad_norms": list(self.grad_norms), "skipped": self.skipped}

    @staticmethod
    def of(record: Mapping[str, Any]) -> Recent:
        """From `record`."""
        return Recent(tuple(record["losses"]), tuple(record["grad_norms"]), record["skipped"])


def why_skip(recent: Recent, loss: float, grad_norm: float, config: OptimConfig) -> str | None:
    """Why a step is to be skipped; None if it is to be taken."""
    for name, value, before in (("loss", loss, recent.losses), ("gradient norm", grad_norm, recent.grad_norms)):
        if not math.isfinite(value):
            return f"{name} {value:g} is not finite"
        if config.spike_factor is not None and len(before) >= config.spike_window:
            usual = median(before[-config.spike_window :])
            if value > config.spike_factor * usual:
                return (
                    f"{name} {value:.4g} exceeds {config.spike_factor:g} x {usual:.4g}, "
                    f"the median of {counted(config.spike_window, 'step')}"
                )
    return None
