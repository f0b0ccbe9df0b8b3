"""Steps that are not finite or stand out are skipped; the same on every rank and after every resume."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zslurm.train.config import OptimConfig
from zslurm.train.optim.stability import Recent, SkippedStep, StepGuard, why_skip

INF, NAN = math.inf, math.nan
SPIKES = OptimConfig(spike_factor=2.0, spike_window=4)


def after(*steps: tuple[float, float], config: OptimConfig = SPIKES) -> Recent:
    recent = Recent()
    for loss, norm in steps:
        recent = recent.taken(loss, norm, config)
    return recent


@pytest.mark.parametrize("config", [OptimConfig(), SPIKES])
@pytest.mark.parametrize(
    ("loss", "norm", "message"),
    [
        (NAN, 1.0, "loss nan is not finite"),
        (INF, 1.0, "loss inf is not finite"),
        (-INF, 1.0, "loss -inf is not finite"),
        (1.0, NAN, "gradient norm nan is not finite"),
        (1.0, INF, "gradient norm inf is not finite"),
        (NAN, NAN, "loss nan is not finite"),
        (1.0, 1.0, None),
    ],
)
def test_what_is_not_finite_is_skipped(loss: float, norm: float, message: str | None, config: OptimConfig) -> None:
    assert why_skip(Recent(), loss, norm, config) == message


def test_a_spike_is_measured_by_the_median_of_the_window() -> None:
    recent = after((4.0, 1.0), (5.0, 1.5), (6.0, 0.5), (100.0, 2.0))
    assert why_skip(recent, 11.0, 2.5, SPIKES) is None, "exactly twice the median of 4, 5, 6 and 100"
    assert why_skip(recent, 11.01, 2.5, SPIKES) == "loss 11.01 exceeds 2 x 5.5, the median of 4 steps"
    assert why_skip(recent, 11.0, 2.6, SPIKES) == "gradient norm 2.6 exceeds 2 x 1.25, the median of 4 steps"


def test_without_a_factor_nothing_is_a_spike_and_nothing_is_kept() -> None:
    recent = after((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), (1.0, 1.0), config=OptimConfig())
    assert recent == Recent()
    assert why_skip(recent, 1e30, 1e30, OptimConfig()) is None


def test_in_a_phase_nothing_is_a_spike_before_its_window_is_full() -> None:
    recent = after((1.0, 1.0), (1.0, 1.0), (1.0, 1.0))
    assert why_skip(recent, 50.0, 50.0, SPIKES) is None
    full = recent.taken(1.0, 1.0, SPIKES)
    assert why_skip(full, 50.0, 50.0, SPIKES) is not None
    guard = StepGuard(SPIKES)
    guard.recent = full
    assert guard.why_skip(50.0, 50.0, first_of_phase=True) is None


def test_skipped_steps_are_counted_in_a_row_and_do_not_enter_the_window() -> None:
    guard = StepGuard(SPIKES)
    guard.recent = after((1.0, 2.0))
    for step in (2, 3):
        guard.skip(SkippedStep(step, "a spike", 50.0, 50.0), lambda *_, **__: None)
    assert guard.recent == Recent((1.0,), (2.0,), skipped=2)
    assert guard.why_skip(math.nan, 1.0, first_of_phase=True) is not None
    assert guard.recent == Recent(skipped=2), "a new phase does not end the row"
    assert guard.why_skip(1.0, 1.0, first_of_phase=False) is None
    assert guard.recent.skipped == 0


positive = st.floats(1e-30, 1e30)


@given(st.lists(st.tuples(positive, positive), max_size=12), st.integers(1, 6), st.integers(0, 3))
def test_a_record_keeps_every_bit(steps: list[tuple[float, float]], window: int, skipped: int) -> None:
    config = OptimConfig(spike_factor=3.0, spike_window=window)
    recent = replace(after(*steps, config=config), skipped=skipped)
    assert Recent.of(json.loads(json.dumps(recent.record()))) == recent
    assert recent.losses == tuple(loss for loss, _ in steps)[-window:]


@given(st.lists(positive, min_size=1, max_size=8), positive, st.integers(1, 8))
def test_the_decision_is_the_formula(losses: list[float], loss: float, window: int) -> None:
    config = OptimConfig(spike_factor=1.5, spike_window=window)
    recent = after(*((value, 1.0) for value in losses), config=config)
    spike = len(losses) >= window and loss > 1.5 * median(losses[-window:])
    assert (why_skip(recent, loss, 1.0, config) is not None) == spike


def test_a_shorter_window_after_a_resume_looks_at_the_latest_steps() -> None:
    recent = after((100.0, 1.0), (100.0, 1.0), (1.0, 1.0), (1.0, 1.0))
    shorter = OptimConfig(spike_factor=2.0, spike_window=2)
    assert why_skip(recent, 3.0, 1.0, shorter) is not None
