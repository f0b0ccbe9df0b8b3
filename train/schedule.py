"""Where a step is in the list of phases, its batch, and its learning rate: pure functions of the configuration.

A phase is a warm-up, then a schedule. Counted from 0, w steps of warm-up, n steps in all, the learning rate of
step i is, from `warmup_from` = a over `lr` = b to `final_lr` = c:

    warm-up    a + (b - a) (i + 1) / w                               the last step of it has b
    cosine     c + (b - c) (1 + cos(pi x)) / 2, x = (i - w) / (n - w - 1)
               Loshchilov and Hutter (arXiv 1608.03983) without restarts; the last step of it has c
    linear     b + (c - b) x, with the same x
    wsd        b, and in the last d = decay_steps b + (c - b) sqrt(y), y = (i - (n - d) + 1) / d
               warmup-stable-decay is MiniCPM's (arXiv 2404.06395); this decay is "1 - sqrt" of Haegele et al.
               (arXiv 2405.18392), who found it better than a line; the last step of it has c
    constant   b

Finding a step's place takes O(log segments): nothing is made for each of the 800,000 steps of a long run. A run
moves from phase to phase by itself, and wherever it is interrupted, it resumes from only its step number.
That holds while the phases stay what they were; so checkpoints record them, and `compare` lists what changed.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.errors import ConfigError
from zslurm.train.sections.phases import PhaseConfig


@dataclass(frozen=True)
class Position:
    """One optimizer step of the run."""

    phase: PhaseConfig  # the phase it belongs to
    phase_index: int  # that phase's place in the list
    step_in_phase: int  # steps of the phase before this one
    global_batch: int  # sequences in the step, over all ranks
    sequence: int  # sequences of this phase before the step
    tokens_before: int  # tokens trained on before this step

    @property
    def lr(self) -> float:
        """Return the learning rate of the step."""
        return learning_rate(self.phase, self.step_in_phase)

    @property
    def microbatches(self) -> int:
        """Return the microbatches of the step, over all ranks."""
        return self.global_batch // self.phase.micro_batch

    @property
    def step_tokens(self) -> int:
        """Return the tokens that the step trains on."""
        return self.global_batch * self.phase.context


def due(every: int, step: int) -> bool:
    """Return whether something that is done every `every` steps (0: never) is done after `step`."""
    return every > 0 and step % every == 0


def learning_rate(phase: PhaseConfig, step: int) -> float:
    """Return the learning rate of a phase's step, counted from 0; the formulas are at the top of this file."""
    steps, warmup = phase.steps, phase.warmup_steps
    if step < warmup:
        return phase.warmup_from + (phase.lr - phase.warmup_from) * (step + 1) / warmup
    fall = phase.final_lr - phase.lr
    if phase.schedule == "constant":
        return phase.lr
    if phase.schedule == "wsd":
        decayed = step - (steps - phase.decay_steps) + 1
        return phase.lr + fall * math.sqrt(max(0, decayed) / phase.decay_steps)
    progress = (step - warmup) / max(1, steps - warmup - 1)
    if phase.schedule == "linear":
        return phase.lr + fall * progress
    return phase.final_lr - fall * 0.5 * (1 + math.cos(math.pi * progress))


class Plan:
    """The steps of a run: its phases, one after the other, each in its segments.

    Attributes:
        total_steps: optimizer steps of all phases.
        total_tokens: tokens that they train on.
    """

    def __init__(self, phases: tuple[PhaseConfig, ...]) -> None:
        self.phases = phases
        self._segments: list[Position] = []
        self._first_steps: list[int] = []
        step, tokens = 0, 0
        for index, phase in enumerate(phases):
            inside, sequence = 0, 0
            for segment in phase.segments:
                self._first_steps.append(step)
                self._segments.append(Position(phase, index, inside, segment.global_batch, sequence, tokens))
                used = segment.steps * segment.global_batch
                step, inside = step + segment.steps, inside + segment.steps
                sequence, tokens = sequence + used, tokens + used * phase.context
        self.total_steps, self.total_tokens = step, tokens

    def at(self, step: int) -> Position:
        """Return the place of step `step` (from 0).

        Raises:
            IndexError: the run has no such step.
        """
        if not 0 <= step < self.total_steps:
            raise IndexError(f"the run has {counted(self.total_steps, 'step')}, there is no step {step}")
        segment = bisect_right(self._first_steps, step) - 1
        start, steps = self._segments[segment], step - self._first_steps[segment]
        return replace(
            start,
            step_in_phase=start.step_in_phase + steps,
            sequence=start.sequence + steps * start.global_batch,
            tokens_before=start.tokens_before + steps * start.step_tokens,
        )

    def tokens_after(self, steps: int) -> int:
        """Return the tokens trained on in the first `steps` steps."""
        return self.total_tokens if steps >= self.total_steps else self.at(steps).tokens_before

    def record(self) -> list[dict[str, Any]]:
        """Return the phases as checkpoints record them: what decides which step trains on what."""
        return [
            {
                "name": phase.name,
                "context": phase.context,
                "stages": [[segment.steps, segment.global_batch] for segment in phase.segments],
            }
            for phase in self.phases
        ]


