"""The knee of a bandwidth curve: 95 % of the plateau, whatever single points do."""

from __future__ import annotations

import random

import pytest

from zslurm.bench.results.knee import Sample, knee_of

SIZES = [2**power for power in range(10, 35)]


def curve(latency_s: float, rate: float) -> list[Sample]:
    return [Sample(size, latency_s + size / rate, 0.01, 20) for size in SIZES]


@pytest.mark.parametrize("latency_s", [5e-6, 1e-4, 4e-3])
@pytest.mark.parametrize("rate", [1e9, 3e11])
def test_the_knee_of_an_exact_curve(latency_s: float, rate: float) -> None:
    knee = knee_of(curve(latency_s, rate))
    assert knee is not None
    assert knee.bytes == pytest.approx(19 * latency_s * rate, rel=0.05)
    assert knee.bytes / knee.time(knee.bytes) == pytest.approx(0.95 * rate, rel=0.03)
    assert knee.reached == (knee.bytes <= SIZES[-1])


def test_points_far_off_do_not_move_it() -> None:
    samples = curve(1e-4, 1e11)
    for index in (3, 11, 19):
        each = samples[index]
        samples[index] = Sample(each.bytes, 5 * each.seconds, 0.5, 20)
    knee = knee_of(samples)
    assert knee is not None and knee.bytes == pytest.approx(19 * 1e7, rel=0.1)


def test_noise_of_five_percent_moves_it_less_than_a_power_of_two() -> None:
    found = []
    for seed in range(20):
        draw = random.Random(seed)
        samples = [Sample(s.bytes, s.seconds * (1 + 0.05 * draw.gauss(0, 1)), 0.05, 20) for s in curve(1e-4, 1e11)]
        knee = knee_of(samples)
        assert knee is not None
        found.append(knee.bytes)
    assert max(found) / min(found) < 2


def test_a_single_repetition_counts_little() -> None:
    """The largest messages are slow and were measured once, as when a machine has run out of memory."""
    samples = [s if s.bytes < 2**31 else Sample(s.bytes, 4 * s.seconds, 0.0, 1) for s in curve(1e-4, 1e11)]
    knee = knee_of(samples)
    assert knee is not None and knee.bytes == pytest.approx(19 * 1e7, rel=0.1)


def test_a_curve_that_still_rises_has_no_measured_knee() -> None:
    knee = knee_of([each for each in curve(1e-3, 1e11) if each.bytes <= 2**24])
    assert knee is not None and not knee.reached


def test_three_sizes_are_no_curve() -> None:
    assert knee_of(curve(1e-4, 1e11)[:3]) is None
