"""The parts of `python -m benchmarks gpu` that measure a training step: profile and memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu import step_memory, train_step
from benchmarks.gpu.profile import COMMUNICATION, GAPS, OTHER, PARTS, Work, divided, parts_of, trace
from benchmarks.gpu.step import TrainingStep, world_on
from tests.train.models import tiny_config
from zslurm.train.config import TrainConfig
from zslurm.train.parallel.world import World

CPU = torch.device("cpu")


def small_config(recipe: str = "", *, micro_batch: int = 2, context: int = 16, **parallel: Any) -> TrainConfig:
    """A model of two layers, in place of a recipe's."""
    phase = {
        "tokens": 10**6,
        "context": context,
        "global_batch": micro_batch,
        "micro_batch": micro_batch,
        "lr": 1e-3,
    }
    return TrainConfig.model_validate(
        {
            "model": tiny_config(hidden_size=32, layers=2, vocab_size=256),
            "phases": [phase],
            "parallel": {"dtype": "fp32", **parallel},
            "checkpoint": {"background": False},
        }
    )


@pytest.fixture
def world() -> Iterator[World]:
    with world_on("cpu") as opened:
        yield opened


# --- The profile -----------------------------------------------------------------------------------------------


def op(name: str, start: float, duration: float, thread: int = 1, **args: object) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": start, "dur": duration, "tid": thread, "args": args}


def mark(part: str, start: float, duration: float, thread: int = 1) -> dict[str, Any]:
    return op(f"part: {part}", start, duration, thread) | {"cat": "user_annotation"}


def launched(number: int, at: float, start: float, duration: float, name: str = "k", thread: int = 1) -> list[Any]:
    """A launch on a thread of the host, and the kernel."""
    args = {"correlation": number}
    return [
        op("cudaLaunchKernel", at, 1, thread) | {"cat": "cuda_runtime", "args": args},
        op(name, start, duration, 7) | {"cat": "kernel", "args": args},
    ]


def node(name: str, start: float, duration: float, number: int) -> dict[str, Any]:
    """A node of autograd, evaluated on its own thread."""
    name = f"autograd::engine::evaluate_function: {name}"
    return op(name, start, duration, 2, **{"Sequence number": number, "Fwd thread id": 1})


TRACE = [
    mark("attention", 0, 20),
    op("aten::detach", 1, 1, **{"Sequence number": 5}),
    mark("convolutions", 8, 8),
    op("aten::mm", 9, 5, **{"Sequence number": 5}),  # the last of its number: it made the node
    *launched(1, 10, 100, 10),
    *launched(2, 18, 110, 20),  # behind the convolutions, in attention
    node("MmBackward0", 200, 10, 5),
    *launched(3, 205, 240, 10, thread=2),
    node("torch::autograd::AccumulateGrad", 211, 9, -1),
    *launched(4, 215, 250, 5, thread=2),
    node("CheckpointHook", 220, 20, 6),
    mark("experts", 225, 10, thread=2),  # computed again
    op("aten::mm", 226, 5, 2, **{"Sequence number": 5}),
    *launched(5, 230, 260, 10, thread=2),
    *launched(6, 300, 265, 35, name="ncclDevKernel_ReduceScatter"),
    *launched(7, 310, 320, 10),  # in no range
]


def test_work_belongs_to_the_range_that_launched_it_and_gradients_to_their_forward() -> None:
    found = {part: microseconds * 1e6 for part, microseconds in parts_of(TRACE, on_cpu=False).items()}
    expected = {
        "convolutions": 10 + 10,
        "attention": 20,
        "sums of gradients": 5,
        "experts": 10,
        COMMUNICATION: 30,  # what is not under the experts
        OTHER: 10,
        GAPS: 110 + 5 + 20,
    }
    assert {part: each for part, each in found.items() if each} == pytest.approx(expected)
    assert sum(found.values()) == pytest.approx(330 - 100)