def check_ranks(phases: Sequence[PhaseConfig], ranks: int, ranks_per_node: int) -> list[str]:
    """Check that every phase has a place for its context groups and work for its ranks.

    Returns the waits of ranks for others, a line for each batch that they cannot share evenly.

    Raises:
        ConfigError: the ranks that share a sequence would not be in one node, or a batch has fewer sequences than
            there are data-parallel ranks.
    """
    lines = []
    for index, phase in enumerate(phases):
        _check_groups(f"phases[{index}]", phase, ranks, ranks_per_node)
        shares = ranks // phase.context_parallel
        ramp = [f"batch_ramp[{segment}].global_batch" for segment in range(len(phase.batch_ramp))]
        for key, segment in zip([*ramp, "global_batch"], phase.segments, strict=True):
            batch = f"phases[{index}].{key} ({segment.global_batch})"
            if segment.global_batch < shares:
                raise ConfigError(
                    f"{batch} has fewer sequences than there are data-parallel ranks ({shares}); "
                    f"{_more_work(index, phase, segment.global_batch, ranks, ranks_per_node)}"
                )
            if segment.global_batch % shares:
                most, mean = -(-segment.global_batch // shares), segment.global_batch / shares
                lines.append(
                    f"{batch} gives {shares} data-parallel ranks at most {counted(most, 'sequence')} each and "
                    f"{mean:.3g} in the mean: they wait for {100 * (1 - mean / most):.3g} % of the time; "
                    f"a multiple of {shares} divides evenly"
                )
    return lines


def _check_groups(key: str, phase: PhaseConfig, ranks: int, ranks_per_node: int) -> None:
    """Raise ConfigError if the ranks that share a sequence cannot be neighbours in one node."""
    size = phase.context_parallel
    sizes = _group_sizes(phase, ranks, ranks_per_node)
    if size in sizes:
        return
    if size > ranks_per_node:
        node = counted(ranks_per_node, "rank")
        why = f"exceeds the {node} of a node, and all ranks that share a sequence are in one"
    elif ranks_per_node % size:
        why = f"does not divide the {counted(ranks_per_node, 'rank')} of a node"
    elif ranks % size:
        why = f"does not divide the run's {counted(ranks, 'rank')}"
    else:
        return  # too short for its chunks: train/context finds that, which knows the model's convolutions
    raise ConfigError(
        f"{key}.context_parallel ({size}) {why}; use {min(sizes, key=lambda candidate: abs(candidate - size))}"
    )


def _group_sizes(phase: PhaseConfig, ranks: int, ranks_per_node: int) -> list[int]:
    """Return the sizes of context groups for which there is a place, and a token for each of their chunks."""
    return [
        size
        for size in range(1, ranks_per_node + 1)
        if not ranks_per_node % size and not ranks % size and (size == 1 or 2 * size <= phase.context)
    ]


def _more_work(index: int, phase: PhaseConfig, batch: int, ranks: int, ranks_per_node: int) -> str:
    """Return what gives every rank a part of a batch that is too small for them."""
    enough = [size for size in _group_sizes(phase, ranks, ranks_per_node) if ranks // size <= batch]
    most = batch * phase.context_parallel
    nodes = most // ranks_per_node if ranks_per_node > 1 else 0
    fewer = f"use at most {counted(nodes, 'node') if nodes else counted(most, 'rank')}"
    return f"set phases[{index}].context_parallel to {enough[0]}, or {fewer}" if enough else fewer


def compare(recorded: Sequence[Mapping[str, Any]] | None, plan: Plan, done: int) -> list[str]:
    """Describe what has changed in the phases of a run that resumes after `done` steps, a line for each change.

    `recorded` are the phases that these steps were trained in, from `Plan.record`; None if they are not known.

    Raises:
        ConfigError: a step that was done would train on other data now.
    """
    if recorded is None:
        return []
    lines, remaining = [], done
    for index, (before, now) in enumerate(zip_longest(recorded, plan.record())):
        named = now or before
        assert named is not None
        name = f"phases[{index}] ({named['name']})"
        change = _change(before, now)
        if _first_steps(before, remaining) != _first_steps(now, remaining):
            raise ConfigError(
                f"{name} {change}, and the {counted(done, 'step that is done', 'steps that are done')} would "
                f"not be the first {done} any more; "
                "set the phase back, or start a new run from the checkpoint's weights (`init: ckpt:DIR`)"
            )
        remaining -= min(remaining, _steps(before))
        if change:
            lines.append(f"{name} {change}")
    return lines


def _steps(phase: Mapping[str, Any] | None) -> int:
    return sum(steps for steps, _ in phase["stages"]) if phase else 0


def _first_steps(phase: Mapping[str, Any] | None, count: int) -> list[tuple[int, int, int]]:
    """(context, batch, steps) of the first `count` steps of a recorded phase."""
    first_steps: list[tuple[int, int, int]] = []
    if phase is None:
        return first_steps
    for steps, batch in phase["stages"]:
        if taken := min(steps, count):
            first_steps.append((phase["context"], batch, taken))
            count -= taken
    return first_steps


def _change(before: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> str:
    """Return what became of a phase; empty if its steps are what they were."""
    if now is None:
        return "is gone"
    if before is None:
        return f"is new, with {counted(_steps(now), 'step')}"
    if _steps(before) != _steps(now):
        return f"now has {counted(_steps(now), 'step')}, and had {_steps(before)}"
    if before["context"] != now["context"]:
        return f"now has a context of {now['context']}, and had {before['context']}"
    return "" if before["stages"] == now["stages"] else "now has other batches in its steps"
