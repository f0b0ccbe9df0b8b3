"""Ranks that share sequences keep a part of the activations, and the memory plan knows how much."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from benchmarks.memory import peak_bytes
from tests.train.plan.test_memory import PHASE, SMALL, config_of
from tests.train.ranks import in_group
from zslurm.train.context import blocks
from zslurm.train.context.bytes import Attention
from zslurm.train.context.context_parallel import ContextParallel
from zslurm.train.model.zaya import Zaya, build
from zslurm.train.parallel.world import DTYPES
from zslurm.train.plan import activations
from zslurm.train.plan.activations import MicrobatchMemory, microbatch_memory


class Case(NamedTuple):
    """A microbatch that ranks share."""

    dtype: str
    batch: int
    context: int
    attention: Attention
    recompute: bool = False


class Measured(NamedTuple):
    """Bytes of one rank."""

    layer: int  # kept of one layer between forward and backward; 0: not measured, where it is recomputed
    peak: int  # of the whole microbatch


CASES = (
    Case("fp32", 2, 512, "all_gather"),
    Case("fp32", 4, 254, "ring"),
    Case("fp64", 2, 512, "ring"),
    Case("bf16", 8, 256, "all_gather"),
    Case("fp64", 2, 256, "ring", recompute=True),
)


def objective(model: Zaya, case: Case, context: ContextParallel) -> torch.Tensor:
    tokens_BS = torch.zeros(case.batch, case.context, dtype=torch.long)
    return model.losses(tokens_BS, tokens_BS, rope_base=1e4, context=context)[0].objective


def kept(case: Case, layers: int, context: ContextParallel) -> int:
    """Bytes of all storages that autograd saves, parameters aside."""
    model = build(SMALL.model_copy(update={"layers": layers}), 0, dtype=DTYPES[case.dtype])
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(saved: torch.Tensor) -> torch.Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in parameters:
            found[storage.data_ptr()] = storage.nbytes(), saved  # kept, so that no address comes twice
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        objective(model, case, context)
    return sum(size for size, _ in found.values())


def measure(group: dist.ProcessGroup, cases: tuple[Case, ...]) -> list[Measured]:
    torch.set_num_threads(1)
    found = []
    for case in cases:
        context = ContextParallel(group, case.attention)
        model = build(SMALL, 0, dtype=DTYPES[case.dtype])
        model.run_with(recompute=case.recompute)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_free)  # type: ignore[no-untyped-call]  # torch's
        peak = peak_bytes(lambda: objective(model, case, context).backward())  # noqa: B023
        layer = 0 if case.recompute else kept(case, 3, context) - kept(case, 2, context)
        found.append(Measured(layer, peak))
    return found


def _free(done: torch.Tensor) -> None:
    done.grad = None


@cache
def measured(ranks: int) -> list[list[Measured]]:
    """Measure all cases, rank by rank."""
    return in_group(measure, ranks, CASES)


def planned(case: Case, ranks: int, layers: int = 3) -> MicrobatchMemory:
    phase = PHASE | {"context": case.context, "global_batch": case.batch, "micro_batch": case.batch}
    config = config_of(
        SMALL.model_copy(update={"layers": layers}),
        phases=[phase | {"context_parallel": ranks}],
        parallel={"dtype": case.dtype, "recompute": case.recompute, "context_attention": case.attention},
    )
    return microbatch_memory(config, config.phases[0], on_cpu=True)


@pytest.mark.parametrize("ranks", [2, 4])  # 1: see test_memory.py
@pytest.mark.parametrize("number", [n for n, case in enumerate(CASES) if not case.recompute])
def test_what_a_layer_keeps_is_within_five_percent_of_the_plan(ranks: int, number: int) -> None:
    case = CASES[number]
    layer = planned(case, ranks).layers - planned(case, ranks, layers=2).layers
    for rank in measured(ranks):
        assert layer == pytest.approx(rank[number].layer, rel=0.05)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("number", range(len(CASES)))
def test_the_peak_of_a_microbatch_is_within_five_percent_of_the_plan(ranks: int, number: int) -> None:
    case = CASES[number]
    most = max(rank[number].peak for rank in measured(ranks))
    assert planned(case, ranks).peak > 0.95 * most, "on every processor"
    if (
        case.dtype != "bf16"
    ):  # whose products take scratch memory that depends on the processor, see test_memory.py
        assert planned(case, ranks).peak == pytest.approx(most, rel=0.05)


@pytest.mark.parametrize("number", [2])
def test_activations_fall_as_one_over_the_ranks(number: int) -> None:
    """But for what a layer keeps of its weights: joined projections and kernels."""
    two, four = (measured(ranks)[0][number].layer for ranks in (2, 4))
    weights = 2 * four - two
    assert 0 < weights < 0.15 * four
    assert (two - weights) / 2 == four - weights


def on_gpus(documents: bool) -> MicrobatchMemory:
    phase = PHASE | {"context": 32768, "global_batch": 1, "micro_batch": 1, "context_parallel": 4}
    config = config_of(SMALL, phases=[phase], parallel={"dtype": "bf16"}, data={"isolate_documents": documents})
    return microbatch_memory(config, config.phases[0], on_cpu=False)


def test_scores_of_isolated_documents_are_planned_on_gpus() -> None:
    """No flash kernel computes them there."""
    scores = activations.SCORES_ON_GPU
    assert scores == blocks._ELEMENTS_ELSEWHERE
    rows = min(blocks._MOST_ROWS_ELSEWHERE, scores // (SMALL.query_heads * 3 * 8192))
    more = on_gpus(documents=True).attention - on_gpus(documents=False).attention
    assert more >= 3 * 4 * SMALL.query_heads * rows * 3 * 8192
