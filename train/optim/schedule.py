"""Where a step lies in the list of phases, and its learning rate: pure functions of the configuration.

The cosine is Loshchilov and Hutter's (arXiv 1608.03983) without restarts, after a linear warm-up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from train.config import PhaseConfig


@dataclass(frozen=True)
class Position:
    """One optimizer step of the run.

    Attributes:
        phase: the phase it belongs to.
        phase_index: that phase's place in the list.
        step_in_phase: steps of the phase before this one.
        counter: sampler counter of the step's first sequence, among sequences of this context.
        tokens_before: tokens trained on before this step.
    """

    phase: PhaseConfig
    phase_index: int
    step_in_phase: int
    counter: int
    tokens_before: int

    @property
    def lr(self) -> float:
        """Learning rate of the step."""
        return learning_rate(self.phase, self.step_in_phase)


def learning_rate(phase: PhaseConfig, step: int) -> float:
    """Learning rate of a phase's step, counted from 0: linear warm-up, then cosine from lr to final_lr."""
    if step < phase.warmup_steps:
        return phase.lr * (step + 1) / phase.warmup_steps
    decay_steps = phase.steps - phase.warmup_steps
    progress = (step - phase.warmup_steps) / max(1, decay_steps - 1)
    return phase.final_lr + (phase.lr - phase.final_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


class Plan:
    """The steps of a run: its phases, one after the other."""

    def __init__(self, phases: tuple[PhaseConfig, ...]) -> None:
        self.phases = phases
        self.total_steps = sum(phase.steps for phase in phases)

    def at(self, step: int) -> Position:
        """Where step `step` (from 0) lies.

        A phase with the context of an earlier one goes on in that one's data order.

        Raises:
            IndexError: the run has fewer steps.
        """
        first, tokens = 0, 0
        sequences: dict[int, int] = {}  # by context: sequences used by the phases before
        for index, phase in enumerate(self.phases):
            inside = step - first
            if inside < phase.steps:
                counter = sequences.get(phase.context, 0) + inside * phase.global_batch
                return Position(phase, index, inside, counter, tokens + inside * phase.step_tokens)
            first += phase.steps
            tokens += phase.steps * phase.step_tokens
            used = phase.steps * phase.global_batch
            sequences[phase.context] = sequences.get(phase.context, 0) + used
        raise IndexError(f"the run has {self.total_steps} steps, there is no step {step}")
