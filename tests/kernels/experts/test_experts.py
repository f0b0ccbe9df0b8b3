"""Routing and the experts' steps: every implementation against fp64, for any load."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.implementations import implementations
from zslurm.kernels import experts
from zslurm.kernels.dispatch import operations, using
from zslurm.kernels.experts import ExpertSums, Order, network, reference, sort

pytest.importorskip("triton")

OPERATIONS = {operation.name: operation for operation in experts.OPERATIONS}
NAMES = tuple(implementations(OPERATIONS["experts.gather"]))
# Triton's interpreter truncates to bf16, where GPUs round: an error of one bit and not of half a bit.
EPSILON = {torch.bfloat16: 2**-7, torch.float32: 2e-6}
FORMATS = st.sampled_from(tuple(EPSILON))

drawn = settings(max_examples=12, deadline=None)
each = pytest.mark.parametrize("name", NAMES)


def run(operation: str, name: str, *args: Any) -> Any:
    return implementations(OPERATIONS[f"experts.{operation}"])[name](*args)


def wide(*args: Any) -> list[Any]:
    return [arg.double() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args]


def assert_close(found: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    allowed = EPSILON[found.dtype] * (expected.abs() + scale)
    wrong = (found.double() - expected).abs() > allowed
    assert found.shape == expected.shape
    assert not wrong.any(), (found, expected)


def order_of(classes: list[int], choices: int, experts: int) -> Order:
    return reference.sort(torch.tensor(classes, dtype=torch.int64).view(-1, choices), experts + 1, experts)


@each
@drawn
@given(
    tokens=st.sampled_from((0, 1, 5, 130)),
    classes=st.sampled_from((1, 2, 17, 64, 300)),
    choices=st.integers(1, 4),
    dtype=FORMATS,
)
def test_the_choice_is_the_softmaxs_and_the_bias_moves_it(
    name: str, tokens: int, classes: int, choices: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(tokens + classes)
    choices = min(choices, classes)
    logits, bias = (3 * torch.randn(tokens, classes)).to(dtype), torch.randn(classes)
    chosen, weights, probabilities = run("choose", name, logits, bias, choices)
    exact = logits.double().softmax(-1)
    assert_close(probabilities, exact)
    preference = exact + bias
    assert chosen.dtype == torch.int64
    assert_close((preference.gather(-1, chosen)).float(), preference.topk(choices).values)  # ties of rounding
    assert all(len(set(row)) == choices for row in chosen.tolist())
    assert torch.equal(weights, probabilities.gather(-1, chosen))

    grad = torch.randn(tokens, choices)
    found = run("choose_backward", name, grad, chosen, probabilities, dtype)
    leaf = logits.double().requires_grad_()
    (expected,) = torch.autograd.grad(leaf.softmax(-1).gather(-1, chosen), leaf, grad.double())
    assert found.dtype == dtype
    assert_close(found, expected, scale=0.5)


@each
def test_what_is_not_a_number_still_has_a_class(name: str) -> None:
    logits = torch.zeros(3, 5)
    logits[1] = torch.nan
    logits[2, 3] = torch.inf
    chosen, weights, _ = run("choose", name, logits, torch.zeros(5), 2)
    assert ((chosen >= 0) & (chosen < 5)).all()
    assert weights[1:].isnan().all()
    assert weights[0].tolist() == pytest.approx([0.2, 0.2])


@each
def test_classes_that_are_excluded_are_chosen_last_and_none_twice(name: str) -> None:
    bias = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.1, -torch.inf])
    chosen, _, _ = run("choose", name, torch.zeros(3, 5), bias, 4)
    assert chosen[:, :2].tolist() == [[3, 1]] * 3
    assert all(len(set(row)) == 4 and set(row) < set(range(5)) for row in chosen.tolist())


@each
@drawn
@given(
    classes=st.sampled_from((1, 3, 17, 200)),
    tokens=st.sampled_from((0, 1, 7, 300, 700)),
    choices=st.integers(1, 3),
    load=st.sampled_from(("any", "one", "some")),
)
def test_choices_are_sorted_by_class_and_keep_their_order(
    name: str, classes: int, tokens: int, choices: int, load: str
) -> None:
    torch.manual_seed(classes + tokens)
    among = {"any": classes, "one": 1, "some": max(1, classes // 4)}[load]
    chosen = classes - 1 - torch.randint(among, (tokens, choices))
    order = Order(*run("sort", name, chosen, classes, max(1, classes - 1)))
    expected = chosen.flatten().argsort(stable=True)
    assert torch.equal(order.order_N, expected)
    assert torch.equal(order.back_N[expected], torch.arange(tokens * choices))
    assert torch.equal(order.counts_C, chosen.flatten().bincount(minlength=classes))
    assert torch.equal(order.ends_E, order.counts_C.cumsum(0)[: max(1, classes - 1)].int())


@each
@drawn
@given(
    tokens=st.sampled_from((0, 1, 9, 70)),
    choices=st.integers(1, 3),
    width=st.sampled_from((1, 8, 77, 600)),
    dtype=FORMATS,
    identity=st.booleans(),
    skipping=st.sampled_from((0.0, 0.3, 1.0)),
)
def test_rows_go_to_their_experts_and_come_back(
    name: str, tokens: int, choices: int, width: int, dtype: torch.dtype, identity: bool, skipping: float
) -> None:
    torch.manual_seed(tokens + width)
    chosen = torch.where(torch.rand(tokens, choices) < skipping, 4, torch.randint(4, (tokens, choices)))
    order = reference.sort(chosen, 5, 4)
    x, grad = torch.randn(2, tokens, width).to(dtype)
    weights, of_rows = torch.rand(tokens, choices), torch.randn(tokens * choices)
    gathered = run("gather", name, x, order.order_N, choices)
    assert torch.equal(gathered, x.repeat_interleave(choices, 0)[order.order_N])

    y = torch.randn(tokens * choices, width).to(dtype)
    y[order.ends_E[-1] :], of_rows[order.ends_E[-1] :] = torch.nan, torch.nan  # what products leave there
    rest = order.back_N, order.ends_E, identity
    combined = run("combine", name, y, x, weights, *rest)
    of_weights = run("weights_backward", name, of_rows, grad, x, *rest)
    for token in range(tokens):
        total = torch.zeros(width, dtype=torch.float64)
        for choice in range(choices):
            row = order.back_N[token * choices + choice]
            if chosen[token, choice] < 4:
                total += y[row].double()
                assert of_weights[token, choice] == of_rows[row]
            else:
                total += weights[token, choice].double() * x[token].double() if identity else 0
                along = grad[token].double() @ x[token].double() if identity else torch.zeros(())
                assert abs(of_weights[token, choice] - along) < 1e-4
        assert_close(combined[token], total, scale=0.5)


@each
@drawn
@given(rows=st.sampled_from((0, 1, 9, 40)), inner=st.sampled_from((1, 16, 77, 1100)), dtype=FORMATS)
def test_swiglu_with_the_probability_and_its_gradients(
    name: str, rows: int, inner: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(rows + inner)
    both, grad, weights = (
        torch.randn(rows, 2 * inner).to(dtype),
        torch.randn(rows, inner).to(dtype),
        torch.rand(rows),
    )
    both[:1, :1] = -60
    leaves = [both.double().requires_grad_(), weights.double().requires_grad_()]
    gate, up = leaves[0].chunk(2, dim=-1)
    exact = gate * gate.sigmoid() * up * leaves[1].unsqueeze(1)
    expected = torch.autograd.grad(exact, leaves, grad.double())
    active = run("activate", name, both, weights)
    again, grad_both, grad_weights = run("activate_backward", name, grad, both, weights)
    assert_close(active, exact.detach(), scale=1e-3)
    assert torch.equal(again, active) or (again.double() - active.double()).abs().max() < 2**-6 * 4
    assert_close(grad_both, expected[0], scale=0.1)
    assert ((grad_weights.double() - expected[1]).abs() < 1e-4 * inner**0.5).all()


@each
def test_infinite_and_missing_values_propagate(name: str) -> None:
    both = torch.ones(4, 16)
    both[1, 0], both[2, 0], both[3, 9] = torch.inf, torch.nan, -torch.inf
    active = run("activate", name, both, torch.ones(4))
    assert active[0].isfinite().all()
    assert active[1, 0] == torch.inf
    assert active[2, 0].isnan()
    assert active[3, 1] == -torch.inf


LOADS = {
    "one each": [2, 0, 3, 1, 0, 2],
    "two each": [2, 3, 0, 1, 3, 0, 1, 2, 0, 4],
    "one expert gets all": [1] * 6,
    "all skip": [4] * 4,
    "a single token": [2],
    "none": [],
}


@pytest.mark.parametrize("identity", [True, False])
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("products", ["reference", "torch"])
def test_the_steps_give_what_the_rows_give(load: str, identity: bool, products: str) -> None:
    choices = 2 if load == "two each" else 1
    order = order_of(LOADS[load], choices, experts=4)
    torch.manual_seed(0)
    tokens = len(LOADS[load]) // choices
    leaves = [
        torch.randn(tokens, 16),
        torch.rand(tokens, choices),
        torch.randn(4, 48, 16),
        torch.randn(4, 16, 24),
    ]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    results = []
    for form in ("reference", "cpu"):
        with using("experts.network", form), using("grouped_gemm", products):
            y = network(*leaves, order, identity)  # type: ignore[arg-type]
            results.append([y, *torch.autograd.grad(y.sum(), leaves)])  # expanded, as kernels refuse it
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


class Sum:
    """A sum of gradients, as a buffer of a trainer has it."""

    def __init__(self, like: Tensor) -> None:
        self.total = torch.full_like(like, torch.nan, dtype=torch.promote_types(like.dtype, torch.float32))
        self.ended = 0

    def begin(self) -> tuple[Tensor, bool]:
        return self.total, self.ended > 0

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("form", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_the_matrices_go_to_their_sums(form: str, dtype: torch.dtype) -> None:
    order = order_of(LOADS["one each"], 1, experts=4)
    torch.manual_seed(0)
    x, gate_up, down = (
        torch.randn(*shape).to(dtype).requires_grad_() for shape in ((6, 16), (4, 48, 16), (4, 16, 24))
    )
    weights = torch.rand(6, 1, requires_grad=True)
    sums = ExpertSums(Sum(gate_up), Sum(down))
    with using("experts.network", form):
        network(x, weights, gate_up, down, order, True).square().sum().backward()
        expected = [gate_up.grad, down.grad]
        kept = [x.grad, weights.grad]
        for leaf in (x, weights, gate_up, down):
            leaf.grad = None
        for _ in range(2):
            network(x, weights, gate_up, down, order, True, sums).square().sum().backward()
    assert gate_up.grad is None
    assert down.grad is None
    assert torch.equal(x.grad, 2 * kept[0])  # type: ignore[arg-type, operator]
    assert torch.equal(weights.grad, 2 * kept[1])  # type: ignore[arg-type, operator]
    for sum_of, gradient in zip((sums.gate_up, sums.down), expected, strict=True):
        assert isinstance(sum_of, Sum)
        assert gradient is not None
        assert sum_of.ended == 2
        assert torch.equal(sum_of.total, 2 * gradient.to(sum_of.total.dtype))


def test_the_choice_of_a_gpu_has_the_softmaxs_gradient() -> None:
    logits, bias = torch.randn(9, 5, dtype=torch.float64, requires_grad=True), torch.randn(5)
    classes, weights, _ = reference.choose(logits, bias, 2)
    (expected,) = torch.autograd.grad(weights.square().sum(), logits)
    ours = experts.Choice.apply(logits, bias, 2)
    (found,) = torch.autograd.grad(ours[1].square().sum(), logits)
    assert torch.equal(ours[0], classes)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("operation", "args", "message"),
    [
        ("choose", (torch.zeros(3, 4), torch.zeros(5), 1), r"bias has the shape \[5\], but must have \[4\]"),
        ("choose", (torch.zeros(3, 4), torch.zeros(4), 5), "5 choices among 4 classes"),
        ("choose", (torch.zeros(3, 4), torch.zeros(4, device="meta"), 1), "bias on meta"),
        ("sort", (torch.zeros(3, 1), 4, 3), "classes is float32, but must be one of int64"),
        ("sort", (torch.zeros(3, 1).long(), 4, 5), "5 experts among 4 classes"),
        (
            "gather",
            (torch.zeros(3, 4), torch.zeros(5).long(), 2),
            r"order has the shape \[5\], but must have \[6\]",
        ),
        ("activate", (torch.zeros(3, 5), torch.zeros(3)), "both has 5 columns"),
        ("activate", (torch.zeros(3, 4).half(), torch.zeros(3).half()), "weights is float16, but must be one of"),
        (
            "combine",
            (
                torch.zeros(3, 4),
                torch.zeros(3, 4).half(),
                torch.zeros(3, 1),
                torch.zeros(3).long(),
                torch.zeros(2).int(),
                True,
            ),
            "y is float32, x is float16",
        ),
    ],
)
def test_bad_operands_are_refused(operation: str, args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"experts.{operation}: .*{message}"):
        OPERATIONS[f"experts.{operation}"](*args)


def test_all_operations_are_found() -> None:
    assert set(OPERATIONS) <= set(operations())
    assert sort(torch.tensor([[1], [0]]), 2, 1).order_N.tolist() == [1, 0]
