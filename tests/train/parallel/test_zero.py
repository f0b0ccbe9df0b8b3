"""ZeRO-1's buffers: the same sums, norms and weights however many ranks divide them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from tests.train.ranks import in_group
from tests.train.sharded import TABLE, Few, backward, blamed, by_tensor, gradient_of, shards_of, values_of
from zslurm.train.config import MuonConfig, OptimConfig
from zslurm.train.optim.sharded import ShardedOptimizer
from zslurm.train.parallel.zero import squares_in_one_pass
from zslurm.train.shapes import TensorInfo, TensorKind


def test_parameters_become_views_of_one_buffer_and_keep_their_values(alone: dist.ProcessGroup) -> None:
    model = Few()
    shards = shards_of(model, alone)
    begin = shards.weights.data_ptr()
    used = torch.zeros_like(shards.weights, dtype=torch.bool)
    for row in TABLE:
        parameter = model.get_parameter(row.name)
        torch.testing.assert_close(parameter.data, values_of(row), rtol=0, atol=0)
        first, odd = divmod(parameter.data_ptr() - begin, 64)
        assert not odd, "tensors start on 64 bytes"
        assert not used[16 * first : 16 * first + row.numel].any()
        used[16 * first : 16 * first + row.numel] = True
        torch.testing.assert_close(by_tensor(shards, shards.master)[row.name], values_of(row), rtol=0, atol=0)
    assert shards.weights[~used].abs().max() == 0


def test_gradients_of_microbatches_are_added_and_freed(alone: dist.ProcessGroup) -> None:
    model = Few()
    shards = shards_of(model, alone)
    for first in (1, 5):  # the second step knows nothing of the first
        shards.begin_step(backwards=2)
        for seed in (first, first + 1):
            backward(model, seed)
            assert all(parameter.grad is None for parameter in model.parameters())
        shards.reduce_gradients()
        found = by_tensor(shards, shards.master_gradient)
        for row in TABLE:
            expected = values_of(row, first) + values_of(row, first + 1)
            torch.testing.assert_close(found[row.name], expected, rtol=0, atol=0)


def test_a_part_of_a_gradient_is_added_without_being_rounded(alone: dist.ProcessGroup) -> None:
    """The first of a step's parts replaces what the last step left, whichever comes first."""
    model = Few(dtype=torch.bfloat16)
    shards = shards_of(model, alone)
    add = shards.adder("embedding")
    assert add is not None
    part = values_of(TABLE[0], 9) / 3
    for first in (1, 5):
        shards.begin_step(backwards=2)
        for seed in (first, first + 1):
            add(part)
            backward(model, seed, integers=True)
        shards.reduce_gradients()
        whole = sum(gradient_of("embedding", TABLE[0].shape, seed, integers=True) for seed in (first, first + 1))
        found = by_tensor(shards, shards.master_gradient)["embedding"]
        torch.testing.assert_close(found, whole + 2 * part, rtol=1e-6, atol=1e-6)
    assert shards_of(Few(), alone).adder("embedding") is None, "autograd rounds nothing"


def test_a_backward_pass_may_add_to_a_sum_by_itself(alone: dist.ProcessGroup) -> None:
    model = Few(dtype=torch.bfloat16)
    shards = shards_of(model, alone)
    name = TABLE[1].name
    sum_of, part = shards.gradient_sum(name), values_of(TABLE[1], 9) / 3
    for _ in range(2):
        shards.begin_step(backwards=2)
        for adds in (False, True):
            total, found = sum_of.begin()
            assert found == adds
            assert total.dtype == torch.float32
            total.copy_(total + part if adds else part)
            sum_of.end()
        shards.reduce_gradients()
        torch.testing.assert_close(by_tensor(shards, shards.master_gradient)[name], 2 * part)
    with pytest.raises(AssertionError, match="more backward passes than begin_step announced"):
        sum_of.begin()


def test_a_step_without_microbatches_has_no_gradient(alone: dist.ProcessGroup) -> None:
    model = Few()
    shards = shards_of(model, alone)
    shards.begin_step(backwards=1)
    backward(model, 1)
    shards.reduce_gradients()
    shards.begin_step(backwards=0)
    shards.reduce_gradients()
    assert shards.master_gradient.abs().max() == 0


