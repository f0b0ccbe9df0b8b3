"""X X^T and b A + c A A: every implementation against fp64, whatever the sizes and strides.

What is for GPUs is exactly symmetric; on CPUs that depends on the library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.implementations import implementations
from zslurm.kernels.arch import CPU, GFX942, SM_90, Arch, meta_tensors_on
from zslurm.kernels.symmetric_product import symmetric_polynomial, symmetric_product

pytest.importorskip("triton")


def plain(count: int, rows: int, columns: int) -> Tensor:
    return torch.randn(count, rows, columns)


def turned(count: int, rows: int, columns: int) -> Tensor:
    return torch.randn(count, columns, rows).mT


def cut(count: int, rows: int, columns: int) -> Tensor:
    return torch.randn(count + 1, rows + 3, columns + 5)[1:, 2 : rows + 2, 4 : columns + 4]


def interleaved(count: int, rows: int, columns: int) -> Tensor:
    return torch.randn(rows, count, 2 * columns).transpose(0, 1)[:, :, ::2]


def expanded(count: int, rows: int, columns: int) -> Tensor:
    return torch.randn(count, 1, columns).expand(count, rows, columns)


LAYOUTS = (plain, turned, cut, interleaved, expanded)
# Triton's interpreter truncates to bf16, where GPUs round: an error of one bit and not of half a bit.
EPSILON = {torch.bfloat16: 2**-7, torch.float32: 2**-23}
PRODUCTS, POLYNOMIALS = implementations(symmetric_product), implementations(symmetric_polynomial)


def assert_close(result: Tensor, expected: Tensor, magnitude: Tensor) -> None:
    """Errors are those of one rounding of the result, and of fp32 sums of terms of this magnitude."""
    format = torch.finfo(result.dtype)
    least = format.smallest_normal * format.eps  # the step between numbers near zero
    allowed = EPSILON[result.dtype] * expected.abs() + 2e-6 * magnitude + least + 1e-30
    wrong = (result.double() - expected).abs() > allowed
    assert not wrong.any(), ((result.double() - expected).abs() / allowed).max()


def check_product(run: Callable[..., Any], x_KSL: Tensor, symmetric: bool) -> None:
    count, side, _ = x_KSL.shape
    out_KSS = torch.full((count, side, side), torch.nan, dtype=x_KSL.dtype)
    run(x_KSL, out_KSS)
    wide = x_KSL.double()
    assert_close(out_KSS, wide @ wide.mT, wide.abs() @ wide.abs().mT)
    assert not symmetric or torch.equal(out_KSS, out_KSS.mT)


@pytest.mark.parametrize("name", PRODUCTS)
@settings(max_examples=15, deadline=None)
@given(
    count=st.integers(0, 3),
    side=st.sampled_from((0, 1, 3, 16, 63, 64, 65, 129, 200)),
    length=st.sampled_from((0, 1, 8, 31, 64, 100, 130)),
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from((torch.bfloat16, torch.float32)),
)
def test_the_product_is_that_of_fp64(
    name: str, count: int, side: int, length: int, layout: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    torch.manual_seed(side * 7 + length)
    x_KSL = layout(count, side, length).to(dtype)
    if layout is expanded:
        x_KSL = x_KSL[:, :1].expand(count, side, length)
    check_product(PRODUCTS[name], x_KSL, symmetric=name.startswith("triton"))


@pytest.mark.parametrize("name", POLYNOMIALS)
@settings(max_examples=15, deadline=None)
@given(
    count=st.integers(0, 3),
    side=st.sampled_from((0, 1, 5, 64, 96, 129, 193)),
    layout=st.sampled_from(LAYOUTS[:4]),
    dtype=st.sampled_from((torch.bfloat16, torch.float32)),
    b=st.sampled_from((-4.775, 0.5, 1.0)),
    c=st.sampled_from((2.0315, -1.5, 1.0)),
)
def test_the_polynomial_is_that_of_fp64(
    name: str, count: int, side: int, layout: Callable[..., Tensor], dtype: torch.dtype, b: float, c: float
) -> None:
    torch.manual_seed(side)
    a_KSS = layout(count, side, side).to(dtype)
    a_KSS = (a_KSS.tril() + a_KSS.tril(-1).mT).mT
    out_KSS = torch.full((count, side, side), torch.nan, dtype=dtype)
    POLYNOMIALS[name](a_KSS, b, c, out_KSS)
    wide = a_KSS.double()
    assert_close(out_KSS, b * wide + c * wide @ wide, abs(b) * wide.abs() + abs(c) * wide.abs() @ wide.abs())
    assert not name.startswith("triton") or torch.equal(out_KSS, out_KSS.mT)


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("side", [192, 193, 300])
def test_more_than_one_tile_and_strided_results(name: str, side: int) -> None:
    torch.manual_seed(0)
    check_product(PRODUCTS[name], torch.randn(2, side, 40), symmetric=name.startswith("triton"))
    whole = torch.full((2, side + 2, side + 7), torch.nan)
    PRODUCTS[name](torch.ones(2, side, 8), whole[:, 1:-1, 3:-4])
    assert (whole[:, 1:-1, 3:-4] == 8).all()
    whole[:, 1:-1, 3:-4] = torch.nan
    assert whole.isnan().all(), "nothing beside it is written"


@pytest.mark.parametrize("name", PRODUCTS)
def test_huge_tiny_and_undefined_values_come_through(name: str) -> None:
    x_KSL = torch.randn(1, 70, 33)
    x_KSL[0, 3, 4], x_KSL[0, 66, 1] = torch.nan, torch.inf
    x_KSL[0, 5] *= 1e-30
    x_KSL[0, 6] *= 1e18
    out_KSS = torch.empty(1, 70, 70)
    PRODUCTS[name](x_KSL, out_KSS)
    expected = x_KSL.double() @ x_KSL.double().mT
    assert torch.equal(out_KSS.isnan(), expected.isnan())
    assert torch.equal(out_KSS.isinf(), expected.isinf())
    torch.testing.assert_close(out_KSS.double(), expected, rtol=1e-3, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize(
    ("x", "out", "message"),
    [
        (
            torch.zeros(2, 3),
            torch.zeros(2, 2),
            r"symmetric_product: x has the shape \[2, 3\], but must have \[K, S, L\]",
        ),
        (torch.zeros(1, 2, 3), torch.zeros(1, 3, 3), r"out has the shape \[1, 3, 3\], but must have \[1, 2, 2\]"),
        (torch.zeros(1, 2, 3).int(), torch.zeros(1, 2, 2).int(), "operand is int32, but must be one of bfloat16"),
        (torch.zeros(1, 2, 3).bfloat16(), torch.zeros(1, 2, 2), "operand is bfloat16, out is float32"),
        (torch.zeros(1, 2, 3), torch.zeros(1, 2, 2, device="meta"), "not operand on cpu, out on meta"),
    ],
)
def test_bad_operands_are_refused(x: Tensor, out: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        symmetric_product(x, out)


def test_a_result_over_its_operand_is_refused() -> None:
    a_KSS = torch.zeros(1, 4, 4)
    with pytest.raises(ValueError, match="symmetric_polynomial: out shares memory with operand"):
        symmetric_polynomial(a_KSS, 1.0, 1.0, a_KSS)
    with pytest.raises(ValueError, match=r"a has the shape \[1, 4, 3\]"):
        symmetric_polynomial(a_KSS[..., :3], 1.0, 1.0, torch.zeros(1, 4, 3))


def test_the_size_decides_what_runs() -> None:
    def chosen(arch: Arch, count: int, side: int) -> str:
        x_KSL = torch.empty(count, side, 2 * side, dtype=torch.bfloat16, device="meta")
        with meta_tensors_on(arch):
            return symmetric_product.choose(x_KSL, x_KSL.new_empty(count, side, side)).name

    assert [chosen(GFX942, 1, side) for side in (2048, 3712, 3840)] == ["reference", "reference", "triton"]
    assert [chosen(GFX942, count, 2048) for count in (3, 4, 5)] == ["reference", "triton", "triton"]
    assert [chosen(SM_90, 1, side) for side in (2048, 4096)] == ["reference", "triton"]
    assert chosen(CPU, 5, 4096) == "reference"
