"""The message size from which a collective has its full bandwidth: the bucket that a run should use.

A collective of S bytes takes t(S) = a + S / B (Hockney): a for its hops, whatever the size, and B the bandwidth
that large messages reach, the plateau. Its bandwidth is B S / (S + H); H = a B is the size at half of the
plateau. The knee is the smallest size with 95 % of it:

    S / (S + H) >= 0.95    from    S = 19 H on

H and B are fitted to all sizes at once, and not read off single points: near the knee the curve is so flat that
noise of 3 % moves the first point above 95 % by a factor of two. The fit minimises the weighted sum of
|log t - log(a + S / B)|. A point's weight falls with the scatter of its repetitions, so a few points far off
(another process, a protocol that changes at some size) do not move it. For a given H the best B is a weighted
median; H is searched on a grid.

The knee counts as measured only if a size at least as large was measured; beyond, the bandwidth still rises.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SHARE = 0.95
_FEWEST_SIZES = 4
_STEPS_PER_OCTAVE = 16
_USUAL_SPREAD, _UNKNOWN_SPREAD = 0.05, 0.5
_KNEE_OVER_HALF = SHARE / (1 - SHARE)


@dataclass(frozen=True)
class Sample:
    """One size of a curve: bytes, median seconds, relative spread of the repetitions, and their number."""

    bytes: int
    seconds: float
    spread: float = 0.0
    repetitions: int = 3


@dataclass(frozen=True)
class Knee:
    """What a curve gives.

    Attributes:
        bytes: the knee, 19 times the size at half of the plateau.
        seconds: `a`, what a collective of no bytes takes.
        rate: the plateau, in bytes of the message a second (the algorithm bandwidth).
        reached: whether a size at least as large as the knee was measured.
        error: median of |t / fitted t - 1| over the sizes.
    """

    bytes: float
    seconds: float
    rate: float
    reached: bool
    error: float

    def time(self, size: float) -> float:
        """Return the seconds that the fit gives for a message of `size` bytes."""
        return self.seconds + size / self.rate


def knee_of(samples: Sequence[Sample]) -> Knee | None:
    """Return the knee of a curve; None with fewer than four sizes."""
    samples = [sample for sample in samples if sample.bytes > 0 and sample.seconds > 0]
    sizes = sorted({sample.bytes for sample in samples})
    if len(sizes) < _FEWEST_SIZES:
        return None
    weights = [1 / (_USUAL_SPREAD + _spread(sample)) for sample in samples]
    # From far below the smallest size (all of them on the plateau) to far above the largest (none near it).
    octaves = math.log2(sizes[-1] / sizes[0]) + 8
    grid = (sizes[0] / 256 * 2 ** (step / _STEPS_PER_OCTAVE) for step in range(int(octaves * _STEPS_PER_OCTAVE)))
    _, half, log_rate = min((*_misfit(samples, weights, sample),) for sample in grid)
    rate = math.exp(log_rate)
    fitted = Knee(_KNEE_OVER_HALF * half, half / rate, rate, sizes[-1] >= _KNEE_OVER_HALF * half, 0.0)
    errors = sorted(abs(sample.seconds / fitted.time(sample.bytes) - 1) for sample in samples)
    return Knee(fitted.bytes, fitted.seconds, rate, fitted.reached, errors[len(errors) // 2])


def knee_spread(samples: Sequence[Sample]) -> float | None:
    """Return the relative standard error of the knee of a curve, by the jackknife over its sizes.

    The jackknife (Efron and Tibshirani, An Introduction to the Bootstrap, chapter 11) leaves out each of the n
    sizes in turn: the squared error is (n - 1) / n times the sum of the squared differences from their mean. The
    knee's logarithm is taken, as knees differ by factors. None with fewer than five sizes.
    """
    sizes = sorted({sample.bytes for sample in samples})
    logs = [
        math.log(knee.bytes)
        for size in sizes
        if (knee := knee_of([sample for sample in samples if sample.bytes != size])) is not None
    ]
    if not logs:
        return None
    mean = sum(logs) / len(logs)
    return math.sqrt((len(logs) - 1) / len(logs) * sum((log - mean) ** 2 for log in logs))


def _spread(sample: Sample) -> float:
    """Return a point's spread; after one or two repetitions it is unknown, and taken to be large."""
    return sample.spread if sample.repetitions > 2 else max(sample.spread, _UNKNOWN_SPREAD)


def _misfit(samples: Sequence[Sample], weights: Sequence[float], half: float) -> tuple[float, float, float]:
    """Return the weighted misfit of the best rate for a size at half of the plateau; that size, the rate's log."""
    rates = [math.log((sample.bytes + half) / sample.seconds) for sample in samples]
    best = _weighted_median(rates, weights)
    return sum(weight * abs(rate - best) for rate, weight in zip(rates, weights, strict=True)), half, best


def _weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    pairs = sorted(zip(values, weights, strict=True))
    half, seen = sum(weights) / 2, 0.0
    for value, weight in pairs:
        seen += weight
        if seen >= half:
            return value
    return pairs[-1][0]
