"""Queries and keys of their projections: every implementation against float64, and what each takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.implementations import interpreted as interpreted_pass
from tests.kernels.qk_conv import definition
from tests.kernels.qk_conv.passes import Case, Result, defined, here, interpreted, on_gpu
from zslurm.kernels import qk_conv as package
from zslurm.kernels.arch import GFX942, SM_90, meta_tensors_on
from zslurm.kernels.dispatch import using
from zslurm.kernels.qk_conv import OPERATIONS, Convolutions, JoinedKernel, join, lacks_in_triton, qk_conv

pytest.importorskip("triton")

WAYS: dict[str, Callable[[Case], Result]] = {
    "the definition": defined,
    "reference": lambda case: here("reference", case),
    "triton, interpreted": interpreted,
}
needs_gpu = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here"))
EVERY_WAY = [*WAYS, pytest.param("triton on a GPU", marks=needs_gpu)]
# Relative to the largest element. Triton's interpreter truncates to bf16, where GPUs round.
TOLERANCE = {torch.bfloat16: 4e-2, torch.float32: 2e-5, torch.float64: 1e-12}


def run(way: str, case: Case) -> Result:
    return (WAYS | {"triton on a GPU": on_gpu})[way](case)


def case_of(
    *,
    batch: int = 2,
    length: int = 7,
    keys: int = 2,
    group: int = 2,
    head_dim: int = 16,
    widths: tuple[int, int] = (2, 2),
    pairs: int = 4,
    divided: bool = False,
    behind: bool = False,
    joined: bool = False,
    cut: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """Random operands: `divided` into documents, `behind` others, `joined`, z and angles `cut` of wider ones."""
    torch.manual_seed(seed)
    heads, reach = keys * (group + 1), sum(widths) - 2
    channels = heads * head_dim
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    angles = torch.rand(*([batch] if divided else []), length, pairs, dtype=wide) * 6
    linked = None
    if divided:
        document_BS = torch.randint(0, 3, (batch, length)).sort(dim=1).values
        linked = tuple(
            torch.stack([F.pad(row[distance:] == row[:-distance], (distance, 0))[:length] for row in document_BS])
            if distance < length
            else torch.zeros(batch, length, dtype=torch.bool)
            for distance in range(1, max(1, reach) + 1)
        )
        linked = tuple(each.unsqueeze(-1) for each in linked)
    kernel: Any = Convolutions(
        torch.randn(channels, 1, widths[0]) / math.sqrt(widths[0]),
        torch.randn(channels) / 4,
        torch.randn(channels, head_dim, widths[1]) / math.sqrt(widths[1] * head_dim),
        torch.randn(channels) / 4,
    )
    kernel = Convolutions(*(part.to(dtype) for part in kernel))
    if joined:
        kernel = join(kernel)
    return Case(
        z_BSQ=torch.randn(batch, length, channels + 8 * cut).to(dtype)[:, :, 8 * cut :],
        kernel=kernel,
        temperature_J=torch.randn(keys).to(dtype),
        cos=F.pad(angles.cos(), (0, cut))[..., :pairs],
        sin=F.pad(angles.sin(), (0, cut))[..., :pairs],
        linked=linked,
        before_BWQ=torch.randn(batch, reach, channels).to(dtype) if behind else None,
        # As attention leaves them: heads behind tokens in memory.
        grad_q_BHSP=torch.randn(batch, length, keys * group, head_dim).to(dtype).transpose(1, 2),
        grad_k_BJSP=torch.randn(batch, keys, length, head_dim).to(dtype),
    )


def assert_close(result: Result, case: Case) -> None:
    expected = defined(case.converted(torch.float64))
    assert result.keys() == expected.keys()
    wrong = {}
    for name, exact in expected.items():
        scale = exact.abs().max()
        if name == "gradient of temperature":  # few sums over all tokens, whose terms may cancel
            terms_BJSP = case.grad_k_BJSP * expected["k"] / case.temperature_J.double().view(-1, 1, 1)
            scale = terms_BJSP.abs().sum(dim=(0, 2, 3)).max()
        error = (result[name].double() - exact).abs().max() / scale.clamp_min(1e-30)
        if not error <= TOLERANCE[case.z_BSQ.dtype] or result[name].shape != exact.shape:
            wrong[name] = float(error)
    assert wrong == {}


BF16 = {"dtype": torch.bfloat16}
CASES: dict[str, dict[str, Any]] = {
    "as ZAYA1, smaller": {"length": 19, "keys": 1, "group": 4, "head_dim": 16, "pairs": 4, "cut": True, **BF16},
    "documents": {"length": 33, "keys": 1, "group": 1, "divided": True, "widths": (2, 3)},
    "short documents": {"divided": True, **BF16},
    "one token": {"length": 1, "group": 1},
    "one tap, no rotation": {"widths": (1, 1), "pairs": 0},
    "all channels rotate": {"pairs": 8, "keys": 1, "cut": True},
    "odd heads": {"head_dim": 11, "pairs": 3, "keys": 1, "group": 3, "length": 17},
    "joined": {"joined": True, "widths": (3, 1), "keys": 1, **BF16},
    "behind others": {"behind": True, "length": 5, "widths": (3, 3)},
    "a document behind others": {"behind": True, "divided": True, "length": 19, **BF16},
    "one token behind others": {"behind": True, "length": 1, "joined": True},
}


@pytest.mark.parametrize("way", EVERY_WAY)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_queries_keys_and_gradients_are_those_of_float64(way: str, case: dict[str, Any]) -> None:
    operands = case_of(**case)
    assert_close(run(way, operands), operands)


DRAWN = {
    "batch": st.integers(1, 3),
    "length": st.sampled_from((1, 2, 3, 5, 16, 17, 33)),
    "keys": st.integers(1, 2),
    "group": st.integers(1, 3),
    "head_dim": st.sampled_from((8, 11, 16, 24)),
    "widths": st.tuples(st.integers(1, 3), st.integers(1, 3)),
    "pairs": st.sampled_from((0, 1, 2, 4)),
    "divided": st.booleans(),
    "behind": st.booleans(),
    "joined": st.booleans(),
    "cut": st.booleans(),
    "dtype": st.sampled_from((torch.bfloat16, torch.float32)),
    "seed": st.integers(0, 1000),
}


@pytest.mark.parametrize("way", EVERY_WAY)
@settings(max_examples=4, deadline=None)
@given(drawn=st.fixed_dictionaries(DRAWN))
def test_drawn_shapes(way: str, drawn: dict[str, Any]) -> None:
    operands = case_of(**drawn)
    assert_close(run(way, operands), operands)


@pytest.mark.soak
@pytest.mark.parametrize("way", EVERY_WAY)
@settings(max_examples=150, deadline=None)
@given(drawn=st.fixed_dictionaries(DRAWN))
def test_many_drawn_shapes(way: str, drawn: dict[str, Any]) -> None:
    operands = case_of(**drawn)
    assert_close(run(way, operands), operands)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here")
@pytest.mark.parametrize("divided", [False, True])
def test_a_gpu_computes_zaya1s_heads_and_repeats_its_bits(divided: bool) -> None:
    operands = case_of(
        length=1025, keys=2, group=4, head_dim=128, pairs=32, cut=True, divided=divided, dtype=torch.bfloat16
    )
    first = on_gpu(operands)
    assert_close(first, operands)
    assert all(torch.equal(first[name], again) for name, again in on_gpu(operands).items())


def test_partial_sums_of_weights_give_the_same_gradients_and_the_same_bits() -> None:
    operands = case_of(length=33, keys=1, group=1, widths=(1, 2))
    many = interpreted(operands, compute_units=1000)  # one part for each of four tiles
    assert_close(many, operands)
    again = interpreted(operands, compute_units=1000)
    assert all(torch.equal(many[name], again[name]) for name in many)


@pytest.mark.parametrize(("joined", "divided"), [(False, True), (True, False)])
def test_gradients_are_those_of_finite_differences(joined: bool, divided: bool) -> None:
    case = case_of(
        length=4, keys=1, head_dim=4, pairs=1, widths=(2, 2), divided=divided, joined=joined, dtype=torch.float64
    )
    leaves = [each.requires_grad_() for each in (case.z_BSQ, *case.kernel, case.temperature_J)]

    def mixed(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        z_BSQ, *kernel, temperature_J = leaves
        return qk_conv(z_BSQ, type(case.kernel)(*kernel), temperature_J, case.cos, case.sin, case.linked)

    assert torch.autograd.gradcheck(mixed, leaves)


@pytest.mark.parametrize("widths", [(2, 2), (1, 1), (1, 3), (3, 1), (3, 4)])
def test_a_joined_kernel_is_both_convolutions_behind_one_padding(widths: tuple[int, int]) -> None:
    case = case_of(widths=widths, dtype=torch.float64)
    padded_BQS = F.pad(case.z_BSQ.transpose(1, 2), (sum(widths) - 2, 0))

    def convolved(kernel: Convolutions) -> Tensor:
        depthwise, depthwise_bias, grouped, grouped_bias = kernel
        middle_BQS = F.conv1d(padded_BQS, depthwise, depthwise_bias, groups=len(depthwise))
        return F.conv1d(middle_BQS, grouped, grouped_bias, groups=6)

    kernel = case.kernel
    assert isinstance(kernel, Convolutions)
    assert join(kernel).reach == kernel.reach == sum(widths) - 2
    torch.testing.assert_close(convolved(definition.as_convolutions(join(kernel))), convolved(kernel))


@pytest.mark.parametrize("way", EVERY_WAY)
def test_each_document_is_as_if_it_were_alone(way: str) -> None:
    case = case_of(batch=1, length=9, divided=True, widths=(3, 2))
    far = torch.tensor([0, 0, 0, 0, 1, 2, 2, 2, 2])
    linked = tuple(F.pad(far[d:] == far[:-d], (d, 0)).view(1, -1, 1) for d in range(1, 4))
    whole = run(way, Case(**{**vars(case), "linked": linked}))
    for start, end in ((0, 4), (4, 5), (5, 9)):
        parts = {
            "z_BSQ": case.z_BSQ[:, start:end],
            "cos": case.cos[:, start:end],
            "sin": case.sin[:, start:end],
            "linked": None,
            "grad_q_BHSP": case.grad_q_BHSP[:, :, start:end],
            "grad_k_BJSP": case.grad_k_BJSP[:, :, start:end],
        }
        alone = run(way, Case(**{**vars(case), **parts}))
        for name, axis in (("q", 2), ("k", 2), ("gradient of z", 1)):
            piece = whole[name].narrow(axis, start, end - start)
            torch.testing.assert_close(piece, alone[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", EVERY_WAY)
def test_what_is_not_finite_reaches_the_tokens_that_see_it_and_no_others(way: str) -> None:
    case = case_of(batch=1, length=20, keys=1, group=1)
    case.z_BSQ[0, 9, 3], case.z_BSQ[0, 15, 5] = torch.nan, torch.inf
    result = run(way, case)
    wrong_S = ~torch.cat([result["q"], result["k"]], dim=1).isfinite().all(dim=3)[0]
    assert wrong_S[0].nonzero().flatten().tolist() == [9, 10, 11, 15, 16, 17]
    assert result["gradient of temperature"].isnan().all()


@pytest.mark.parametrize("way", EVERY_WAY)
@pytest.mark.parametrize("size", [1e-4, 1e12])
def test_huge_and_tiny_projections_keep_their_direction(way: str, size: float) -> None:
    case = case_of(batch=1, length=3, keys=1)
    case.kernel[1].zero_()
    case.kernel[3].zero_()
    scaled = Case(**{**vars(case), "z_BSQ": case.z_BSQ * size})
    torch.testing.assert_close(run(way, scaled)["q"], run(way, case)["q"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("divided", [pytest.param(False, marks=pytest.mark.soak), True])
def test_compiled_on_a_cpu_it_is_one_graph_with_the_same_results(divided: bool) -> None:
    case = case_of(divided=divided)
    compiled = torch.compile(qk_conv, fullgraph=True, backend="aot_eager")

    def both(function: Any) -> list[Tensor]:
        z_BSQ = case.z_BSQ.clone().requires_grad_()
        q, k = function(z_BSQ, case.kernel, case.temperature_J, case.cos, case.sin, case.linked)
        torch.autograd.backward([q, k], [case.grad_q_BHSP, case.grad_k_BJSP])
        assert z_BSQ.grad is not None
        return [q, k, z_BSQ.grad]

    torch.compiler.reset()
    torch.testing.assert_close(both(compiled), both(qk_conv))


@pytest.mark.parametrize("keeps", [True, False])
def test_the_operators_that_a_compiler_sees_on_a_gpu_compute_the_same(
    keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package, "is_opaque", lambda operands: True)
    case = case_of(divided=True)
    rest = case.temperature_J, case.cos, case.sin, case.linked

    def both(z_BSQ: Tensor, depthwise_Q1W: Tensor) -> tuple[Tensor, Tensor]:
        return qk_conv(z_BSQ, Convolutions(depthwise_Q1W, *case.kernel[1:]), *rest)

    torch.compiler.reset()
    results = []
    for function in (torch.compile(both, fullgraph=True, backend="aot_eager"), both):
        leaves = [each.clone().requires_grad_(keeps) for each in (case.z_BSQ, case.kernel[0])]
        q, k = function(*leaves)
        if keeps:
            torch.autograd.backward([q, k], [case.grad_q_BHSP, case.grad_k_BJSP])
        results.append([q, k, *(leaf.grad for leaf in leaves if keeps)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("chosen", [True, False])
@pytest.mark.parametrize("how", ["no_grad", "inference", "frozen", "trained"])
def test_what_the_gradient_takes_is_written_only_where_there_will_be_one(
    how: str, chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = []

    def seen(run: Callable[..., tuple[Tensor, ...]], keeps: bool, *operands: Tensor | None) -> tuple[Tensor, ...]:
        results = run(keeps, *(None if each is None else each.detach() for each in operands))
        kept.append([result.numel() for result in results[2:]])
        return results

    # What a GPU runs, in the interpreter; and torch's functions.
    by_triton = partial(interpreted_pass, "qk_conv.forward", "triton")
    monkeypatch.setattr(package, "forward", partial(seen, by_triton if chosen else package.reference.forward))
    case = case_of(length=5, keys=1)
    leaves = case.z_BSQ, *case.kernel, case.temperature_J
    for leaf in leaves:
        leaf.requires_grad_(how != "frozen")
    enabled = {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(how, nullcontext)
    with enabled():
        q_BHSP, _ = qk_conv(case.z_BSQ, case.kernel, case.temperature_J, case.cos, case.sin)
    assert q_BHSP.requires_grad == (how == "trained")
    tokens = 2 * 5 * 3  # batches, length, heads
    assert kept == [[tokens * 16, tokens] if how == "trained" else [0, 0]]


def test_if_no_table_is_there_a_cpu_takes_the_reference_and_a_gpu_the_kernels() -> None:
    case = case_of()
    operands = case.z_BSQ, *join(case.kernel), case.temperature_J, case.cos, case.sin, None, None
    results = here("reference", case)
    names = []
    for arch in (None, GFX942, SM_90):
        moved = operands if arch is None else [each if each is None else each.to("meta") for each in operands]
        with nullcontext() if arch is None else meta_tensors_on(arch):
            kept = results["q"], results["k"], results["q"], results["q"]
            names += [OPERATIONS[0].choose(True, *moved).name, OPERATIONS[1].choose(*kept, *moved).name]
    assert names == ["reference"] * 2 + ["triton"] * 4


@pytest.mark.parametrize(
    ("dtype", "head_dim", "expected"),
    [
        (torch.bfloat16, 128, None),
        (torch.float32, 64, None),
        (torch.float64, 16, "float64 operands"),
        (torch.bfloat16, 136, "heads of more than 128 channels"),
        (torch.float32, 65, "heads of more than 64 channels in float32"),
        (torch.bfloat16, 128, "sequences of 2^31 elements of a head"),
    ],
)
def test_the_kernels_refuse_with_the_reason(dtype: torch.dtype, head_dim: int, expected: str | None) -> None:
    class OnGpu:
        device = torch.device("cuda")

    z_BSQ: Any = OnGpu()
    z_BSQ.dtype = dtype
    z_BSQ.shape = (1, 2**24 if expected and "2^31" in expected else 2**24 - 1, 3 * head_dim)
    assert lacks_in_triton(z_BSQ, torch.empty(3, head_dim, head_dim)) == expected
    assert lacks_in_triton(torch.empty(1, 4, 24), torch.empty(3, 8, 8)) == "operands on cpu"


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "z": ({"z_BSQ": torch.zeros(2, 7)}, r"z has the shape \[2, 7\], but must have \[B, S, Q\]"),
    "no tokens": ({"z_BSQ": torch.zeros(2, 0, 96)}, r"z has no tokens: its shape is \[2, 0, 96\]"),
    "channels": (
        {"z_BSQ": torch.zeros(2, 7, 80)},
        r"depthwise has the shape \[96, 1, 2\], but must have \[80, 1, W\]",
    ),
    "joined": (
        {"kernel": JoinedKernel(torch.zeros(5, 48, 16), torch.zeros(5, 16))},
        "z has 96 channels, which are no heads of the kernel's 16 channels",
    ),
    "keys": ({"temperature_J": torch.zeros(4)}, "4 key heads of 6 heads leave queries that do not divide"),
    "no keys": ({"temperature_J": torch.zeros(0)}, "0 key heads of 6 heads"),
    "angles": ({"cos": torch.zeros(6, 4)}, r"cos has the shape \[6, 4\], but must have \[7, 4\]"),
    "pairs": ({"cos": torch.zeros(7, 9)}, "9 pairs of channels rotate in a head of 16 channels"),
    "angles' format": ({"sin": torch.zeros(7, 4).bfloat16()}, "sin is bfloat16, but must be one of float32"),
    "documents": (
        {"linked": (torch.zeros(2, 7, 1).bool(),)},
        "linked has 1 distances, but the kernel looks back 2",
    ),
    "documents' format": (
        {"linked": (torch.zeros(2, 7, 1),) * 2},
        r"linked\[0\] is float32, but must be one of bool",
    ),
    "before": (
        {"before_BWQ": torch.zeros(2, 3, 96)},
        r"before has the shape \[2, 3, 96\], but must have \[2, 2, 96\]",
    ),
    "formats": ({"temperature_J": torch.zeros(2).half()}, "one format, but z is float32, temperature is float16"),
    "devices": (
        {"temperature_J": torch.zeros(2, device="meta")},
        "on one device, not z on cpu, temperature on meta",
    ),
    "whole numbers": ({"z_BSQ": torch.zeros(2, 7, 96).int()}, "z is int32, but must be one of bfloat16"),
}


@pytest.mark.parametrize(("wrong", "message"), BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("implementation", ["reference", "triton", "auto"])
def test_bad_operands_are_refused(wrong: dict[str, Any], message: str, implementation: str) -> None:
    case = {**vars(case_of()), **wrong}
    names = ("z_BSQ", "kernel", "temperature_J", "cos", "sin", "linked", "before_BWQ")
    with using("qk_conv", implementation), pytest.raises(ValueError, match=f"qk_conv: .*{message}"):
        qk_conv(*(case[name] for name in names))


def test_tokens_before_the_first_take_no_gradient() -> None:
    case = case_of(behind=True)
    operands = case.z_BSQ.requires_grad_(), case.kernel, case.temperature_J, case.cos, case.sin
    with pytest.raises(ValueError, match=r"for inference: call it under torch.no_grad\(\)"):
        qk_conv(*operands, before_BWQ=case.before_BWQ)
    with torch.no_grad():
        q_BHSP, _ = qk_conv(*operands, before_BWQ=case.before_BWQ)
    assert not q_BHSP.requires_grad


def test_a_pass_that_cannot_start_is_the_references_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: object) -> None:
        raise ImportError("no module named triton")

    case = case_of()
    both = OPERATIONS
    real = [operation.implementation("triton") for operation in both]
    for operation, triton in zip(both, real, strict=True):
        operation.put(replace(triton, run=broken, supports=lambda *_: None))
    try:
        for _ in range(2):
            assert_close(here("triton", case), case)
    finally:
        for operation, triton in zip(both, real, strict=True):
            operation.put(triton)
            operation.try_again()
    assert [message.split(",")[0] for message in caplog.messages] == [
        "qk_conv.forward runs without triton",
        "qk_conv.backward runs without triton",
    ]


def test_the_definition_is_the_published_order() -> None:
    """One token and one head at a time, of the formula alone."""
    case = case_of(batch=1, length=4, keys=1, group=2, head_dim=4, pairs=1, widths=(2, 2), dtype=torch.float64)
    kernel = case.kernel
    assert isinstance(kernel, Convolutions)
    z = [torch.zeros(12, dtype=torch.float64)] * 2 + list(case.z_BSQ[0])
    middle = [
        kernel.depthwise_Q1W[:, 0, 0] * z[t - 1] + kernel.depthwise_Q1W[:, 0, 1] * z[t] + kernel.depthwise_bias_Q
        for t in range(1, 6)
    ]
    q_BHSP, k_BJSP = definition.mix(case.z_BSQ, kernel, case.temperature_J, case.cos, case.sin)
    for t in range(4):
        mean = [(z[t + 2][4 * h : 4 * h + 4] + z[t + 2][8:]) / 2 for h in range(2)]
        mean.append((mean[0] + mean[1]) / 2)
        for head in range(3):
            rows = slice(4 * head, 4 * head + 4)
            u = kernel.grouped_bias_Q[rows] + mean[head]
            u = u + sum(kernel.grouped_QPW[rows, :, tap] @ middle[t + tap][rows] for tap in range(2))
            y = u / u.norm() * 2
            c, s = case.cos[t, 0], case.sin[t, 0]
            y = torch.stack([y[0] * c - y[1] * s, y[1] * c + y[0] * s, y[2], y[3]])
            if head == 2:
                torch.testing.assert_close(k_BJSP[0, 0, t], y * case.temperature_J[0])
            else:
                torch.testing.assert_close(q_BHSP[0, head, t], y)