def test_a_backward_pass_too_many_is_not_lost_in_silence(alone: dist.ProcessGroup) -> None:
    model = Few()
    shards = shards_of(model, alone)
    shards.begin_step(backwards=1)
    backward(model, 1)
    with pytest.raises(AssertionError, match="more backward passes than begin_step announced"):
        backward(model, 2)


def test_gradients_of_bf16_weights_are_summed_in_fp32(alone: dist.ProcessGroup) -> None:
    """256 + 1 is 256 in bf16: a sum in that format would lose every small gradient."""
    table = (TensorInfo("matrix", (4, 4), TensorKind.MATRIX, whole=1), TensorInfo("norm", (16,), TensorKind.NORM))
    for dtype, expected in ((torch.float32, 258.0), (torch.bfloat16, 256.0)):
        model = Few(table, torch.bfloat16)
        shards = shards_of(model, alone, table, gradient_dtype=dtype)
        shards.begin_step(backwards=3)
        for gradient in (256.0, 1.0, 1.0):
            torch.stack([(p * gradient).float().sum() for p in model.parameters()]).sum().backward()
        assert shards.gradients.dtype == dtype
        shards.reduce_gradients()
        assert shards.master_gradient.dtype == torch.float32
        assert shards.master_gradient[:16].tolist() == [expected] * 16
        assert shards.master_gradient[32:48].tolist() == [expected] * 16


def test_masters_are_fp32_and_weights_are_their_rounding(alone: dist.ProcessGroup) -> None:
    model = Few(dtype=torch.bfloat16)
    shards = shards_of(model, alone)
    assert shards.master.dtype == torch.float32
    shards.master += 1e-4  # below what bf16 resolves for most of the values
    shards.gather_weights()
    exact = by_tensor(shards, shards.master)
    for row in TABLE:
        found = model.get_parameter(row.name).data
        assert torch.equal(found, exact[row.name].to(torch.bfloat16)), row.name
        assert not torch.equal(found.float(), exact[row.name])


def test_an_fp64_model_is_fp64_throughout(alone: dist.ProcessGroup) -> None:
    shards = shards_of(Few(dtype=torch.float64), alone, reduce_dtype=torch.bfloat16)
    assert {shards.master.dtype, shards.gradients.dtype, shards.master_gradient.dtype} == {torch.float64}


def reduced(model: Few, group: dist.ProcessGroup, seed: int = 1) -> Any:
    """Shards after one microbatch."""
    shards = shards_of(model, group)
    shards.begin_step(backwards=1)
    backward(model, seed)
    shards.reduce_gradients()
    return shards


@pytest.mark.parametrize("limit", [0.5, 3.0])
def test_clipping_is_torchs(alone: dist.ProcessGroup, limit: float) -> None:
    model, reference = Few(), Few()
    shards = reduced(model, alone)
    norm = shards.clip_gradients(limit)
    backward(reference, 1)
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), limit)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
    assert norm.item() > limit
    found = by_tensor(shards, shards.master_gradient)
    for row in TABLE:
        torch.testing.assert_close(found[row.name], reference.get_parameter(row.name).grad, rtol=1e-5, atol=0)


@pytest.mark.parametrize("values", [torch.randn(1001), torch.full((7,), 1e30), torch.tensor([1.0, math.inf])])
def test_a_gpus_norm_is_one_operator_that_adds_in_fp64(values: torch.Tensor) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = squares_in_one_pass(values)
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(values.double().square().sum().item(), rel=1e-12)
    outermost = [event.name for event in profile.events() if event.cpu_parent is None]
    assert outermost == ["aten::_foreach_norm", "aten::square"], "nothing is widened in a pass of its own"


@pytest.mark.parametrize("limit", [None, 1e6])
def test_short_gradients_keep_every_bit(alone: dist.ProcessGroup, limit: float | None) -> None:
    shards = reduced(Few(), alone)
    before = shards.master_gradient.clone()
    assert shards.clip_gradients(limit).item() == pytest.approx(before.norm().item(), rel=1e-6)
    assert torch.equal(shards.master_gradient, before)


