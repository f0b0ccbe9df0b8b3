"""Products by oneDNN: the same numbers as torch's, whatever the strides; and where torch's own are taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.train.runs import MODEL
from zslurm.kernels import matmul_limits as limits
from zslurm.kernels.grouped_gemm import Groups, multiply, weight_gradient
from zslurm.kernels.matmul import add_matmul, batched_matmul, linear, matmul, matmul_into
from zslurm.kernels.matmul import cpu as onednn
from zslurm.train.config import ModelConfig
from zslurm.train.model.zaya import build

needs_onednn = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")),
    reason="this torch has no oneDNN",
)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """oneDNN on any processor; the operands that it got."""
    got: list[tuple[Tensor, Tensor]] = []
    operator = onednn.by_operator

    def recorded(left_MK: Tensor, right_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        got.append((left_MK, right_NK))
        return operator(left_MK, right_NK, bias_N)

    monkeypatch.setattr(onednn, "IS_FASTER", True)
    monkeypatch.setattr(onednn, "by_operator", recorded)
    yield got


def plain(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns)


def turned(rows: int, columns: int) -> Tensor:
    return torch.randn(columns, rows).T


def cut(rows: int, columns: int) -> Tensor:
    return torch.randn(rows + 3, columns + 5)[1 : rows + 1, 2 : columns + 2]


def turned_cut(rows: int, columns: int) -> Tensor:
    return cut(columns, rows).T


def spread(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns * 2)[:, ::2]


def expanded(rows: int, columns: int) -> Tensor:
    return torch.randn(1, columns).expand(rows, columns)


LAYOUTS = (plain, turned, cut, turned_cut, spread, expanded)


@needs_onednn
@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize("left", LAYOUTS)
def test_strides_do_not_matter(
    left: Callable[[int, int], Tensor],
    right: Callable[[int, int], Tensor],
    calls: list[tuple[Tensor, Tensor]],
) -> None:
    left_MK, right_KN = left(96, 300), right(300, 80)
    expected = left_MK.double() @ right_KN.double()
    torch.testing.assert_close(matmul(left_MK, right_KN).double(), expected, rtol=1e-5, atol=1e-4)
    assert len(calls) == 1
    # For anything else oneDNN has only its slow reference implementation.
    right_NK = calls[0][1]
    assert right_NK.is_contiguous() or right_NK.T.is_contiguous()


@needs_onednn
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 300),
    terms=st.integers(0, 300),
    columns=st.integers(0, 300),
    left=st.sampled_from(LAYOUTS),
    right=st.sampled_from(LAYOUTS),
)
def test_any_size_is_right(
    rows: int,
    terms: int,
    columns: int,
    left: Callable[[int, int], Tensor],
    right: Callable[[int, int], Tensor],
) -> None:
    torch.manual_seed(rows * 7 + terms)
    left_MK, right_KN = left(rows, terms), right(terms, columns)
    expected = left_MK.double() @ right_KN.double()
    close = {"rtol": 1e-5, "atol": 1e-4}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onednn, "IS_FASTER", True)
        torch.testing.assert_close(matmul(left_MK, right_KN).double(), expected, **close)
        out_MN, total_MN = torch.full((rows, columns), torch.nan), torch.ones(rows, columns)
        matmul_into(left_MK, right_KN, out_MN)
        torch.testing.assert_close(out_MN.double(), expected, **close)
        add_matmul(left_MK, right_KN, total_MN)
        torch.testing.assert_close(total_MN.double(), expected + 1, **close)
        y_XMN = batched_matmul(torch.stack([left_MK, -left_MK]), torch.stack([right_KN, right_KN]))
        torch.testing.assert_close(y_XMN.double(), torch.stack([expected, -expected]), **close)


@needs_onednn
def test_the_smaller_operand_is_turned_for_the_gradient_of_a_weight(calls: list[tuple[Tensor, Tensor]]) -> None:
    gradient_NO, x_NI = torch.randn(512, 4096), torch.randn(512, 128)
    assert matmul(gradient_NO.T, x_NI).shape == (4096, 128)
    assert calls[0][0].shape == (128, 512), "4,096 columns are not copied"
    matmul(torch.randn(512, 64).T, torch.randn(512, 2048))
    assert calls[1][0].shape == (64, 512)


@needs_onednn
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_map_and_its_gradients_are_torchs(bias: bool, calls: list[tuple[Tensor, Tensor]]) -> None:
    operands = [torch.randn(4, 64, 96), torch.randn(80, 96), *([torch.randn(80)] if bias else [])]
    ours = [operand.clone().requires_grad_() for operand in operands]
    theirs = [operand.double().requires_grad_() for operand in operands]
    y_BSO, expected = linear(*ours), F.linear(*theirs)
    torch.testing.assert_close(y_BSO.double(), expected, rtol=1e-5, atol=1e-4)
    gradient = torch.randn_like(y_BSO)
    y_BSO.backward(gradient)
    expected.backward(gradient.double())
    assert len(calls) == 3
    for our, their in zip(ours, theirs, strict=True):
        assert our.grad is not None and their.grad is not None
        torch.testing.assert_close(our.grad.double(), their.grad, rtol=1e-5, atol=1e-4)


@needs_onednn
def test_what_needs_no_gradient_gets_none(calls: list[tuple[Tensor, Tensor]]) -> None:
    weight_OI = torch.randn(80, 96, requires_grad=True)
    linear(torch.randn(256, 96), weight_OI).sum().backward()
    assert len(calls) == 2, "forward, and the weight's gradient"


@needs_onednn
@pytest.mark.parametrize(
    ("rows", "terms", "columns", "layout", "dtype"),
    [
        (8, 4096, 512, plain, torch.float32),  # few rows, as in decoding
        (2, 1024, 4096, turned, torch.float32),
        (512, 8, 512, plain, torch.float32),  # few terms
        (1024, 32, 512, turned, torch.float32),  # few for a left matrix that would be copied
        (2048, 128, 1024, turned, torch.float32),  # few for that and a large result
        (64, 64, 64, plain, torch.float32),  # few of all
        (256, 256, 256, plain, torch.float64),
        (256, 256, 256, plain, torch.bfloat16),
    ],
)
def test_torch_multiplies_what_does_not_pay_and_other_formats(
    rows: int,
    terms: int,
    columns: int,
    layout: Callable[[int, int], Tensor],
    dtype: torch.dtype,
    calls: list[tuple[Tensor, Tensor]],
) -> None:
    left, right = layout(rows, terms).to(dtype), plain(terms, columns).to(dtype)
    assert torch.equal(matmul(left, right), torch.mm(left, right))
    assert torch.equal(linear(left, right.T), F.linear(left, right.T))
    total = torch.ones(left.shape[0], right.shape[1], dtype=left.dtype)
    expected = total.clone().addmm_(left, right)
    add_matmul(left, right, total)
    assert torch.equal(total, expected)
    assert not calls


def test_elsewhere_all_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "IS_FASTER", False)
    left, right = torch.randn(256, 256), torch.randn(256, 256)
    assert torch.equal(matmul(left, right), left @ right)
    assert torch.equal(linear(left, right), F.linear(left, right))
    batch = torch.randn(3, 256, 256)
    assert torch.equal(batched_matmul(batch, batch), torch.bmm(batch, batch))
    bias = torch.randn(3, 256)
    assert torch.equal(batched_matmul(batch, batch, bias), torch.baddbmm(bias.unsqueeze(1), batch, batch))


@needs_onednn
def test_a_bias_is_added_to_each_product_of_a_batch(calls: list[tuple[Tensor, Tensor]]) -> None:
    left, right, bias = torch.randn(3, 200, 128), torch.randn(3, 128, 96), torch.randn(3, 96)
    expected = left.double() @ right.double() + bias.double().unsqueeze(1)
    torch.testing.assert_close(batched_matmul(left, right, bias).double(), expected, rtol=1e-5, atol=1e-4)
    assert len(calls) == 3


@needs_onednn
def test_vectors_and_empty_batches_are_torchs(calls: list[tuple[Tensor, Tensor]]) -> None:
    weight_OI, vector_I = torch.randn(2048, 1024), torch.randn(1024)
    assert torch.equal(linear(vector_I, weight_OI), F.linear(vector_I, weight_OI))
    assert linear(torch.randn(0, 1024), weight_OI).shape == (0, 2048)
    assert batched_matmul(torch.randn(0, 256, 256), torch.randn(0, 256, 256)).shape == (0, 256, 256)
    assert not calls


@needs_onednn
def test_the_same_operands_give_the_same_bits(calls: list[tuple[Tensor, Tensor]]) -> None:
    left, right = torch.randn(300, 700), torch.randn(700, 200)
    assert all(torch.equal(matmul(left, right), matmul(left.clone(), right.clone())) for _ in range(5))


@needs_onednn
def test_a_compiled_function_multiplies_by_onednn_too(calls: list[tuple[Tensor, Tensor]]) -> None:
    x_NI, weight_OI = torch.randn(256, 96, requires_grad=True), torch.randn(80, 96, requires_grad=True)
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    y_NO = compiled(x_NI, weight_OI)
    y_NO.sum().backward()
    assert len(calls) == 3
    assert torch.equal(y_NO, linear(x_NI, weight_OI))


@needs_onednn
@pytest.mark.parametrize(
    ("vendor", "capability", "onednns", "faster"),
    [
        ("AuthenticAMD", "AVX512", True, True),
        ("AuthenticAMD", "AVX2", True, False),
        ("AuthenticAMD", "AVX512", False, False),
        ("GenuineIntel", "AVX512", True, False),
        ("", "AVX512", True, False),
    ],
)
def test_onednn_is_for_processors_of_amd_with_avx512(
    vendor: str, capability: str, onednns: bool, faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn, "processor_vendor", lambda: vendor)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(onednn, "onednn_has_avx512", lambda: onednns)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert onednn.is_faster() is faster
    monkeypatch.setattr(onednn, "OPERATOR_ARGUMENTS", ["Tensor", "Tensor"])
    assert not onednn.is_faster(), "the operator of another torch"
    monkeypatch.undo()
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert not onednn.is_faster(), "another library than MKL"


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows_E", [[70, 0, 45, 1], [5, 3], [64, 32], [0, 0], [116]])
def test_a_group_of_rows_sees_no_others(rows_E: list[int], dtype: torch.dtype, calls: list[Any]) -> None:
    """Groups of odd sizes are multiplied with rows beside them, which may hold anything."""
    x_NI, y_NO, weight_EIO = torch.randn(120, 96), torch.randn(120, 160), torch.randn(len(rows_E), 96, 160)
    start = 0
    for expert, rows in enumerate(rows_E):
        own = slice(start, start + rows)
        left, right = torch.full_like(x_NI, torch.nan), torch.full_like(y_NO, torch.inf)
        left[own], right[own] = x_NI[own], y_NO[own]
        left, right, weight = left.to(dtype), right.to(dtype), weight_EIO.to(dtype)
        groups = Groups(torch.tensor(rows_E).cumsum(0).int(), rows_E)
        close = {"rtol": 1e-2, "atol": 1e-1} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-4}
        expected = left[own].double() @ weight[expert].double()
        torch.testing.assert_close(multiply(left, weight, groups)[own].double(), expected, **close)
        expected = left[own].double().T @ right[own].double()
        torch.testing.assert_close(weight_gradient(left, right, groups)[expert].double(), expected, **close)
        start += rows


@needs_onednn
def test_rows_that_vary_meet_few_shapes(calls: list[tuple[Tensor, Tensor]]) -> None:
    weight_EIO, x_NI, y_NO = torch.randn(1, 128, 256), torch.randn(1024, 128), torch.randn(1024, 256)
    for rows in range(400, 600, 7):
        groups = Groups(torch.tensor([rows]).int(), [rows])
        multiply(x_NI, weight_EIO, groups)
        weight_gradient(x_NI, y_NO, groups)
    shapes = {(left.shape, right.shape) for left, right in calls}
    assert len(calls) == 2 * 29
    assert len(shapes) == 2 * 7


@needs_onednn
@pytest.mark.parametrize(
    ("way", "lengths"),
    [
        ({"recompute": True}, (48, 80)),
        # The graph of a layer without a C++ compiler, which takes minutes; another length is another graph.
        ({"compile": True, "backend": "aot_eager"}, (48,)),
        pytest.param({"compile": True}, (48, 80), marks=pytest.mark.soak),
    ],
    ids=["recomputed", "traced", "compiled"],
)
def test_a_model_is_the_same_by_onednn(
    way: dict[str, Any],
    lengths: tuple[int, ...],
    calls: list[tuple[Tensor, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every product of a small model, forward and backward, run plainly, recomputed and compiled."""
    torch.compiler.reset()
    for fewest in ("FEWEST_MULTIPLICATIONS", "FEWEST_IN_A_BATCH", "FEWEST_TERMS", "FEWEST_COPIED_TERMS"):
        monkeypatch.setattr(limits, fewest, 1)
    config = ModelConfig.model_validate(MODEL | {"layers": 1 if "backend" in way else 2})
    for length in lengths:
        tokens_BS = torch.arange(3 * length).view(3, length) * 7 % config.vocab_size
        by_torch, plainly, other_way = (build(config, 0, dtype=torch.float32) for _ in range(3))
        other_way.run_with(**way)
        found = []
        for model, use in ((by_torch, False), (plainly, True), (other_way, True)):
            monkeypatch.setattr(onednn, "IS_FASTER", use)
            loss, _ = model(tokens_BS, tokens_BS.flip(1), rope_base=1e4)
            loss.backward()
            assert bool(calls) is use
            found.append([loss, *(parameter.grad for parameter in model.parameters())])
        for expected, ours, again in zip(*found, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
            if "recompute" in way:
                assert torch.equal(again, ours)
            torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-4)
        calls.clear()
