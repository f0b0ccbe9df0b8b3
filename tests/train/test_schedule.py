"""The plan of a run: every step in exactly one phase, no sequence twice, and a learning rate without jumps."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.config import PhaseConfig
from train.optim.schedule import Plan, learning_rate


def phase(steps: int = 10, *, context: int = 8, batch: int = 4, **values: float) -> PhaseConfig:
    keys = {"tokens": steps * context * batch, "context": context, "global_batch": batch, "micro_batch": 1}
    return PhaseConfig.model_validate(keys | {"lr": 1e-3, "final_lr": 1e-4} | values)


def test_the_warm_up_is_linear_and_reaches_the_peak_with_its_last_step() -> None:
    rates = [learning_rate(phase(10, warmup_steps=4), step) for step in range(4)]
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3], rel=1e-12)


def test_the_cosine_starts_at_the_peak_and_ends_at_the_final_rate() -> None:
    here = phase(12, warmup_steps=3)
    rates = [learning_rate(here, step) for step in range(3, 12)]
    assert rates[0] == pytest.approx(1e-3, rel=1e-12)
    assert rates[-1] == pytest.approx(1e-4, rel=1e-12)
    assert rates[4] == pytest.approx((1e-3 + 1e-4) / 2, rel=1e-12), "half-way in time is half-way down"
    expected = [1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi * i / 8)) for i in range(9)]
    assert rates == pytest.approx(expected, rel=1e-12)


def test_without_warm_up_the_first_step_has_the_peak() -> None:
    assert learning_rate(phase(5), 0) == pytest.approx(1e-3, rel=1e-12)


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (3, 3), (4, 3)])
def test_the_shortest_phases_have_a_rate_too(steps: int, warmup: int) -> None:
    here = phase(steps, warmup_steps=warmup)
    assert learning_rate(here, steps - 1) == pytest.approx(1e-3, rel=1e-12)


phases = st.lists(
    st.builds(
        phase,
        st.integers(1, 7),
        context=st.sampled_from([8, 16]),
        batch=st.integers(1, 5),
        warmup_steps=st.integers(0, 1),
    ),
    min_size=1,
    max_size=5,
)


@given(phases)
def test_every_step_lies_in_exactly_one_phase(phases: list[PhaseConfig]) -> None:
    plan = Plan(tuple(phases))
    places = [plan.at(step) for step in range(plan.total_steps)]
    expected = [(index, inside) for index, phase in enumerate(phases) for inside in range(phase.steps)]
    assert [(place.phase_index, place.step_in_phase) for place in places] == expected
    assert all(place.phase is phases[place.phase_index] for place in places)
    tokens = 0
    for place in places:
        assert place.tokens_before == tokens
        tokens += place.phase.step_tokens
    with pytest.raises(IndexError, match=f"there is no step {plan.total_steps}"):
        plan.at(plan.total_steps)


@given(phases)
def test_no_sequence_of_a_context_is_used_twice_and_none_is_left_out(phases: list[PhaseConfig]) -> None:
    plan = Plan(tuple(phases))
    used: dict[int, list[int]] = {}
    for step in range(plan.total_steps):
        place = plan.at(step)
        counters = range(place.counter, place.counter + place.phase.global_batch)
        used.setdefault(place.phase.context, []).extend(counters)
    for counters in used.values():
        assert counters == list(range(len(counters)))


@given(phases)
def test_the_rate_stays_between_its_ends(phases: list[PhaseConfig]) -> None:
    plan = Plan(tuple(phases))
    for step in range(plan.total_steps):
        place = plan.at(step)
        assert 0 < place.lr <= place.phase.lr * (1 + 1e-12)
        if place.step_in_phase >= place.phase.warmup_steps:
            assert place.lr >= place.phase.final_lr * (1 - 1e-12)


def test_a_phase_whose_tokens_do_not_fill_its_last_step_takes_the_whole_step() -> None:
    here = PhaseConfig(tokens=100, context=8, global_batch=4, micro_batch=1, lr=1e-3)
    assert (here.steps, here.step_tokens) == (4, 32)