def test_a_kernel_whose_launch_is_not_in_the_trace_belongs_to_its_operator() -> None:
    kernel = op("k", 50, 5, 7) | {"cat": "kernel", "args": {"correlation": 9, "External id": 3}}
    events = [mark("head", 0, 9), op("aten::mm", 1, 2, **{"External id": 3}), kernel]
    assert parts_of(events, on_cpu=False)["head"] == pytest.approx(5e-6)


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 20), st.sampled_from(PARTS[:-1])).map(
            lambda each: Work(each[0], each[0] + each[1], each[2])
        )
    )
)
def test_every_moment_is_in_one_part(work: list[Work]) -> None:
    spent = divided(work)
    whole = max((each.end for each in work), default=0) - min((each.start for each in work), default=0)
    assert sum(spent.values()) == pytest.approx(whole)
    for moment in (half + 0.5 for half in range(70)):
        here = {each.part for each in work if each.start < moment < each.end}
        if here == {COMMUNICATION}:
            assert spent[COMMUNICATION] > 0
    assert all(each >= 0 for each in spent.values())


@pytest.mark.parametrize("recompute", [False, True])
def test_a_profiled_step_is_divided_among_its_parts(world: World, recompute: bool) -> None:
    step = TrainingStep(small_config(recompute=recompute), world)
    step.run()
    spent = parts_of(trace(step, world), on_cpu=True)
    assert spent.keys() == set(PARTS)
    assert all(spent[part] > 0 for part in PARTS if part not in (OTHER, GAPS))
    assert spent[OTHER] < 0.2 * sum(spent.values()), "most of backward is attributed"
    assert not step.model.layers[0]._forward_hooks, "and the marks are gone"


def test_a_step_of_the_benchmark_trains(world: World) -> None:
    step = TrainingStep(small_config(), world)
    losses = [step.run() for _ in range(8)]
    assert losses[-1] < losses[0]


# --- Memory ----------------------------------------------------------------------------------------------------


def test_the_memory_of_a_step_is_beside_the_plans(world: World) -> None:
    row = step_memory.measured(small_config(micro_batch=4, context=64), world)
    assert row["ratio"] == row["allocated_bytes"] / row["planned_bytes"] == pytest.approx(1, abs=0.15)


def test_the_largest_microbatch_that_fits_is_taken() -> None:
    fits = step_memory.largest_that_fits("zaya1-1b", 0.9 * 80 * 2**30, recompute=False, on_cpu=False)
    assert fits is not None and fits.phases[0].micro_batch == 4
    assert step_memory.largest_that_fits("zaya1-8b", 0.9 * 80 * 2**30, recompute=True, on_cpu=False) is None


def test_a_recipe_that_does_not_fit_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_memory, "largest_that_fits", lambda *_, **__: None)
    rows = list(step_memory.rows(CPU))
    assert [row["problem"] for row in rows] == ["does not fit on this card by the plan"] * 2


# --- Against transformers --------------------------------------------------------------------------------------


@pytest.fixture
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_step, "SAMPLES", 1)


@pytest.mark.usefixtures("few_samples")
def test_a_peer_that_is_missing_costs_only_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise ImportError("cannot import name 'ZayaForCausalLM'")

    monkeypatch.setattr(train_step, "reference_model", missing)
    ours, theirs = train_step.rows(CPU)
    assert ours["seconds"].keys() == {"ours"}
    assert theirs["problem"] == "ImportError: cannot import name 'ZayaForCausalLM'"


@pytest.mark.usefixtures("few_samples")
def test_both_sides_of_the_training_step_compute_the_same() -> None:
    _, losses, timed = train_step.rows(CPU)
    assert losses["losses"]["ours"] == pytest.approx(losses["losses"]["transformers"], abs=0.02)
    assert timed["ratios"]["transformers"] == timed["seconds"]["transformers"] / timed["seconds"]["ours"]


def test_the_recipes_model_can_be_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rule for skipped tokens is another one: what is built has the reference's."""
    built = []
    monkeypatch.setattr(train_step, "our_model", lambda config, device: built.append(config) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(train_step.rows(torch.device("meta")))
    assert (built[0].skip_rule, built[0].layers) == ("zero", 20)
