"""Joined and normalised streams: every implementation against fp64, forward and backward.

On a GPU the same tests run the kernels there; without one they run in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.implementations import interpreted
from zslurm.kernels.arch import GFX942, SM_90
from zslurm.kernels.dispatch import Operation, using
from zslurm.kernels.residual_norm import OPERATIONS, by_torch, norm, reference, residual_norm
from zslurm.kernels.residual_norm.operands import NormOperands

pytest.importorskip("triton")

FORWARD, BACKWARD = OPERATIONS
EPS = 1e-5
# Triton's interpreter truncates to bf16, where GPUs round: an error of one bit and not of half a bit.
EPSILON = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-23}
Run = Callable[..., Any]


def runs() -> dict[str, tuple[Run, Run]]:
    """Forward and backward of every implementation, on tensors of a CPU."""
    found: dict[str, tuple[Run, Run]] = {
        "reference": (reference.forward, reference.backward),
        "torch": (by_torch.forward, by_torch.backward),
        "triton, interpreted": (
            partial(interpreted, FORWARD.name, "triton"),
            partial(interpreted, BACKWARD.name, "triton"),
        ),
    }
    if torch.cuda.is_available():
        for name in ("reference", "torch", "triton"):
            found[f"{name} on a GPU"] = partial(on_gpu, FORWARD, name), partial(on_gpu, BACKWARD, name)
    return found


def on_gpu(operation: Operation, name: str, *args: Any) -> tuple[Any, ...]:
    (chosen,) = [each for each in operation.all() if each.name == name]
    there = chosen.run(*(each.cuda() if isinstance(each, Tensor) else each for each in args))
    return tuple(None if each is None else each.cpu() for each in there)


RUNS = runs()
KINDS = ("entry", "first", "plain", "alone", "both biases")


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
        case "plain":
            vectors = (None, None, residual, None, None, vector(1), None)
        case "alone":
            vectors = (None, None, None, None, None, vector(1), None)
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


def check(
    name: str, operands: NormOperands, *, centered: bool = False, grads: str = "both", eps: float = EPS
) -> None:
    """Compare forward, and backward for drawn gradients of what `grads` names, with the reference in fp64."""
    if name.startswith("torch") and by_torch.lacks(centered, operands):
        return
    forward, backward = RUNS[name]
    x, joined, statistics = forward(eps, centered, *operands)
    expected = reference.forward(eps, centered, *wide(operands))
    assert x.dtype == operands.weight.dtype
    # Where a narrow row nearly vanishes, the norm enlarges the errors of t.
    steep = float(expected[2][0].clamp(min=1).max()) if expected[2].numel() else 1.0
    assert_close(x, expected[0], steep)
    assert_close(statistics, expected[2], expected[2].abs().max() if expected[2].numel() else 0.0)
    assert joined.numel() == (x.numel() if operands.joins else 0)
    if operands.joins:
        assert_close(joined, expected[1], 1.0)

    grad_x = torch.randn(x.shape).to(x.dtype) if grads in ("both", "x") else None
    grad_joined = torch.randn(x.shape) if grads in ("both", "joined") and operands.joins else None
    if grad_x is None and grad_joined is None:
        return
    found = backward(grad_x, grad_joined, joined, statistics, *operands)
    there = [None if each is None else each.double() for each in (grad_x, grad_joined)]
    exact = reference.backward(*there, expected[1], expected[2], *wide(operands))
    rows = x.numel() // x.shape[-1]
    for field, ours, theirs, operand in zip(NormOperands._fields, found, exact, operands, strict=True):
        assert (ours is None) == (theirs is None), field
        if ours is not None:
            assert ours.dtype == operand.dtype
            assert ours.shape == operand.shape
            assert_close(
                ours, theirs, 8 * steep**2 * (1 if field in ("hidden", "residual") else max(1, rows) ** 0.5)
            )


CALLS = {
    "rows": st.sampled_from((0, 1, 2, 7, 33)),
    "width": st.sampled_from((1, 2, 16, 31, 100, 256, 777)),
    "kind": st.sampled_from(KINDS),
    "dtype": st.sampled_from((torch.bfloat16, torch.float16, torch.float32)),
    "centered": st.booleans(),
    "grads": st.sampled_from(("both", "x", "joined")),
}


def check_call(
    name: str, rows: int, width: int, kind: str, dtype: torch.dtype, centered: bool, grads: str
) -> None:
    torch.manual_seed(rows * 1000 + width)
    # The rows of one element that LayerNorm makes zero are all rounding.
    check(name, drawn(kind, rows, width, dtype), centered=centered and width > 1, grads=grads)


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
    """Rows that a workgroup holds, some of another width than its tile, and rows in pieces."""
    torch.manual_seed(width)
    check(name, drawn("both biases", 5, width, torch.bfloat16), centered=width == 2050)


@pytest.mark.soak
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(17, 8191), (5, 16384), (33, 20001), (3, 32768), (100_000, 16)])
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
    if name.startswith("torch") and by_torch.lacks(centered, operands):
        pytest.skip("does not take LayerNorm")
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


def test_the_norm_alone_is_the_reference_on_every_device() -> None:
    torch.manual_seed(0)
    for centered in (False, True):
        operands = drawn("alone", 7, 24, torch.bfloat16)._replace(bias=torch.randn(24).bfloat16())
        expected, _, _ = reference.forward(EPS, centered, *wide(operands))
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            there = [operands[index].to(device) for index in (0, 6, 7)]
            x = norm(there[0], there[1], EPS, bias=there[2], centered=centered).cpu()
            torch.testing.assert_close(x.double(), expected, rtol=2**-8, atol=2**-8)
            torch.testing.assert_close(norm(there[0][0], *there[1:2], EPS, centered=centered).shape, x[0].shape)


@pytest.mark.parametrize("grads", [pytest.param("both", marks=pytest.mark.soak), "x", "joined"])
def test_the_compiler_sees_one_operator_in_each_direction(grads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU's graphs hold, with the reference inside."""
    from zslurm.kernels.residual_norm import compiled

    monkeypatch.setattr(compiled, "forward_of", lambda *_: compiled.forward_in_graph)
    monkeypatch.setattr(compiled, "backward_of", lambda *_: compiled.backward_in_graph)
    torch.manual_seed(0)
    operands = drawn("entry", 6, 8, torch.bfloat16)
    weights = [torch.randn(6, 8), torch.randn(6, 8)]

    def loss(run: Any) -> tuple[Tensor, ...]:
        leaves = [None if each is None else each.detach().requires_grad_() for each in operands]
        h, a, b, r, c, d, w, _ = leaves
        x, joined = run(h, w, EPS, hidden_affine=(a, b), residual=r, residual_affine=(c, d))
        total = (x * weights[0]).sum() if grads != "joined" else 0
        total = total + (joined * weights[1]).sum() if grads != "x" else total
        return torch.autograd.grad(total, [each for each in leaves if each is not None], allow_unused=True)

    plain, compiled_run = (
        loss(residual_norm),
        loss(torch.compile(residual_norm, fullgraph=True, backend="aot_eager")),
    )
    for ours, theirs in zip(compiled_run, plain, strict=True):
        assert ours is None or theirs is None or torch.equal(ours, theirs)
        assert (ours is None or not ours.any()) == (theirs is None or not theirs.any())


