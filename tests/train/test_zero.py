"""ZeRO-1's flat buffers: the same sums, norms and weights however many ranks divide them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from tests.train.ranks import in_group
from tests.train.sharded import TABLE, Few, backward, shards_of, values_of
from train.config import OptimConfig
from train.optim.adamw import ShardedAdamW
from train.shapes import Kind, TensorInfo


@pytest.fixture(scope="module")
def alone() -> Iterator[dist.ProcessGroup]:
    """A group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_parameters_become_views_of_one_buffer_and_keep_their_values(alone: dist.ProcessGroup) -> None:
    model = Few()
    shards = shards_of(model, alone)
    for row, place in zip(TABLE, shards.layout.placements, strict=True):
        parameter = model.get_parameter(row.name)
        torch.testing.assert_close(parameter.data, values_of(row), rtol=0, atol=0)
        assert parameter.data_ptr() == shards.weights[place.offset :].data_ptr()
        assert parameter.data_ptr() % 64 == shards.weights.data_ptr() % 64, "tensors start on 64 bytes"
    padding = torch.ones_like(shards.weights)
    for place in shards.layout.placements:
        padding[place.offset : place.offset + place.numel] = 0
    assert (shards.weights * padding).abs().max() == 0


def test_backward_adds_to_the_flat_buffer_and_frees_each_gradient(alone: dist.ProcessGroup) -> None:
    model = Few()
    shards = shards_of(model, alone)
    for seed in (1, 2):
        backward(model, seed)
        assert all(parameter.grad is None for parameter in model.parameters())
    for row, place in zip(TABLE, shards.layout.placements, strict=True):
        found = shards.gradients[place.offset : place.offset + place.numel].view(row.shape)
        torch.testing.assert_close(found, values_of(row, 1) + values_of(row, 2), rtol=0, atol=0)
    shards.zero_gradients()
    assert shards.gradients.abs().max() == 0


def test_gradients_of_bf16_weights_are_summed_in_fp32(alone: dist.ProcessGroup) -> None:
    """256 + 1 is 256 in bf16: a sum in that format would lose every small gradient."""
    table = (TensorInfo("matrix", (4, 4), Kind.MATRIX),)
    for dtype, expected in ((torch.float32, 258.0), (torch.bfloat16, 256.0)):
        model = Few(table, torch.bfloat16)
        shards = shards_of(model, alone, table, dtype)
        for gradient in (256.0, 1.0, 1.0):
            (model.get_parameter("matrix") * gradient).float().sum().backward()
        assert shards.gradients.dtype == dtype
        assert shards.gradients[:16].float().tolist() == [expected] * 16
        shards.reduce_gradients()
        assert shards.master_gradient.dtype == torch.float32
        assert shards.master_gradient[:16].tolist() == [expected] * 16


def test_masters_are_fp32_and_weights_are_their_rounding(alone: dist.ProcessGroup) -> None:
    model = Few(dtype=torch.bfloat16)
    shards = shards_of(model, alone)
    assert shards.master.dtype == torch.float32
    assert torch.equal(shards.master, shards.weights.float())
    shards.master += 1e-4  # below what bf16 can tell for most of the values
    shards.gather_weights()
    assert torch.equal(shards.weights, shards.master.to(torch.bfloat16))
    assert not torch.equal(shards.weights.float(), shards.master)
    first = model.get_parameter("matrix").data.flatten()
    assert torch.equal(first, shards.weights[: first.numel()]), "the model sees them"


def test_an_fp64_model_is_fp64_throughout(alone: dist.ProcessGroup) -> None:
    shards = shards_of(Few(dtype=torch.float64), alone)
    assert {shards.master.dtype, shards.gradients.dtype, shards.master_gradient.dtype} == {torch.float64}


