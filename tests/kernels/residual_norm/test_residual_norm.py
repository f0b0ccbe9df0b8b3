"""Joined and normalised streams: every implementation against fp64, forward and backward.

On a GPU the same tests run the kernels there; without one they run in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.implementations import interpreted
from zslurm.kernels.arch import GFX942, SM_90, Arch, meta_tensors_on
from zslurm.kernels.dispatch import Operation, using
from zslurm.kernels.residual_norm import OPERATIONS, reference, residual_norm
from zslurm.kernels.residual_norm.reference import NormOperands

pytest.importorskip("triton")

FORWARD, BACKWARD = OPERATIONS
EPS = 1e-5
# Triton's interpreter truncates to bf16, where GPUs round: an error of one bit and not of half a bit.
EPSILON = {torch.bfloat16: 2**-7, torch.float32: 2**-23}
Run = Callable[..., Any]


def runs() -> dict[str, tuple[Run, Run]]:
    """Forward and backward of every implementation, on tensors of a CPU."""
    found: dict[str, tuple[Run, Run]] = {
        "reference": (reference.forward, reference.backward),
        "triton, interpreted": (
            partial(interpreted, FORWARD.name, "triton"),
            partial(interpreted, BACKWARD.name, "triton"),
        ),
    }
    if torch.cuda.is_available():
        for name in ("reference", "triton"):
            found[f"{name} on a GPU"] = partial(on_gpu, FORWARD, name), partial(on_gpu, BACKWARD, name)
    return found


def on_gpu(operation: Operation, name: str, *args: Any) -> tuple[Any, ...]:
    (chosen,) = [each for each in operation.all() if each.name == name]
    there = chosen.run(*(each.cuda() if isinstance(each, Tensor) else each for each in args))
    return tuple(None if each is None else each.cpu() for each in there)


RUNS = runs()
KINDS = ("entry", "first", "both biases")


def drawn(
    kind: str, rows: int, width: int, dtype: torch.dtype, stream: torch.dtype = torch.float32
) -> NormOperands:
    def vector(middle: float) -> Tensor:
        return (middle + 0.3 * torch.randn(width)).to(dtype)

    hidden, residual = torch.randn(rows, width).to(dtype), torch.randn(rows, width).to(stream)
    match kind:
        case "entry":
            vectors = (vector(1), vector(0), residual, vector(1), vector(0), vector(1), None)
        case "first":
            vectors = (vector(1), vector(0), None, None, None, vector(1), None)
        case _:
            vectors = (vector(1), vector(0), residual, vector(1), vector(0), vector(1), vector(0))
    return NormOperands(hidden, *vectors)


def wide(operands: NormOperands) -> list[Tensor | None]:
    return [None if each is None else each.double() for each in operands]


def assert_close(result: Tensor, expected: Tensor, scale: Tensor | float = 0.0) -> None:
    """One rounding of the result, and a few of fp32 numbers of this scale."""
    allowed = EPSILON[result.dtype] * expected.abs() + 4e-6 * (expected.abs() + scale) + 1e-30
    wrong = (result.double() - expected).abs() > allowed
    assert not wrong.any(), ((result.double() - expected).abs() / allowed).max()


def check(name: str, operands: NormOperands, *, centered: bool = False, eps: float = EPS) -> None:
    """Compare forward, and backward for drawn gradients, with the reference in fp64."""
    forward, backward = RUNS[name]
    x, joined, statistics = forward(eps, centered, *operands)
    expected = reference.forward(eps, centered, *wide(operands))
    assert x.dtype == operands.weight.dtype
    # Where a narrow row nearly vanishes, the norm enlarges the errors of t.
    steep = float(expected[2][0].clamp(min=1).max()) if expected[2].numel() else 1.0
    assert_close(x, expected[0], steep)
    assert_close(statistics, expected[2], expected[2].abs().max() if expected[2].numel() else 0.0)
    assert_close(joined, expected[1], 1.0)

    grads = torch.randn(x.shape).to(x.dtype), torch.randn(x.shape)
    found = backward(*grads, joined, statistics, *operands)
    exact = reference.backward(*(each.double() for each in grads), *expected[1:], *wide(operands))
    rows = x.numel() // x.shape[-1]
    for field, ours, theirs, operand in zip(NormOperands._fields, found, exact, operands, strict=True):
        assert (ours is None) == (theirs is None) == (operand is None), field
        if ours is not None:
            assert ours.dtype == operand.dtype
            assert ours.shape == operand.shape
            assert_close(
                ours, theirs, 8 * steep**2 * (1 if field in ("hidden", "residual") else max(1, rows) ** 0.5)
            )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("centered", [False, True])
def test_the_reference_is_the_formula_that_it_states(kind: str, centered: bool) -> None:
    torch.manual_seed(0)
    operands = drawn(kind, 5, 24, torch.float64, torch.float64)
    t = (operands.hidden + operands.hidden_bias) * operands.hidden_scale
    if operands.residual is not None:
        t = t + (operands.residual + operands.residual_bias) * operands.residual_scale
    expected = F.layer_norm(t, (24,), eps=EPS) if centered else F.rms_norm(t, (24,), eps=EPS)
    expected = expected * operands.weight + (0 if operands.bias is None else operands.bias)
    x, joined, _ = reference.forward(EPS, centered, *operands)
    torch.testing.assert_close(joined, t)
    torch.testing.assert_close(x, expected)


CALLS = {
    "rows": st.sampled_from((0, 1, 2, 7, 33)),
    "width": st.sampled_from((1, 2, 16, 31, 100, 256, 777)),
    "kind": st.sampled_from(KINDS),
    "dtype": st.sampled_from((torch.bfloat16, torch.float32)),
    "centered": st.booleans(),
}


def check_call(name: str, rows: int, width: int, kind: str, dtype: torch.dtype, centered: bool) -> None:
    torch.manual_seed(rows * 1000 + width)
    # The rows of one element that LayerNorm makes zero are all rounding.
    check(name, drawn(kind, rows, width, dtype), centered=centered and width > 1)


@pytest.mark.parametrize("name", RUNS)
@settings(max_examples=8, deadline=None)
@given(call=st.fixed_dictionaries(CALLS))
def test_results_are_those_of_fp64(name: str, call: dict[str, Any]) -> None:
    check_call(name, **call)


@pytest.mark.soak
@pytest.mark.parametrize("name", RUNS)
@settings(max_examples=100, deadline=None)
@given(call=st.fixed_dictionaries(CALLS))
def test_many_results_are_those_of_fp64(name: str, call: dict[str, Any]) -> None:
    check_call(name, **call)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("width", [2048, 2050, pytest.param(4112, marks=pytest.mark.soak)])
def test_wide_rows(name: str, width: int) -> None:
    """Rows of the width of a workgroup's tile, and of others."""
    torch.manual_seed(width)
    check(name, drawn("both biases", 5, width, torch.bfloat16), centered=width == 2050)


