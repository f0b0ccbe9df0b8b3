"""The segments of a phase: how many optimizer steps it takes at which batch.

A batch ramp is a list of segments, each up to a number of the phase's tokens; what is left has the phase's own
batch. A segment takes whole steps: its last one may carry it beyond its limit, and the next one begins there. So
the number of steps is exact, is found in O(segments), and depends on nothing but these numbers.

Neither pydantic nor torch is imported here: `zslurm status` counts the steps of many runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """A number of optimizer steps, of a number of sequences each."""

    steps: int
    global_batch: int


def segments_of(
    tokens: int, context: int, global_batch: int, ramp: Iterable[tuple[int, int]]
) -> tuple[Segment, ...]:
    """Return the segments of a phase, in order; a segment that an earlier one has overtaken has 0 steps.

    Args:
        tokens: tokens to train on; the last step is whole, so up to one step more are.
        context: tokens in one sequence.
        global_batch: sequences in one step after the ramp.
        ramp: (until_tokens, global_batch) of each segment before that.
    """
    segments, done = [], 0
    for until, batch in (*ramp, (tokens, global_batch)):
        steps = max(0, -(-(until - done) // (batch * context)))
        segments.append(Segment(steps, batch))
        done += steps * batch * context
    return tuple(segments)
