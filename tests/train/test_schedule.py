"""The plan of a run: every step in exactly one phase, no sequence twice, and a learning rate without jumps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from zslurm.train.data.shares import Shares
from zslurm.train.errors import ConfigError
from zslurm.train.schedule import Plan, Position, check_ranks, compare, learning_rate
from zslurm.train.sections.phases import PhaseConfig

CONTEXT = 8


def phase(steps: int = 10, *, context: int = CONTEXT, batch: int = 4, **values: Any) -> PhaseConfig:
    keys = {"tokens": steps * context * batch, "context": context, "global_batch": batch, "micro_batch": 1}
    return PhaseConfig.model_validate(keys | {"lr": 1e-3, "final_lr": 1e-4} | values)


def ramped(*ramp: tuple[int, int], tokens: int, batch: int = 8, **values: Any) -> PhaseConfig:
    """A phase with a batch ramp of (until_tokens, global_batch)."""
    stages = [{"until_tokens": until, "global_batch": size} for until, size in ramp]
    return phase(batch=batch, **{"tokens": tokens, "batch_ramp": stages, "final_lr": 0.0} | values)


def rates(here: PhaseConfig) -> list[float]:
    return [learning_rate(here, step) for step in range(here.steps)]


def places(plan: Plan) -> list[Position]:
    return [plan.at(step) for step in range(plan.total_steps)]


# ---------------------------------------------------------------------------------------------- learning rate


def test_the_warm_up_is_linear_and_reaches_the_peak_with_its_last_step() -> None:
    assert rates(phase(10, warmup_steps=4))[:4] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3], rel=1e-12)


def test_a_re_warm_starts_from_a_given_rate() -> None:
    here = phase(10, warmup_steps=4, warmup_from=2e-4)
    assert rates(here)[:4] == pytest.approx([4e-4, 6e-4, 8e-4, 1e-3], rel=1e-12)


def test_the_cosine_starts_at_the_peak_and_ends_at_the_final_rate() -> None:
    found = rates(phase(12, warmup_steps=3))[3:]
    assert found[0] == pytest.approx(1e-3, rel=1e-12)
    assert found[-1] == pytest.approx(1e-4, rel=1e-12)
    assert found[4] == pytest.approx((1e-3 + 1e-4) / 2, rel=1e-12), "half-way in time is half-way down"
    expected = [1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi * i / 8)) for i in range(9)]
    assert found == pytest.approx(expected, rel=1e-12)


def test_the_line_falls_by_the_same_amount_in_every_step() -> None:
    found = rates(phase(12, warmup_steps=2, schedule="linear"))[2:]
    assert found == pytest.approx([1e-3 - 1e-4 * i for i in range(10)], rel=1e-12)


def test_wsd_stays_at_the_peak_and_falls_at_the_end() -> None:
    found = rates(phase(20, warmup_steps=2, schedule="wsd", decay_steps=4, final_lr=2e-4))
    assert found[2:16] == [1e-3] * 14
    assert found[16:] == pytest.approx([6e-4, 1e-3 - 8e-4 * math.sqrt(0.5), 1e-3 - 8e-4 * math.sqrt(0.75), 2e-4])


def test_a_constant_rate_never_falls() -> None:
    assert rates(phase(5, warmup_steps=2, schedule="constant", final_lr=0.0)) == [5e-4, 1e-3, 1e-3, 1e-3, 1e-3]


def scheduled(make: Any, steps: int, lr: float = 1e-3) -> list[float]:
    """The rates that a scheduler of torch's kind gives to `steps` steps."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=lr)
    scheduler, found = make(optimizer), []
    for _ in range(steps):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


def test_the_cosine_and_the_line_are_torchs() -> None:
    cosine = scheduled(lambda it: lr_scheduler.CosineAnnealingLR(it, T_max=29, eta_min=1e-4), 30)
    assert rates(phase(30)) == pytest.approx(cosine, rel=1e-9)
    line = scheduled(lambda it: lr_scheduler.LinearLR(it, 1.0, 0.1, total_iters=29), 30)
    assert rates(phase(30, schedule="linear")) == pytest.approx(line, rel=1e-9)
    warmup = scheduled(lambda it: lr_scheduler.LinearLR(it, 0.2, 1.0, total_iters=4), 5)
    assert rates(phase(30, warmup_steps=5))[:5] == pytest.approx(warmup, rel=1e-9)