@pytest.mark.soak
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(17, 8192), (33, 6000), (100_000, 16)])
def test_very_wide_rows_and_many(name: str, centered: bool, rows: int, width: int) -> None:
    torch.manual_seed(width)
    check(name, drawn("both biases", rows, width, torch.float32), centered=centered)


@pytest.mark.parametrize("name", RUNS)
def test_more_rows_than_the_workgroups_of_a_card(name: str) -> None:
    """Every workgroup takes several tiles, the last of them not whole."""
    torch.manual_seed(0)
    check(name, drawn("entry", 1_001 if "interpreted" in name else 40_001, 8, torch.float32))
    check(name, drawn("entry", 101, 300, torch.bfloat16, torch.bfloat16))


@pytest.mark.parametrize("name", RUNS)
def test_streams_and_gradients_with_any_strides(name: str) -> None:
    torch.manual_seed(0)
    operands = drawn("entry", 12, 48, torch.float32)
    turned = operands._replace(
        hidden=torch.randn(48, 12).mT,
        residual=torch.randn(12, 100)[:, 7:55],
        weight=torch.randn(96)[::2],
        hidden_scale=torch.randn(1).expand(48),
    )
    check(name, turned)
    check(name, operands._replace(hidden=torch.randn(1, 48).expand(12, 48)))
    batched = operands._replace(
        hidden=torch.randn(3, 4, 48).transpose(0, 1), residual=torch.randn(4, 3, 50)[..., 1:49]
    )
    check(name, batched)
    forward, backward = RUNS[name]
    _, joined, statistics = forward(EPS, False, *operands)
    expanded = torch.ones(1, 1).expand(12, 48)
    plain = backward(torch.ones(12, 48), expanded.contiguous(), joined, statistics, *operands)
    for ours, theirs in zip(backward(expanded, expanded, joined, statistics, *operands), plain, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("centered", [False, True])
def test_huge_tiny_and_undefined_values_come_through(name: str, centered: bool) -> None:
    torch.manual_seed(0)
    operands = drawn("entry" if not centered else "both biases", 6, 40, torch.float32)
    operands.hidden[1, 3], operands.hidden[2, 4] = torch.nan, torch.inf
    for stream in (operands.hidden, operands.residual):
        assert stream is not None
        stream[3] *= 1e15
        stream[4] *= 1e-25
    forward, backward = RUNS[name]
    x, joined, statistics = forward(EPS, centered, *operands)
    exact = reference.forward(EPS, centered, *wide(operands))
    for ours, theirs in zip((x, joined, statistics), exact, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-5, atol=1e-6, equal_nan=True)
    grad = torch.randn(6, 40)
    found = backward(grad, grad, joined, statistics, *operands)
    there = reference.backward(grad.double(), grad.double(), *exact[1:], *wide(operands))
    for field, ours, theirs in zip(NormOperands._fields, found, there, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert torch.equal(ours.isfinite(), theirs.isfinite()), field
            if field in ("hidden", "residual"):
                torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", RUNS)
def test_the_same_call_gives_the_same_bits(name: str) -> None:
    torch.manual_seed(0)
    operands, grad = drawn("entry", 70, 100, torch.bfloat16), torch.randn(70, 100)
    forward, backward = RUNS[name]
    _, joined, statistics = forward(EPS, False, *operands)
    first, second = (backward(grad.bfloat16(), grad, joined, statistics, *operands) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first[:-1], second[:-1], strict=True))


@pytest.mark.parametrize("implementation", ["auto", "reference"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("centered", [False, True])
def test_gradients_are_those_of_finite_differences(implementation: str, kind: str, centered: bool) -> None:
    torch.manual_seed(0)
    operands = drawn(kind, 3, 5, torch.float64, torch.float64)
    tensors = [each.requires_grad_() for each in operands if each is not None]

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        values = iter(given)
        o = NormOperands(*(None if each is None else next(values) for each in operands))
        return residual_norm(
            o.hidden,
            o.weight,
            EPS,
            hidden_affine=None if o.hidden_scale is None else (o.hidden_scale, o.hidden_bias),
            residual=o.residual,
            residual_affine=None if o.residual_scale is None else (o.residual_scale, o.residual_bias),
            bias=o.bias,
            centered=centered,
        )

    with using("residual_norm", implementation):
        assert torch.autograd.gradcheck(run, tensors)


def test_a_result_that_does_not_count_has_a_gradient_of_zero() -> None:
    torch.manual_seed(0)
    hidden, weight, a, b = (torch.randn(*shape).requires_grad_() for shape in ((4, 8), (8,), (8,), (8,)))
    for picked, ours in ((0, True), (1, False)):
        results = residual_norm(hidden, weight, EPS, hidden_affine=(a, b))
        grads = torch.autograd.grad(results[picked].sum(), (hidden, weight))
        assert bool(grads[1].any()) is ours


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["entry", "first"])
def test_the_compiler_sees_the_reference(kind: str) -> None:
    torch.manual_seed(0)
    operands = drawn(kind, 6, 8, torch.bfloat16)
    weights = [torch.randn(6, 8), torch.randn(6, 8)]

    def loss(run: Any) -> tuple[Tensor, ...]:
        leaves = [None if each is None else each.detach().requires_grad_() for each in operands]
        h, a, b, r, c, d, w, _ = leaves
        affine = None if r is None else (c, d)
        x, joined = run(h, w, EPS, hidden_affine=(a, b), residual=r, residual_affine=affine)
        total = (x * weights[0]).sum() + (joined * weights[1]).sum()
        return torch.autograd.grad(total, [each for each in leaves if each is not None])

    with using("residual_norm", "reference"):
        plain = loss(residual_norm)
    for ours, theirs in zip(
        loss(torch.compile(residual_norm, fullgraph=True, backend="aot_eager")), plain, strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("arch", "width", "dtype", "name"),
    [
        (GFX942, 2048, torch.bfloat16, "triton"),
        (GFX942, 8192, torch.float32, "triton"),
        (GFX942, 8208, torch.bfloat16, "reference"),
        (GFX942, 2050, torch.bfloat16, "reference"),
        (GFX942, 2048, torch.float64, "reference"),
        (SM_90, 4096, torch.bfloat16, "triton"),
        (SM_90, 4112, torch.bfloat16, "reference"),
    ],
)
def test_what_runs_depends_on_the_device_and_the_rows(
    arch: Arch, width: int, dtype: torch.dtype, name: str
) -> None:
    hidden, vector = (
        torch.empty(4, width, dtype=dtype, device="meta"),
        torch.empty(width, dtype=dtype, device="meta"),
    )
    first = NormOperands(hidden, vector, vector, None, None, None, vector, None)
    with meta_tensors_on(arch):
        assert FORWARD.choose(EPS, False, *first).name == name
        assert BACKWARD.choose(hidden, hidden, hidden, hidden, *first).name == name
    assert FORWARD.choose(EPS, False, *drawn("entry", 2, 16, torch.float32)).name == "reference"


def test_tiles_follow_the_card() -> None:
    from zslurm.kernels.residual_norm.triton import configuration

    for arch in (GFX942, SM_90):
        for rows in (1, 1000, 100_000):
            for width in (16, 64, 1536, 2048, 8192):
                for backward in (False, True):
                    shape, num_warps, programs = configuration(arch, rows, width, backward=backward)
                    assert num_warps * arch.wave_size <= 1024
                    assert 0 < programs <= -(-rows // shape.ROWS)
        assert configuration(arch, 100_000, 2048, backward=True).programs <= 2 * arch.compute_units
    assert configuration(GFX942, 4096, 2048).num_warps == 4, "or lanes would read less than 16 bytes"


GOOD = drawn("entry", 2, 8, torch.float32)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden": torch.zeros(8)}, r"residual_norm: hidden has the shape \[8\], but must have \[..., D\]"),
        ({"hidden": torch.zeros(2, 0)}, r"but must have .* with D of at least 1"),
        ({"residual": torch.zeros(3, 8)}, r"residual has the shape \[3, 8\], but must have \[2, 8\]"),
        ({"weight": torch.zeros(7)}, r"weight has the shape \[7\], but must have \[8\]"),
        ({"residual": None}, "residual, its scale and its bias are given together"),
        ({"weight": torch.zeros(8, dtype=torch.int32)}, "weight is int32, but must be one of bfloat16"),
        (
            {"weight": torch.zeros(8, dtype=torch.float64)},
            "all operands must have one format, but .*weight is float64",
        ),
        ({"weight": torch.zeros(8, device="meta")}, "on one device, not .*weight on meta"),
    ],
)
def test_bad_operands_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FORWARD(EPS, False, *GOOD._replace(**changed))


def test_a_bad_epsilon_is_refused() -> None:
    with pytest.raises(ValueError, match=r"eps is -1\.0, but must be at least 0"):
        FORWARD(-1.0, False, *GOOD)