@pytest.mark.parametrize("limit", [0.5, 3.0])
def test_clipping_is_torchs(alone: dist.ProcessGroup, limit: float) -> None:
    model, reference = Few(), Few()
    shards = shards_of(model, alone)
    backward(model, 1)
    shards.reduce_gradients()
    norm = shards.clip_gradients(limit)
    backward(reference, 1)
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), limit)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
    assert norm.item() > limit
    for row, place in zip(TABLE, shards.layout.placements, strict=True):
        found = shards.master_gradient[place.offset : place.offset + place.numel].view(row.shape)
        torch.testing.assert_close(found, reference.get_parameter(row.name).grad, rtol=1e-5, atol=0)


@pytest.mark.parametrize("limit", [None, 1e6])
def test_short_gradients_keep_every_bit(alone: dist.ProcessGroup, limit: float | None) -> None:
    model = Few()
    shards = shards_of(model, alone)
    backward(model, 1)
    shards.reduce_gradients()
    before = shards.master_gradient.clone()
    assert shards.clip_gradients(limit).item() == pytest.approx(before.norm().item(), rel=1e-6)
    assert torch.equal(shards.master_gradient, before)


def test_a_gradient_that_is_not_finite_is_told_by_its_norm(alone: dist.ProcessGroup) -> None:
    model = Few()
    shards = shards_of(model, alone)
    shards.gradients[3] = float("nan")
    shards.reduce_gradients()
    assert not torch.isfinite(shards.clip_gradients(1.0))


# ------------------------------------------------------------------------------------------- several processes

MICROBATCHES = 6


def one_step(
    group: dist.ProcessGroup, table: tuple[TensorInfo, ...], dtype: torch.dtype, gradient_dtype: torch.dtype
) -> tuple[dict[str, NDArray[np.float32]], float, tuple[int, int]]:
    """Two optimizer steps on microbatches that the ranks share; returns weights, norm, and the chunk's share."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    model = Few(table, dtype)
    shards = shards_of(model, group, table, gradient_dtype)
    optimizer = ShardedAdamW(shards, OptimConfig())
    for step in range(2):
        shards.zero_gradients()
        for microbatch in range(rank, MICROBATCHES, size):
            backward(model, 10 * step + microbatch, whole=True)
        shards.reduce_gradients()
        norm = shards.clip_gradients(1e9)
        optimizer.step(1e-2)
        shards.gather_weights()
    weights = {name: parameter.detach().float().numpy() for name, parameter in model.named_parameters()}
    return weights, norm.item(), (sum(extent.numel for extent in shards.extents), shards.layout.chunk)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3])
def test_any_number_of_ranks_makes_the_same_steps(
    alone: dist.ProcessGroup, ranks: int, dtype: torch.dtype
) -> None:
    """The gradients are whole numbers, so that no order of their sum can show."""
    weights, norm, (owned, _) = one_step(alone, TABLE, dtype, torch.float32)
    results = in_group(one_step, ranks, TABLE, dtype, torch.float32)
    for other_weights, other_norm, _ in results:
        assert other_norm == norm
        for name, value in weights.items():
            assert np.array_equal(other_weights[name], value), name
    assert sum(part for _, _, (part, _) in results) == owned, "each element has one owner"
    assert {chunk for _, _, (_, chunk) in results} == {results[0][2][1]}, "all chunks have one length"


def test_a_rank_that_owns_only_padding_takes_part() -> None:
    table = (TensorInfo("bias", (3,), Kind.BIAS),)
    results = in_group(one_step, 3, table, torch.float32, torch.float32)
    assert [part for _, _, (part, _) in results] == [3, 0, 0]
    assert np.array_equal(results[0][0]["bias"], results[2][0]["bias"])
    assert not np.array_equal(results[0][0]["bias"], values_of(table[0])), "it was trained"


def test_gradients_can_be_reduced_in_bf16() -> None:
    """Small whole numbers fit into bf16: what is reduced is exact, and what comes of it equals the fp32 way."""
    exact, short = (
        in_group(one_step, 2, TABLE, torch.float32, dtype)[1][0] for dtype in (torch.float32, torch.bfloat16)
    )
    for name, value in exact.items():
        assert np.array_equal(short[name], value), name