def test_what_runs_depends_on_device_and_form() -> None:
    entry, plain = (drawn(kind, 2, 8, torch.float32) for kind in ("entry", "plain"))
    assert FORWARD.choose(EPS, False, *entry).name == "torch"
    assert FORWARD.choose(EPS, True, *entry).name == "reference"
    assert FORWARD.choose(EPS, False, *plain).name == "reference"
    assert FORWARD.rule(GFX942, {"dtype": "bfloat16", "rows": 1, "width": 8}) is None, "the order of preference"
    with using("residual_norm", "reference"):
        assert FORWARD.choose(EPS, False, *entry).name == "reference"


def test_tiles_follow_the_card() -> None:
    from zslurm.kernels.residual_norm.triton.tiles import backward_configuration, forward_configuration

    for arch in (GFX942, SM_90):
        for rows in (1, 1000, 100_000):
            for width in (1, 64, 2048, 8192, 32768):
                for chosen in (
                    forward_configuration(arch, rows, width),
                    backward_configuration(arch, rows, width),
                ):
                    assert chosen.num_warps * arch.wave_size <= 1024
                    assert 0 < chosen.programs <= -(-rows // chosen.rows)
        assert backward_configuration(arch, 100_000, 2048).programs <= 2 * arch.compute_units
    assert forward_configuration(GFX942, 4096, 2048).num_warps == 4, "or lanes would read less than 16 bytes"


GOOD = drawn("entry", 2, 8, torch.float32)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden": torch.zeros(8)}, r"residual_norm: hidden has the shape \[8\], but must have \[..., D\]"),
        ({"hidden": torch.zeros(2, 0)}, r"but must have .* with D of at least 1"),
        ({"residual": torch.zeros(3, 8)}, r"residual has the shape \[3, 8\], but must have \[2, 8\]"),
        ({"weight": torch.zeros(7)}, r"weight has the shape \[7\], but must have \[8\]"),
        ({"hidden_bias": None}, "hidden_scale and hidden_bias are given together"),
        ({"residual": None}, "residual_scale is given without residual"),
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


def test_bad_gradients_and_epsilons_are_refused() -> None:
    x, joined, statistics = FORWARD(EPS, False, *GOOD)
    with pytest.raises(ValueError, match=r"eps is -1\.0, but must be at least 0"):
        FORWARD(-1.0, False, *GOOD)
    with pytest.raises(ValueError, match=r"neither grad_x nor grad_joined"):
        BACKWARD(None, None, joined, statistics, *GOOD)
    with pytest.raises(ValueError, match=r"grad_x has the shape \[2, 7\]"):
        BACKWARD(x[:, :7], None, joined, statistics, *GOOD)
    with pytest.raises(ValueError, match="joined is bfloat16, but must be one of float32"):
        BACKWARD(x, None, joined.bfloat16(), statistics, *GOOD)