def test_the_decay_of_wsd_is_that_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = scheduled(
        lambda it: transformers.get_wsd_schedule(
            it, num_warmup_steps=0, num_decay_steps=8, num_training_steps=30, decay_type="1-sqrt", min_lr_ratio=0.1
        ),
        31,
    )
    # It has the peak once more, before the decay, and its last rate is that of the step after the end.
    assert rates(phase(30, schedule="wsd", decay_steps=8)) == pytest.approx(theirs[1:], rel=1e-9)


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (3, 3), (4, 3)])
def test_the_shortest_phases_have_a_rate_too(steps: int, warmup: int) -> None:
    for schedule in ("cosine", "linear"):
        here = phase(steps, warmup_steps=warmup, schedule=schedule)
        assert learning_rate(here, steps - 1) == pytest.approx(1e-3, rel=1e-12)


@st.composite
def schedules(draw: st.DrawFn) -> PhaseConfig:
    steps = draw(st.integers(1, 60))
    warmup = draw(st.integers(0, steps))
    schedule = draw(st.sampled_from(["cosine", "linear", "wsd", "constant"]))
    if schedule == "wsd" and warmup == steps:
        warmup -= 1
    return phase(
        steps,
        schedule=schedule,
        warmup_steps=warmup,
        warmup_from=draw(st.floats(0, 1e-3)) if warmup else 0.0,
        decay_steps=draw(st.integers(1, steps - warmup)) if schedule == "wsd" else 0,
        final_lr=0.0 if schedule == "constant" else draw(st.floats(0, 1e-3)),
    )


@given(schedules())
def test_the_rate_has_no_jumps_and_ends_where_it_should(here: PhaseConfig) -> None:
    found = rates(here)
    top, rising = here.warmup_steps, here.lr - here.warmup_from
    for step in range(1, here.steps):
        change = found[step] - found[step - 1]
        if step < top:
            assert change == pytest.approx(rising / top, rel=1e-6, abs=1e-12)
        else:
            left = here.decay_steps if here.schedule == "wsd" else max(1, here.steps - top - 1)
            steepest = {
                "cosine": math.pi / 2 / left,
                "linear": 1 / left,
                "wsd": math.sqrt(1 / left),
                "constant": 0,
            }
            assert -(here.lr - here.final_lr) * steepest[here.schedule] - 1e-12 <= change <= 1e-12
    low = min(here.final_lr if here.schedule != "constant" else here.lr, here.warmup_from if top else here.lr)
    assert all(low - 1e-12 <= rate <= here.lr + 1e-12 for rate in found)
    if here.schedule == "wsd" or (here.schedule != "constant" and here.steps - top > 1):
        assert found[-1] == pytest.approx(here.final_lr, rel=1e-9, abs=1e-15)


# --------------------------------------------------------------------------------------- phases and batch ramps


def test_a_phase_whose_tokens_do_not_fill_its_last_step_takes_the_whole_step() -> None:
    here = PhaseConfig(tokens=100, context=8, global_batch=4, micro_batch=1, lr=1e-3)
    assert here.steps == 4
    assert Plan((here,)).total_tokens == 128


def test_a_ramp_takes_whole_steps_and_the_next_stage_begins_where_it_ends() -> None:
    """2 sequences of 8 up to 40 tokens: 3 steps, 48 tokens; 4 up to 100: 2 steps, 112; then 8: 2 steps, 240."""
    plan = Plan((ramped((40, 2), (100, 4), tokens=200),))
    found = places(plan)
    assert [place.global_batch for place in found] == [2, 2, 2, 4, 4, 8, 8]
    assert [place.step_tokens for place in found] == [16, 16, 16, 32, 32, 64, 64]
    assert [place.sequence for place in found] == [0, 2, 4, 6, 10, 14, 22]
    assert [place.tokens_before for place in found] == [0, 16, 32, 48, 80, 112, 176]
    assert [place.microbatches for place in found] == [2, 2, 2, 4, 4, 8, 8]
    assert (plan.total_steps, plan.total_tokens) == (7, 240)