def test_gradients_can_be_scaled(alone: dist.ProcessGroup) -> None:
    shards = reduced(Few(), alone)
    before = shards.master_gradient.clone()
    shards.scale_gradients(0.5)
    assert torch.equal(shards.master_gradient, before / 2)


def test_a_gradient_that_is_not_finite_shows_in_its_norm(alone: dist.ProcessGroup) -> None:
    shards = reduced(Few(), alone)
    assert shards.first_nonfinite() is None
    shards.master_gradient[3] = math.nan
    assert not torch.isfinite(shards.clip_gradients(1.0))
    assert shards.first_nonfinite() is None, "no rank's own gradient was at fault"


# ------------------------------------------------------------------------------------------- several processes

MICROBATCHES = 6
Steps = tuple[dict[str, NDArray[np.float32]], dict[str, NDArray[np.float32]], float, int]


def two_steps(group: dist.ProcessGroup, dtype: torch.dtype, settings: dict[str, Any]) -> Steps:
    """Two optimizer steps on microbatches that the ranks share.

    Returns weights, the part of the last gradient that this rank owns, its norm, and elements owned.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    model = Few(dtype=dtype)
    shards = shards_of(model, group, **settings)
    optimizer = ShardedOptimizer(shards, OptimConfig(muon=MuonConfig(dtype="fp32")))
    for step in range(2):
        mine = range(rank, MICROBATCHES, size)
        shards.begin_step(backwards=len(mine))
        for microbatch in mine:
            backward(model, 10 * step + microbatch, integers=True)
        shards.reduce_gradients()
        norm = shards.clip_gradients(1e9)
        optimizer.step(1e-2)
        shards.gather_weights()
    weights = {name: parameter.detach().float().numpy() for name, parameter in model.named_parameters()}
    gradients = {name: value.numpy() for name, value in by_tensor(shards, shards.master_gradient).items()}
    return weights, gradients, norm.item(), sum(extent.numel for extent in shards.extents)


def assembled(results: list[Steps]) -> dict[str, NDArray[np.float32]]:
    """The gradient of all ranks; each element must be owned by one of them."""
    whole = {}
    for row in TABLE:
        parts = np.stack([gradients[row.name] for _, gradients, _, _ in results])
        assert ((~np.isnan(parts)).sum(axis=0) == 1).all(), row.name
        whole[row.name] = np.nansum(parts, axis=0)
    return whole


@pytest.mark.parametrize(
    ("ranks", "dtype", "settings"),
    [
        (2, torch.float32, {}),
        (3, torch.float32, {"overlap": False}),
        (3, torch.bfloat16, {}),
        (4, torch.bfloat16, {"bucket_bytes": 1e9}),
        (7, torch.float32, {"bucket_bytes": 1.0}),  # one rank more than there are microbatches
    ],
)
def test_any_number_of_ranks_makes_the_same_steps(
    alone: dist.ProcessGroup, ranks: int, dtype: torch.dtype, settings: dict[str, Any]
) -> None:
    """The gradients are whole numbers, so that no order of their sum can show."""
    one = two_steps(alone, dtype, {})
    results = in_group(two_steps, ranks, dtype, settings)
    gradients = assembled(results)
    for row in TABLE:
        expected = sum(gradient_of(row.name, row.shape, 10 + j, integers=True) for j in range(MICROBATCHES))
        assert np.array_equal(gradients[row.name], expected.numpy()), row.name  # type: ignore[union-attr]
        for weights, _, norm, _ in results:
            assert norm == pytest.approx(one[2], rel=1e-15)
            assert np.array_equal(weights[row.name], results[0][0][row.name])
            # Products of batches of other sizes may round otherwise, and the weights after them.
            rounding = torch.finfo(dtype).eps * 4
            np.testing.assert_allclose(weights[row.name], one[0][row.name], rtol=rounding, atol=rounding * 1e-2)
            assert not np.array_equal(weights[row.name], values_of(row)), "it was trained"
    assert sum(owned for *_, owned in results) == one[3], "each element has one owner"


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_dtype": torch.bfloat16},
        {"reduce_dtype": torch.bfloat16},
        {"gradient_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
        {"reduce_dtype": torch.bfloat16, "overlap": False},
    ],
)
def test_gradients_can_be_added_and_reduced_in_other_formats(settings: dict[str, Any]) -> None:
    """Small whole numbers fit into bf16: what is reduced is exact, and what comes of it equals the fp32 way."""
    exact, short = (in_group(two_steps, 2, torch.float32, chosen) for chosen in ({}, settings))
    for name, value in assembled(exact).items():
        assert np.array_equal(assembled(short)[name], value), name
        assert np.array_equal(short[1][0][name], exact[1][0][name]), name


def sent_when(group: dist.ProcessGroup, overlap: bool) -> list[int]:
    """Bytes of reductions sent after each of two microbatches, and after the reduction."""
    model = Few()
    shards = shards_of(model, group, overlap=overlap)
    shards.begin_step(backwards=2)
    sent = []
    for seed in (1, 2):
        backward(model, seed)
        sent.append(shards.comm.sent["reduce_scatter"])
    shards.reduce_gradients()
    return [*sent, shards.comm.sent["reduce_scatter"]]


@pytest.mark.parametrize("overlap", [True, False])
def test_buckets_are_reduced_during_the_last_backward(overlap: bool) -> None:
    for after_first, after_last, in_all in in_group(sent_when, 2, overlap):
        assert after_first == 0
        assert in_all > 0
        flat = 4 * 192 // 2  # embedding, norm and bias: 96 + 32 + 5 elements, padded to 192; half of it is sent
        assert after_last == (in_all - flat if overlap else 0)


def traffic(group: dist.ProcessGroup, dtype: torch.dtype) -> tuple[dict[str, int], int, int, int]:
    """Bytes that this rank sent in one step, by operation; elements of buffers, of matrices, owned of these."""
    model = Few(dtype=dtype)
    shards = shards_of(model, group)
    optimizer = ShardedOptimizer(shards, OptimConfig())
    shards.begin_step(backwards=1)
    backward(model, 1)
    shards.reduce_gradients()
    shards.clip_gradients(1.0)
    optimizer.step(1e-3)
    shards.gather_weights()
    matrices = sum(row.numel for row in TABLE if row.whole)
    mine = sum(matrix.numel for matrix in shards.layout.matrices[shards.rank])
    return dict(shards.comm.sent), shards.weights.numel(), matrices, mine


@pytest.mark.parametrize(("ranks", "dtype"), [(2, torch.float32), (4, torch.bfloat16)])
def test_a_step_sends_two_reductions_worth_and_a_share_of_the_matrices(ranks: int, dtype: torch.dtype) -> None:
    """2 (N-1)/N P elements, gradients in fp32 and weights in their format, plus O(P/N)."""
    for sent, padded, matrices, owned in in_group(traffic, ranks, dtype):
        away = (ranks - 1) / ranks
        assert sent["reduce_scatter"] == pytest.approx(padded * 4 * away)
        assert sent["all_gather"] == pytest.approx(padded * dtype.itemsize * away)
        held = matrices / ranks + 128
        assert sent["all_to_all"] <= held * 4 + owned * dtype.itemsize
        assert sent["all_reduce"] == round(2 * 8 * away), "the norm"
        assert set(sent) == {"reduce_scatter", "all_gather", "all_to_all", "all_reduce"}


@pytest.mark.parametrize(
    ("faults", "expected"),
    [({}, None), ({1: "experts"}, ("experts", 1)), ({0: "matrix", 2: "second", 1: "second"}, ("second", 1))],
)
def test_all_ranks_name_the_tensor_and_rank_that_failed_first(
    faults: dict[int, str], expected: tuple[str, int] | None
) -> None:
    """`second` is used last, so its gradient is the first that backward makes."""
    assert in_group(blamed, 3, faults) == [expected] * 3
