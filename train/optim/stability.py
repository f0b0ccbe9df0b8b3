"""Decide which steps are skipped: those whose loss or gradient is not finite, or far above the recent ones.

A skipped step counts, and its data are spent, but it leaves weights, optimizer state and balancing as they were.
A loss or gradient norm is a spike when it exceeds `optim.spike_factor` times the median of the last
`optim.spike_window` steps that were taken; before a phase has taken so many, nothing is a spike. More than
`optim.skip_limit` skipped steps in a row mean that training has diverged.

Decisions are functions of numbers that all ranks have from the same all-reduce, and of `Recent`, two lists of at
most `spike_window` numbers that checkpoints keep: all ranks decide the same, and a resumed run as an uninterrupted
one. No torch here.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.config import OptimConfig
from zslurm.train.errors import Diverged
from zslurm.train.jsonl import Record

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recent:
    """The numbers of the last steps that were taken, oldest first; empty if spikes are not looked for."""

    losses: tuple[float, ...] = ()
    grad_norms: tuple[float, ...] = ()
    skipped: int = 0  # steps that were skipped in a row just before now

    def taken(self, loss: float, grad_norm: float, config: OptimConfig) -> Recent:
        """Return it after a step that was taken."""
        if config.spike_factor is None:
            return Recent()
        window = -config.spike_window
        return Recent((*self.losses, loss)[window:], (*self.grad_norms, grad_norm)[window:])

    def record(self) -> dict[str, Any]:
        """Return it as plain JSON, which keeps every bit of a finite number."""
        return {"losses": list(self.losses), "grad_norms": list(self.grad_norms), "skipped": self.skipped}

    @staticmethod
    def of(record: Mapping[str, Any]) -> Recent:
        """Read what `record` returned."""
        return Recent(tuple(record["losses"]), tuple(record["grad_norms"]), record["skipped"])


def why_skip(recent: Recent, loss: float, grad_norm: float, config: OptimConfig) -> str | None:
    """Return why a step is to be skipped; None if it is to be taken."""
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


@dataclass(frozen=True)
class SkippedStep:
    """A step that was skipped."""

    step: int  # its number, from 1
    reason: str
    loss: float
    grad_norm: float
    tensor: str | None = None  # the first tensor whose gradient is not finite; None where all are
    rank: int | None = None  # the rank on which that is

    @property
    def where(self) -> str:
        """Return the place of the first number that is not finite, for a message."""
        return f", first in {self.tensor} on rank {self.rank}" if self.tensor else ""


class StepGuard:
    """Keeps what decides about steps, and counts those that were skipped in a row.

    Attributes:
        recent: the steps before; goes into each checkpoint's cursor, and back from there.
    """

    def __init__(self, config: OptimConfig) -> None:
        """Begin with no steps."""
        self._config = config
        self.recent = Recent()
        self._in_a_row: list[str] = []  # number, loss and gradient norm to the bit, first tensor, rank

    def why_skip(self, loss: float, grad_norm: float, *, first_of_phase: bool) -> str | None:
        """Return why a step is to be skipped; None if it is to be taken, which is then counted."""
        if first_of_phase:
            self.recent = Recent(skipped=self.recent.skipped)  # other data and batches have other losses
        reason = why_skip(self.recent, loss, grad_norm, self._config)
        if reason is None:
            self.recent, self._in_a_row = self.recent.taken(loss, grad_norm, self._config), []
        return reason

    def skip(self, skipped: SkippedStep, record: Record) -> None:
        """Count a skipped step, record it as a line of metrics, and log it.

        Raises:
            Diverged: more than optim.skip_limit steps in a row were skipped.
        """
        in_a_row, limit = self.recent.skipped + 1, self._config.skip_limit
        self.recent = replace(self.recent, skipped=in_a_row)
        numbers = f"{skipped.step} {skipped.loss.hex()} {skipped.grad_norm.hex()} {skipped.tensor} {skipped.rank}"
        self._in_a_row = [*(self._in_a_row[-limit:] if limit else []), numbers]
        record(
            "skipped",
            step=skipped.step,
            reason=skipped.reason,
            loss=skipped.loss if math.isfinite(skipped.loss) else None,
            grad_norm=skipped.grad_norm if math.isfinite(skipped.grad_norm) else None,
            tensor=skipped.tensor,
            rank=skipped.rank,
            in_a_row=in_a_row,
        )
        if in_a_row > limit:
            raise Diverged(
                f"step {skipped.step}: {skipped.reason}{skipped.where}; it is the last of {in_a_row} "
                f"in a row, more than optim.skip_limit ({limit}) allows; the weights were not updated by them. "
                "Lower phases[].lr or look at the data; the last checkpoint is from before them",
                fingerprint=hashlib.sha256("\n".join(self._in_a_row).encode()).hexdigest()[:16],
            )
        _LOG.info(
            "step %d is skipped: %s%s (%d in a row, of %d)",
            skipped.step, skipped.reason, skipped.where, in_a_row, limit,
        )  # fmt: skip