def test_a_plan_of_a_million_steps_is_found_without_making_them() -> None:
    """ZAYA1's first two phases with a ramp: hundreds of thousands of steps."""
    first = ramped((10**10, 512), (10**11, 2048), tokens=8 * 10**12, context=4096, batch=4096)
    plan = Plan((first, phase(tokens=4 * 10**12, context=4096, batch=4096)))
    ramp = -(-(10**10) // (512 * 4096)) * 512, 2048
    assert plan.at(5000).sequence == ramp[0] + (5000 - ramp[0] // 512) * ramp[1]
    last = plan.at(plan.total_steps - 1)
    assert last.tokens_before + last.step_tokens == plan.total_tokens
    assert 0 <= plan.total_tokens - 12 * 10**12 < 2 * 4096 * 4096


@st.composite
def phases(draw: st.DrawFn) -> PhaseConfig:
    context = draw(st.sampled_from([8, 16]))
    micro = draw(st.integers(1, 2))
    stages, until = [], 0
    for batch in draw(st.lists(st.integers(1, 5), max_size=3)):
        # At least the largest step apart, so that no stage is overtaken by the one before it.
        until += draw(st.integers(1, 50)) + 5 * micro * context
        stages.append({"until_tokens": until, "global_batch": batch * micro})
    tokens = until + 5 * micro * context + draw(st.integers(1, 200))
    batch = draw(st.integers(1, 5)) * micro
    return phase(context=context, batch=batch, tokens=tokens, micro_batch=micro, batch_ramp=stages)


@given(st.lists(phases(), min_size=1, max_size=4))
def test_every_step_lies_in_one_phase_and_all_counts_add_up(phases: list[PhaseConfig]) -> None:
    """Counted one step after the other, by the ramp's rule."""
    plan = Plan(tuple(phases))
    found = iter(places(plan))
    tokens = 0
    for index, here in enumerate(phases):
        inside, sequence = 0, 0
        limits = [(stage.until_tokens, stage.global_batch) for stage in here.batch_ramp]
        while sequence * here.context < here.tokens:
            batch = next((size for until, size in limits if sequence * here.context < until), here.global_batch)
            place = next(found)
            assert (place.phase_index, place.step_in_phase) == (index, inside)
            assert place.phase is here
            assert (place.global_batch, place.sequence) == (batch, sequence)
            assert place.tokens_before == tokens
            assert place.microbatches * here.micro_batch == batch
            inside, sequence = inside + 1, sequence + batch
            tokens += batch * here.context
        assert inside == here.steps
    assert next(found, None) is None
    assert plan.total_tokens == tokens
    for step in (-1, plan.total_steps):
        with pytest.raises(IndexError, match=f"there is no step {step}"):
            plan.at(step)


@given(st.lists(phases(), min_size=1, max_size=4))
def test_tokens_of_any_number_of_steps(phases: list[PhaseConfig]) -> None:
    plan = Plan(tuple(phases))
    found = places(plan)
    for steps in range(plan.total_steps + 1):
        assert plan.tokens_after(steps) == sum(place.step_tokens for place in found[:steps])


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"warmup_steps": 11}, "warmup_steps (11) exceeds the phase's 10 steps"),
        (
            {"warmup_steps": 6, "schedule": "wsd", "decay_steps": 5},
            "warmup_steps (6) and decay_steps (5) exceed the phase's 10 steps together",
        ),
        ({"schedule": "wsd"}, "decay_steps: required by schedule wsd"),
        ({"decay_steps": 2}, "decay_steps (2) belongs to schedule wsd, not cosine"),
        ({"final_lr": 2e-3}, "final_lr (0.002) must not exceed lr (0.001)"),
        ({"schedule": "constant"}, "final_lr (0.0001) is never reached: schedule is constant"),
        ({"warmup_from": 2e-3, "warmup_steps": 1}, "warmup_from (0.002) must not exceed lr (0.001)"),
        ({"warmup_from": 1e-4}, "warmup_from (0.0001) needs warmup_steps"),
        ({"micro_batch": 3}, "global_batch (4) must be a multiple of micro_batch (3)"),
    ],
)
def test_a_phase_that_does_not_add_up_is_refused(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match="value_error") as refused:
        phase(**values)
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("ramp", "problem"),
    [
        ([(100, 3)], "batch_ramp[0].global_batch (3) must be a multiple of micro_batch (2)"),
        ([(100, 2), (100, 4)], "batch_ramp[1].until_tokens (100) must exceed the 100 of the stage before"),
        ([(200, 2)], "batch_ramp[0].until_tokens (200) must be below the phase's tokens (200)"),
        ([(20, 8), (60, 2)], "batch_ramp[1] has no step: the steps before it train on 60 tokens or more"),
        ([(195, 8)], "global_batch has no step: those of batch_ramp train on all 200 tokens"),
    ],
)
def test_a_ramp_that_does_not_add_up_is_refused(ramp: list[tuple[int, int]], problem: str) -> None:
    with pytest.raises(ValueError, match="value_error") as refused:
        ramped(*ramp, tokens=200, micro_batch=2)
    assert problem in str(refused.value)


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_the_note_on_uneven_shares_is_of_the_shares_that_ranks_get(micro_batch: int) -> None:
    here = phase(batch=8, micro_batch=micro_batch)
    for ranks in range(1, 9):
        sizes, notes = Shares(8, micro_batch, ranks).sizes, check_ranks([here], ranks, ranks)
        assert sum(f"at most {max(sizes)} sequence" in line for line in notes) == (len(set(sizes)) > 1)


