"""The section `phases` of a run's configuration: tokens, context, batches and learning rates of each phase."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from itertools import chain
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.sections.section import ContextLength, Count, NonNegative, Positive, Section, Whole
from zslurm.train.sections.segments import Segment, segments_of

Packing = Literal["windows", "best_fit"]
"""How documents become sequences: the stream cut every `context` tokens, or whole documents side by side."""

ZAYA1_MID_TRAINING = {
    "long_cot": 86.1,
    "web": 5.7,
    "code": 3.0,
    "maths": 3.0,
    "short_instruct": 1.4,
    "native_long": 0.8,
}
"""Shares of the sources in ZAYA1's mid-training at 32k, percent (arXiv 2605.05365); the names are ours."""

MIXES = {"zaya1-mid-training": ZAYA1_MID_TRAINING}
"""Mixtures that a run file may name."""


def _named_mix(value: object) -> object:
    """Return the shares of a mixture that is named."""
    if not isinstance(value, str):
        return value
    if value not in MIXES:
        near = difflib.get_close_matches(value, MIXES, 1)
        hint = f"did you mean `{near[0]}`?" if near else f"there are: {', '.join(MIXES)}"
        raise ValueError(f"expected shares by source, or the name of a mixture, got {json.dumps(value)}; {hint}")
    return dict(MIXES[value])


class RampStage(Section):
    """A segment of a batch ramp."""

    until_tokens: Count = Field(description="the segment ends when the phase has trained on this many tokens")
    global_batch: Count = Field(description="sequences in one optimizer step of this segment")


class PhaseConfig(Section):
    """One phase of training: how many tokens, at which context, with which schedule."""

    name: str = Field("train", description="name of the phase, for people")
    tokens: Count = Field(description="tokens to train on in this phase")
    context: ContextLength = Field(description="tokens in one sequence")
    global_batch: Count = Field(description="sequences in one optimizer step, over all ranks")
    micro_batch: Count = Field(description="sequences in one forward pass: the unit of distribution")
    context_parallel: Count = Field(
        1, description="ranks of one node that share each sequence: its context is divided among them"
    )
    rope_base: Positive = Field(10_000.0, description="base of the rotary embedding")
    lr: Positive = Field(description="peak learning rate")
    final_lr: NonNegative = Field(0.0, description="learning rate at the end of the phase")
    warmup_steps: Whole = Field(0, description="steps of linear warm-up")
    warmup_from: NonNegative = Field(
        0.0,
        description="learning rate that the warm-up starts from; to re-warm, what the phase before ended with",
    )
    schedule: Literal["cosine", "wsd", "linear", "constant"] = Field(
        "cosine",
        description="from lr to final_lr along a cosine or a line, or (wsd) constant, then down in decay_steps",
    )
    decay_steps: Whole = Field(
        0, description="steps of the decay at the end of a wsd schedule, along 1 - sqrt (arXiv 2405.18392)"
    )
    batch_ramp: tuple[RampStage, ...] = Field(
        (), description="smaller batches at the start of the phase, each up to a number of its tokens"
    )
    mix: Annotated[dict[str, NonNegative], BeforeValidator(_named_mix)] = Field(
        default_factory=dict,
        description="share of each of data.sources, to any scale; one that is not named has 0; or the name of a "
        "mixture, zaya1-mid-training; default: in proportion to their tokens",
    )

    packing: Packing | None = Field(None, description="how documents become sequences; default: data.packing")

    @model_validator(mode="after")
    def _adds_up(self) -> PhaseConfig:
        problems = chain(self._batch_problems(), self._rate_problems(), self._schedule_problems())
        if (problem := next(problems, None)) is not None:
            raise ValueError(problem)
        return self

    def _batch_problems(self) -> Iterator[str]:
        multiple = f"must be a multiple of micro_batch ({self.micro_batch})"
        if self.global_batch % self.micro_batch:
            yield f"global_batch ({self.global_batch}) {multiple}"
        reached = 0
        for index, (stage, segment) in enumerate(zip(self.batch_ramp, self.segments, strict=False)):
            where, until = f"batch_ramp[{index}]", stage.until_tokens
            if stage.global_batch % self.micro_batch:
                yield f"{where}.global_batch ({stage.global_batch}) {multiple}"
            if until >= self.tokens:
                yield f"{where}.until_tokens ({until}) must be below the phase's tokens ({self.tokens})"
            if until <= reached:
                yield f"{where}.until_tokens ({until}) must exceed the {reached} of the stage before"
            if not segment.steps:
                yield f"{where} has no step: the steps before it train on {counted(until, 'token')} or more"
            reached = until
        if not self.segments[-1].steps:
            yield f"global_batch has no step: those of batch_ramp train on all {counted(self.tokens, 'token')}"

    def _rate_problems(self) -> Iterator[str]:
        if self.final_lr > self.lr:
            yield f"final_lr ({self.final_lr:g}) must not exceed lr ({self.lr:g})"
        if self.schedule == "constant" and self.final_lr not in (0, self.lr):
            yield f"final_lr ({self.final_lr:g}) is never reached: schedule is constant"
        if self.warmup_from > self.lr:
            yield f"warmup_from ({self.warmup_from:g}) must not exceed lr ({self.lr:g})"
        if self.warmup_from and not self.warmup_steps:
            yield f"warmup_from ({self.warmup_from:g}) needs warmup_steps"

    def _schedule_problems(self) -> Iterator[str]:
        warmup, decay, steps = self.warmup_steps, self.decay_steps, f"the phase's {counted(self.steps, 'step')}"
        if warmup > self.steps:
            yield f"warmup_steps ({warmup}) exceeds {steps}"
        if self.schedule == "wsd" and not decay:
            yield "decay_steps: required by schedule wsd: the steps in which the rate falls to final_lr"
        if self.schedule != "wsd" and decay:
            yield f"decay_steps ({decay}) belongs to schedule wsd, not {self.schedule}"
        if warmup + decay > self.steps:
            yield f"warmup_steps ({warmup}) and decay_steps ({decay}) exceed {steps} together"

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Return the segments of the phase: the batch ramp's, and the one of the phase's own batch."""
        ramp = [(segment.until_tokens, segment.global_batch) for segment in self.batch_ramp]
        return segments_of(self.tokens, self.context, self.global_batch, ramp)

    @property
    def steps(self) -> int:
        """Optimizer steps of this phase: enough for its tokens."""
        return sum(segment.steps for segment in self.segments)
