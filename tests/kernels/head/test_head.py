"""Products of 16-bit operands with fp32 results: against fp64, and the head's loss if they are at hand."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.memory import peak_bytes
from tests.kernels.implementations import implementations
from zslurm.kernels import head
from zslurm.kernels.dispatch import Implementation, everything
from zslurm.kernels.head import add_product, keeps_narrow, product
from zslurm.train.model import head as model_head

RUNS = implementations(product)


def operands(rows: int, terms: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rows + terms + columns)
    wide = torch.promote_types(dtype, torch.float32)
    left, right = torch.randn(rows, terms).to(dtype), torch.randn(columns, terms).to(dtype).T
    return left, right, torch.full((rows, columns), torch.nan, dtype=wide)


def assert_close(out: Tensor, left: Tensor, right: Tensor) -> None:
    expected, magnitude = left.double() @ right.double(), left.double().abs() @ right.double().abs()
    assert ((out.double() - expected).abs() <= 2e-6 * magnitude).all()


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@settings(max_examples=20, deadline=None)
@given(
    sizes=st.tuples(*[st.sampled_from((0, 1, 7, 64, 300))] * 3),
    dtype=st.sampled_from((torch.bfloat16, torch.float32, torch.float64)),
)
def test_the_result_is_that_of_widened_operands(
    run: object, sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    left, right, out = operands(*sizes, dtype)
    assert callable(run)
    run(left, right, out)
    if out.numel() and out.isnan().all() and run is not RUNS["reference"]:
        return  # formats that it does not take
    assert_close(out, left, right)


def test_what_is_not_finite_propagates() -> None:
    left, right, out = operands(3, 8, 5, torch.bfloat16)
    left[0, 0], left[1, 1] = torch.nan, torch.inf
    product(left, right, out)
    assert out[0].isnan().all()
    assert out[1].isinf().all()
    assert out[2].isfinite().all()


def test_sums_are_added_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "PIECE_ELEMENTS", 3 * 16)
    left, right, _ = operands(10, 8, 16, torch.bfloat16)
    total = torch.ones(10, 16)
    add_product(left, right, total)
    torch.testing.assert_close(total, 1 + left.float() @ right.float())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"left": torch.zeros(2, 3, dtype=torch.int64)}, "left is int64, but must be one of bfloat16"),
        ({"left": torch.zeros(2, 3)}, "left is float32, right is bfloat16"),
        ({"left": torch.zeros(2, 4).bfloat16()}, r"right has the shape \[3, 5\], but must have \[4, N\]"),
        ({"out": torch.zeros(2, 6)}, r"out has the shape \[2, 6\], but must have \[2, 5\]"),
        ({"out": torch.zeros(2, 5).bfloat16()}, "out is bfloat16, but must be one of float32"),
        ({"out": torch.zeros(2, 5, device="meta")}, "out on meta"),
    ],
)
def test_bad_operands_are_refused(changed: dict[str, Tensor], message: str) -> None:
    good = {"left": torch.zeros(2, 3).bfloat16(), "right": torch.zeros(3, 5).bfloat16(), "out": torch.zeros(2, 5)}
    with pytest.raises(ValueError, match=f"head.product: .*{message}"):
        product(*(good | changed).values())


def test_a_result_on_top_of_an_operand_is_refused() -> None:
    out = torch.zeros(4, 4)
    with pytest.raises(ValueError, match="out shares memory with left"):
        product(out, torch.zeros(4, 4), out)


def test_a_torch_that_refuses_is_found_out_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Tensor) -> None:
        raise RuntimeError("gemm input type at::BFloat16 and output type float is not supported for ROCm\nat x")

    monkeypatch.setattr(head, "by_torch", refuse)
    head.works_on.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert [head.works_on(torch.device("cpu")) for _ in range(2)] == [False, False]
    head.works_on.cache_clear()
    assert len(caplog.messages) == 1
    assert "head.product widens its operands to fp32 on cpu, which is slow (gemm input type" in caplog.messages[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_torch_on_this_gpu_has_the_product() -> None:
    assert head.works_on(torch.device("cuda", 0))


@pytest.fixture
def narrow() -> Iterator[list[torch.dtype]]:
    """Products as on a GPU, with the formats of the operands that they got."""
    found: list[torch.dtype] = []

    def emulated(left: Tensor, right: Tensor, out: Tensor) -> None:
        found.append(left.dtype)
        for start in range(0, len(left), 64):  # never all of the embedding, however it is turned
            rows = slice(start, start + 64)
            for first in range(0, right.shape[1], 64):
                columns = slice(first, first + 64)
                torch.mm(left[rows].float(), right[:, columns].float(), out=out[rows, columns])

    real = product.implementation("torch")
    product.put(Implementation("torch", emulated, everything))
    yield found
    product.put(real)


def case(tokens: int, width: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(tokens, width).bfloat16().requires_grad_()
    embedding = (torch.randn(vocabulary, width) / width**0.5).bfloat16().requires_grad_()
    targets = torch.randint(vocabulary, (tokens,))
    targets[3] = model_head.IGNORED_TARGET
    return x, embedding, targets


@pytest.mark.parametrize("chunk", [5, 40])
@pytest.mark.parametrize("z_weight", [0.0, 0.1])
def test_the_loss_by_narrow_products_is_that_by_widened_ones(
    narrow: list[torch.dtype], chunk: int, z_weight: float
) -> None:
    x, embedding, targets = case(40, 24, 130)
    assert keeps_narrow(x, embedding.T)
    losses = model_head.summed_losses(x, embedding, targets, z_weight=z_weight, chunk_tokens=chunk)
    ours = [*losses, *torch.autograd.grad(losses.objective, [x, embedding])]
    assert set(narrow) == {torch.bfloat16}
    assert len(narrow) == 2 * len(range(0, 40, chunk)), "logits, and the embedding's gradient"
    wide = [operand.detach().double().requires_grad_() for operand in (x, embedding)]
    exact = model_head.summed_losses(wide[0], wide[1], targets, z_weight=z_weight)
    theirs = [*exact, *torch.autograd.grad(exact.objective, wide)]
    for one, other in zip(ours[:3], theirs[:3], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-6, atol=1e-5)
    for one, other in zip(ours[3:], theirs[3:], strict=True):
        assert (one.double() - other).norm() < 2**-8 * other.norm()


def test_logits_by_narrow_products_have_gradients(narrow: list[torch.dtype]) -> None:
    x, embedding, _ = case(6, 24, 130)
    found = model_head.logits(x.view(2, 3, 24), embedding)
    expected = x.detach().double() @ embedding.detach().double().T
    assert found.dtype == torch.float32
    assert (found.view(6, 130).double() - expected).abs().max() < 2e-6 * expected.abs().max()
    ours = torch.autograd.grad(found.square().sum(), [x, embedding])
    wide = [operand.detach().double().requires_grad_() for operand in (x, embedding)]
    theirs = torch.autograd.grad((wide[0] @ wide[1].T).square().sum(), wide)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.double() - other).norm() < 2**-7 * other.norm()
    assert narrow == [torch.bfloat16]


def test_no_copy_of_the_embedding_is_widened(narrow: list[torch.dtype], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "PIECE_ELEMENTS", 1 << 12)
    x, embedding, targets = case(16, 64, 20_000)
    widened = embedding.numel() * 4

    def peak(chunk: int) -> int:
        return peak_bytes(lambda: model_head.summed_losses(x, embedding, targets, chunk_tokens=chunk).objective)

    logits = 8 * 20_000 * 4
    assert peak(8) < widened + 3 * logits + 1e6, "the gradient of the embedding, and nothing else of its size"
    monkeypatch.undo()
    assert peak(8) > 2 * widened