# --------------------------------------------------------------------------------- phases that changed on the way

PHASES = (ramped((40, 2), (100, 4), tokens=200, name="first"), phase(10, name="second"))


def changes(done: int, *phases: PhaseConfig) -> list[str]:
    return compare(Plan(PHASES).record(), Plan(phases), done)


@given(st.integers(0, 17))
def test_unchanged_phases_have_nothing_to_tell(done: int) -> None:
    assert changes(done, *PHASES) == []
    assert changes(done, *(here.model_copy(update={"lr": 2e-3}) for here in PHASES)) == []


def test_what_lies_ahead_may_change_and_is_told() -> None:
    assert changes(9, PHASES[0], phase(12, name="second")) == ["phases[1] (second) now has 12 steps, and had 10"]
    assert changes(7, PHASES[0]) == ["phases[1] (second) is gone"]
    third = phase(3, name="third")
    assert changes(17, *PHASES, third) == ["phases[2] (third) is new, with 3 steps"]
    longer = ramped((40, 2), (100, 4), tokens=1000, name="first")
    assert changes(7, longer, PHASES[1]) == ["phases[0] (first) now has 19 steps, and had 7"]
    steeper = ramped((40, 2), tokens=200, name="first")
    assert changes(3, steeper, PHASES[1]) == ["phases[0] (first) now has 6 steps, and had 7"]
    far = phase(context=16, tokens=16 * 4 * 10, name="second")
    assert changes(7, PHASES[0], far) == ["phases[1] (second) now has a context of 16, and had 8"]
    wider = ramped((40, 2), (112, 4), tokens=112 + 2 * 16 * 8, batch=16, name="first")
    assert changes(5, wider, PHASES[1]) == ["phases[0] (first) now has other batches in its steps"]


