"""Products of groups of rows: every implementation against fp64, for any load, and which one is chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.implementations import implementations
from zslurm.kernels.arch import CPU, GFX90A, GFX942, SM_90
from zslurm.kernels.dispatch import using
from zslurm.kernels.grouped_gemm import (
    OPERATIONS,
    Groups,
    add_weight_gradient,
    grouped_mm,
    multiply,
    weight_gradient,
)

pytest.importorskip("triton")

MULTIPLY, WEIGHT_GRADIENT, ADD = OPERATIONS
PRODUCTS, GRADIENTS, SUMS = map(implementations, OPERATIONS)
# Triton's interpreter truncates to bf16, where GPUs round: an error of one bit and not of half a bit.
EPSILON = {torch.bfloat16: 2**-7, torch.float32: 2**-23, torch.float64: 2**-52}

LOADS = {
    "some empty": [2, 0, 70, 0],
    "all empty": [0, 0, 0, 0],
    "all in one": [0, 130, 0, 0],
    "no rest": [33, 64, 31, 22],
    "one row each": [1, 1, 1, 1],
}
ROWS = 150


def groups_of(rows_E: list[int]) -> Groups:
    return Groups(torch.tensor(rows_E).cumsum(0).int())


def assert_close(result: Tensor, left: Tensor, right: Tensor) -> None:
    expected, magnitude = left.double() @ right.double(), left.double().abs() @ right.double().abs()
    format = torch.finfo(result.dtype)
    least = format.smallest_normal * format.eps  # the step between numbers near zero
    allowed = EPSILON[result.dtype] * expected.abs() + 2e-6 * magnitude + least + 1e-30
    wrong = (result.double() - expected).abs() > allowed
    assert not wrong.any(), ((result.double() - expected).abs() / allowed).max()


def check(names: tuple[str, str], rows_E: list[int], left: Tensor, weight: Tensor, right: Tensor) -> None:
    """Each group alone, with rows of others that may hold anything."""
    y_NO = PRODUCTS[names[0]](left, weight, groups_of(rows_E))
    gradient = GRADIENTS[names[1]](left, right, groups_of(rows_E))
    assert gradient.shape == (len(rows_E), left.shape[1], right.shape[1])
    for expert, piece in enumerate(torch.arange(len(left)).split([*rows_E, len(left) - sum(rows_E)])[:-1]):
        assert_close(y_NO[piece], left[piece], weight[expert])
        assert_close(gradient[expert], left[piece].T, right[piece])


def turned(*shape: int) -> Tensor:
    return torch.randn(*shape[:-2], shape[-1], shape[-2]).mT


def cut(*shape: int) -> Tensor:
    return torch.randn(*shape[:-1], shape[-1] + 8)[..., 8:]


LAYOUTS = (torch.randn, turned, cut)
NAMES = tuple((name, name if name in GRADIENTS else "reference") for name in PRODUCTS)


@pytest.mark.parametrize("names", NAMES, ids=lambda names: names[0])
@pytest.mark.parametrize("rows_E", LOADS.values(), ids=LOADS.keys())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_load_gives_what_each_group_gives_alone(
    names: tuple[str, str], rows_E: list[int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    left, weight, right = torch.randn(ROWS, 48), torch.randn(4, 48, 80), torch.randn(ROWS, 80)
    left[sum(rows_E) :], right[sum(rows_E) :] = torch.nan, torch.inf
    check(names, rows_E, left.to(dtype), weight.to(dtype), right.to(dtype))


@pytest.mark.parametrize("names", NAMES, ids=lambda names: names[0])
@settings(max_examples=10, deadline=None)
@given(
    rows_E=st.lists(st.sampled_from((0, 1, 7, 32, 65, 129)), min_size=1, max_size=5),
    inputs=st.sampled_from((1, 8, 31, 64, 130)),
    outputs=st.sampled_from((1, 16, 65, 136)),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 3),
    dtype=st.sampled_from((torch.bfloat16, torch.float32)),
    rest=st.sampled_from((0, 5)),
)
def test_any_size_and_strides(
    names: tuple[str, str],
    rows_E: list[int],
    inputs: int,
    outputs: int,
    layouts: tuple[Callable[..., Tensor], ...],
    dtype: torch.dtype,
    rest: int,
) -> None:
    torch.manual_seed(sum(rows_E) + inputs)
    rows = sum(rows_E) + rest
    shapes = ((rows, inputs), (len(rows_E), inputs, outputs), (rows, outputs))
    operands = [layout(*shape).to(dtype) for layout, shape in zip(layouts, shapes, strict=True)]
    check(names, rows_E, *operands)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("rows_E", LOADS.values(), ids=LOADS.keys())
def test_a_gradient_is_put_or_added_in_fp32(name: str, rows_E: list[int], adds: bool) -> None:
    """The sum is a part of a larger buffer, whose other elements stay."""
    torch.manual_seed(0)
    left, right = torch.randn(ROWS, 48).bfloat16(), torch.randn(ROWS, 80).bfloat16()
    left[sum(rows_E) :], right[sum(rows_E) :] = torch.nan, torch.inf
    buffer = torch.randn(4 * 48 * 80 + 32)
    before, total = buffer.clone(), buffer[16:-16].view(4, 48, 80)
    if not adds:
        total.fill_(torch.nan)  # what the last step left
    SUMS[name](left, right, groups_of(rows_E), total, adds)
    assert torch.equal(buffer[:16], before[:16])
    assert torch.equal(buffer[-16:], before[-16:])
    for expert, piece in enumerate(torch.arange(ROWS).split([*rows_E, ROWS - sum(rows_E)])[:-1]):
        exact = left[piece].double().T @ right[piece].double()
        rounded = 0 if "triton" in name else 2**-8 * exact.abs()  # others round to bf16 first
        exact += before[16:-16].view(4, 48, 80)[expert] if adds else 0
        assert ((total[expert] - exact).abs() <= 1e-4 + rounded).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_elsewhere_a_sum_has_the_bits_of_a_gradient_that_is_added(dtype: torch.dtype) -> None:
    left, right, groups = torch.randn(9, 8).to(dtype), torch.randn(9, 16).to(dtype), groups_of([4, 0, 3])
    for implementation in ("reference", "torch"):
        with using("grouped_gemm", implementation):
            total = torch.full((3, 8, 16), torch.nan, dtype=torch.promote_types(dtype, torch.float32))
            expected = weight_gradient(left, right, groups).to(total.dtype)
            add_weight_gradient(left, right, groups, total, False)
            assert torch.equal(total, expected)
            add_weight_gradient(left, right, groups, total, True)
            assert torch.equal(total, expected + expected)


def test_a_sum_of_another_shape_or_in_the_operands_memory_is_refused() -> None:
    left, right, groups = torch.randn(4, 8), torch.randn(4, 8), groups_of([4])
    with pytest.raises(ValueError, match=r"total has the shape \[1, 8, 9\], but must have \[1, 8, 8\]"):
        add_weight_gradient(left, right, groups, torch.zeros(1, 8, 9), False)
    buffer = torch.zeros(64)
    with pytest.raises(ValueError, match="total shares memory with left"):
        add_weight_gradient(buffer[:32].view(4, 8), right, groups, buffer.view(1, 8, 8), False)


@pytest.mark.parametrize("names", NAMES, ids=lambda names: names[0])
def test_no_rows_at_all_and_no_groups_after_them(names: tuple[str, str]) -> None:
    nothing = torch.empty(0, 8)
    assert PRODUCTS[names[0]](nothing, torch.randn(3, 8, 16), groups_of([0, 0, 0])).shape == (0, 16)
    gradient = GRADIENTS[names[1]](nothing, torch.empty(0, 16), groups_of([0, 0, 0]))
    assert torch.equal(gradient, torch.zeros(3, 8, 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows_E", [[2, 0, 3, 0], [0, 0, 0, 0], [0, 5, 0, 0], [1, 2, 3, 1]])
def test_torchs_operator_gives_what_each_group_gives_alone(rows_E: list[int], dtype: torch.dtype) -> None:
    left, weight, right = torch.randn(7, 8).to(dtype), turned(4, 8, 16).to(dtype), torch.randn(7, 16).to(dtype)
    with using("grouped_gemm", "torch"):
        groups = groups_of(rows_E)
        y_NO, gradient = multiply(left, weight, groups), weight_gradient(left, right, groups)
    assert not groups.on_host, "torch reads the ends where they are"
    for expert, piece in enumerate(torch.arange(7).split([*rows_E, 7 - sum(rows_E)])[:-1]):
        assert_close(y_NO[piece], left[piece], weight[expert])
        assert_close(gradient[expert], left[piece].T, right[piece])


def test_compiled_it_is_one_operator() -> None:
    left, weight, right, groups = torch.randn(9, 8), torch.randn(2, 8, 16), torch.randn(9, 16), groups_of([4, 3])

    def both(left: Tensor, weight: Tensor, right: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
        groups = Groups(ends_E)
        return multiply(left, weight, groups)[:7], weight_gradient(left, right, groups)

    torch.compiler.reset()
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    operands = (left, weight, right, groups.ends_E)
    assert all(map(torch.equal, compiled(*operands), both(*operands)))


def test_the_host_learns_the_rows_once() -> None:
    class Ends:
        asked = 0

        def tolist(self) -> list[int]:
            self.asked += 1
            return [2, 2, 5]

    ends = Ends()
    groups = Groups(ends)  # type: ignore[arg-type]
    assert not groups.on_host
    assert groups.rows() == groups.rows() == [2, 0, 3]
    assert groups.on_host
    assert ends.asked == 1


@pytest.mark.parametrize(
    ("left", "right", "ends", "message"),
    [
        (
            torch.zeros(4, 8),
            torch.zeros(2, 9, 3),
            [2, 4],
            r"weight has the shape \[2, 9, 3\], but must have \[E, 8, O\]",
        ),
        (torch.zeros(8), torch.zeros(2, 8, 3), [2, 4], r"x has the shape \[8\], but must have \[N, I\]"),
        (torch.zeros(4, 8), torch.zeros(2, 8, 3), [2, 4, 4], r"ends_E has the shape \[3\], but must have \[2\]"),
        (torch.zeros(4, 8), torch.zeros(2, 8, 3).half(), [2, 4], "x is float32, weight is float16"),
        (torch.zeros(4, 8), torch.zeros(2, 8, 3, device="meta"), [2, 4], "x on cpu, weight on meta"),
    ],
)
@pytest.mark.parametrize("implementation", ["reference", "torch", "auto"])
def test_bad_operands_are_refused(
    left: Tensor, right: Tensor, ends: list[int], message: str, implementation: str
) -> None:
    with (
        using("grouped_gemm", implementation),
        pytest.raises(ValueError, match=f"grouped_gemm.multiply: .*{message}"),
    ):
        multiply(left, right, Groups(torch.tensor(ends).int()))


def test_ends_of_another_format_and_gradients_of_other_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"groups.ends_E is int64, but must be one of int32"):
        multiply(torch.zeros(4, 8), torch.zeros(1, 8, 3), Groups(torch.tensor([4])))
    with pytest.raises(ValueError, match=r"right has the shape \[5, 3\], but must have \[4, O\]"):
        weight_gradient(torch.zeros(4, 8), torch.zeros(5, 3), groups_of([4]))


def lacks(dtype: torch.dtype, inputs: int, outputs: int) -> str | None:
    operands = torch.empty(4, inputs, dtype=dtype), torch.empty(2, inputs, outputs, dtype=dtype)
    return grouped_mm.lacks(*operands, groups_of([2, 2]))


def test_torchs_operator_takes_what_its_rules_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lacks(torch.float32, 16, 20) is None
    assert lacks(torch.float32, 16, 10) == "rows that are no multiple of 16 bytes"
    assert lacks(torch.bfloat16, 16, 20) == "rows that are no multiple of 16 bytes"
    assert lacks(torch.float64, 16, 16) == "float64 operands"
    monkeypatch.setattr(grouped_mm, "arch_of", lambda device: GFX942)
    monkeypatch.delenv(grouped_mm.SWITCH, raising=False)
    assert lacks(torch.bfloat16, 16, 16) == (
        "operands on AMD's GPUs without ROCM_ALLOW_GROUP_GEMM_CK=1, where it waits for the host"
    )
    monkeypatch.setenv(grouped_mm.SWITCH, "1")
    assert lacks(torch.bfloat16, 16, 16) is None


def test_what_was_not_measured_goes_by_the_rule() -> None:
    assert [MULTIPLY.preferred(arch, {}) for arch in (CPU, GFX942, GFX90A, SM_90)] == [
        [],
        ["aiter", "triton", "torch"],
        ["triton", "torch"],
        ["torch", "triton", "torch"],
    ]
    operands: list[Any] = [torch.randn(4, 8), torch.randn(2, 8, 8), groups_of([2, 2])]
    assert MULTIPLY.choose(*operands).name == "reference"