@pytest.mark.parametrize(
    ("done", "phases", "problem"),
    [
        (
            8,
            (ramped((40, 2), (100, 4), tokens=1000, name="first"), PHASES[1]),
            "phases[0] (first) now has 19 steps",
        ),
        (
            4,
            (ramped((40, 2), tokens=200, name="first"), PHASES[1]),
            "phases[0] (first) now has 6 steps, and had 7",
        ),
        (2, (phase(batch=8, tokens=200, name="first"), PHASES[1]), "phases[0] (first) now has 4 steps, and had 7"),
        (12, (PHASES[0], phase(4, name="second")), "phases[1] (second) now has 4 steps, and had 10"),
        (8, (PHASES[0],), "phases[1] (second) is gone"),
        (9, (PHASES[0], phase(20, context=4, name="second")), "phases[1] (second) now has 20 steps, and had 10"),
    ],
)
def test_steps_that_are_done_do_not_move(done: int, phases: tuple[PhaseConfig, ...], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        changes(done, *phases)
    message = str(refused.value)
    assert message.startswith(problem)
    assert f"the {done} steps that are done" in message
    assert "init: ckpt:DIR" in message


# ---------------------------------------------------------------------------------------------- ranks of a phase


@pytest.mark.parametrize(("batch", "size", "ranks"), [(8, 1, 8), (8, 2, 16), (2, 8, 16), (24, 4, 16), (1, 8, 8)])
def test_a_batch_that_divides_evenly_has_no_note(batch: int, size: int, ranks: int) -> None:
    assert check_ranks([phase(batch=batch, context=16, context_parallel=size)], ranks, 8) == []


def test_sequences_that_ranks_cannot_share_evenly_are_noted_in_every_segment() -> None:
    here = ramped((128, 8), tokens=1280, batch=16, context=16, context_parallel=2)
    assert check_ranks([phase(batch=16), here], 6, 2) == [
        "phases[0].global_batch (16) gives 6 data-parallel ranks at most 3 sequences each and 2.67 in the mean: "
        "they wait for 11.1 % of the time; a multiple of 6 divides evenly",
        "phases[1].batch_ramp[0].global_batch (8) gives 3 data-parallel ranks at most 3 sequences each and "
        "2.67 in the mean: they wait for 11.1 % of the time; a multiple of 3 divides evenly",
        "phases[1].global_batch (16) gives 3 data-parallel ranks at most 6 sequences each and 5.33 in the mean: "
        "they wait for 11.1 % of the time; a multiple of 3 divides evenly",
    ]


@pytest.mark.parametrize(
    ("batch", "size", "ranks", "ranks_per_node", "problem"),
    [
        (64, 16, 64, 8, "phases[0].context_parallel (16) exceeds the 8 ranks of a node, .*; use 8"),
        (64, 6, 64, 8, r"phases[0].context_parallel (6) does not divide the 8 ranks of a node; use 4"),
        (64, 2, 64, 1, r"phases[0].context_parallel (2) exceeds the 1 rank of a node, .*; use 1"),
        (64, 4, 6, 4, r"phases[0].context_parallel (4) does not divide the run's 6 ranks; use 2"),
        (9, 1, 32, 8, r".*data-parallel ranks (32); set phases[0].context_parallel to 4, or use at most 1 node"),
        (3, 1, 64, 8, r".*data-parallel ranks (64); use at most 3 ranks"),
        (31, 2, 64, 8, r".*ranks (32); set phases[0].context_parallel to 4, or use at most 7 nodes"),
    ],
)
def test_a_phase_without_a_place_or_without_work_names_the_nearest_that_has(
    batch: int, size: int, ranks: int, ranks_per_node: int, problem: str
) -> None:
    pattern = problem.replace("[", r"\[").replace("]", r"\]").replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(ConfigError, match=f"^{pattern}$"):
        check_ranks([phase(batch=batch, context=64, context_parallel=size)], ranks, ranks_per_node)


@given(st.integers(1, 200), st.integers(1, 16), st.integers(1, 8), st.integers(1, 8))
def test_what_a_refusal_proposes_is_accepted(batch: int, size: int, nodes: int, ranks_per_node: int) -> None:
    here = phase(batch=batch, context=64, context_parallel=size)
    try:
        check_ranks([here], nodes * ranks_per_node, ranks_per_node)
    except ConfigError as error:
        message = str(error)
        if "fewer sequences" not in message:
            nearest = int(message.rpartition("use ")[2])
            message = ""
            here = here.model_copy(update={"context_parallel": nearest, "global_batch": nodes * ranks_per_node})
        elif "set phases" in message:
            better = int(message.partition("context_parallel to ")[2].partition(",")[0])
            here = here.model_copy(update={"context_parallel": better})
        else:
            return
        check_ranks([here], nodes * ranks_per_node, ranks_per_node)
