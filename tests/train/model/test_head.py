"""The chunked loss of the head."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.memory import peak_bytes
from tests.train.models import random_like
from zslurm.train.model.head import IGNORED_TARGET, logits, summed_losses

TOKENS, WIDTH, VOCABULARY = 7, 5, 11


def case(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    x = random_like(torch.empty(TOKENS, WIDTH), "x").to(dtype).requires_grad_()
    embedding = random_like(torch.empty(VOCABULARY, WIDTH), "embedding").to(dtype).requires_grad_()
    targets = torch.tensor([3, 0, 10, 3, IGNORED_TARGET, 7, 1])
    return x, embedding, targets


@pytest.mark.parametrize("chunk_tokens", [1, 3, TOKENS, 1000, None])
def test_loss_and_gradients_are_those_of_whole_logits(chunk_tokens: int | None) -> None:
    x, embedding, targets = case()
    loss = 0.25 * summed_losses(x, embedding, targets, chunk_tokens=chunk_tokens).objective
    expected = 0.25 * F.cross_entropy(logits(x, embedding), targets, reduction="sum", ignore_index=IGNORED_TARGET)
    torch.testing.assert_close(loss, expected)
    ours = torch.autograd.grad(loss, [x, embedding])
    theirs = torch.autograd.grad(expected, [x, embedding])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("weight", [0.0, 0.1])
def test_ignored_positions_get_no_gradient(weight: float) -> None:
    x, embedding, targets = case()
    (grad,) = torch.autograd.grad(summed_losses(x, embedding, targets, z_weight=weight).objective, [x])
    assert (grad[4] == 0).all()
    assert (grad[[0, 1, 2, 3, 5, 6]].abs().amax(dim=-1) > 0).all()


@pytest.mark.parametrize("chunk_tokens", [1, 3, TOKENS, None])
def test_the_z_loss_and_its_gradients_are_those_of_whole_logits(chunk_tokens: int | None) -> None:
    weight = 0.05
    x, embedding, targets = case()
    losses = summed_losses(x, embedding, targets, z_weight=weight, chunk_tokens=chunk_tokens)
    whole = logits(x, embedding)
    cross_entropy = F.cross_entropy(whole, targets, reduction="sum", ignore_index=IGNORED_TARGET)
    z_loss = weight * whole[targets != IGNORED_TARGET].logsumexp(dim=-1).square().sum()
    torch.testing.assert_close(losses.cross_entropy, cross_entropy.detach())
    torch.testing.assert_close(losses.z_loss, z_loss.detach())
    ours = torch.autograd.grad(0.25 * losses.objective, [x, embedding])
    theirs = torch.autograd.grad(0.25 * (cross_entropy + z_loss), [x, embedding])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
    plain = torch.autograd.grad(0.25 * F.cross_entropy(logits(x, embedding), targets, reduction="sum"), [x])[0]
    assert (ours[0] - plain).abs().max() > 1e-3, "the z-loss shows"


def test_only_the_objective_has_a_gradient() -> None:
    x, embedding, targets = case()
    losses = summed_losses(x, embedding, targets, z_weight=0.1)
    assert [part.requires_grad for part in losses] == [True, False, False]
    assert losses.objective.item() == pytest.approx(losses.cross_entropy.item() + losses.z_loss.item())


def test_without_a_weight_there_is_no_z_loss() -> None:
    x, embedding, targets = case()
    losses = summed_losses(x, embedding, targets)
    assert losses.z_loss == 0
    assert torch.equal(losses.objective, losses.cross_entropy)


def test_bf16_inputs_are_multiplied_in_fp32() -> None:
    x, embedding, targets = case(torch.bfloat16)
    assert torch.equal(logits(x, embedding), x.float() @ embedding.float().T)
    loss = summed_losses(x, embedding, targets).objective
    assert loss.dtype == torch.float32
    exact = summed_losses(x.float(), embedding.float(), targets).objective
    assert torch.equal(loss, exact)
    grads = torch.autograd.grad(loss, [x, embedding])
    assert [grad.dtype for grad in grads] == [torch.bfloat16] * 2


def test_evaluation_needs_no_gradient() -> None:
    x, embedding, targets = case()
    with torch.no_grad():
        loss = summed_losses(x, embedding, targets).objective
    assert not loss.requires_grad
    torch.testing.assert_close(loss, summed_losses(x, embedding, targets).objective.detach())


def test_large_logits_do_not_overflow() -> None:
    x = torch.tensor([[1e4], [-1e4]])
    embedding = torch.tensor([[1.0], [-1.0]])
    loss = summed_losses(x, embedding, torch.tensor([0, 1])).objective
    assert loss.item() == 0


def test_logits_of_a_large_vocabulary_never_exist_whole() -> None:
    tokens, vocabulary, width = 1024, 262_272, 8
    x = random_like(torch.empty(tokens, width), "x").float().requires_grad_()
    embedding = random_like(torch.empty(vocabulary, width), "embedding").float().requires_grad_()
    targets = torch.arange(tokens)
    peak = peak_bytes(lambda: summed_losses(x, embedding, targets).objective.backward())
    assert peak < tokens * vocabulary * 4 / 4


def test_the_embeddings_gradient_can_go_elsewhere_in_fp32() -> None:
    """Autograd rounds it to bf16 otherwise."""
    torch.manual_seed(0)
    x = torch.randn(70, 16).bfloat16().requires_grad_()
    embedding = torch.randn(50, 16).bfloat16().requires_grad_()
    targets = torch.randint(0, 50, (70,))
    (summed_losses(x, embedding, targets).objective / 70).backward()  # type: ignore[no-untyped-call]
    rounded, grad_x = embedding.grad, x.grad
    assert rounded is not None
    embedding.grad = x.grad = None
    got: list[torch.Tensor] = []
    loss = summed_losses(
        x, embedding, targets, add_gradient=lambda gradient: got.append(gradient.clone())
    ).objective
    (loss / 70).backward()  # type: ignore[no-untyped-call]
    (whole,) = got
    assert whole.dtype == torch.float32
    assert embedding.grad is None
    assert torch.equal(x.grad, grad_x)  # type: ignore[arg-type]  # both are there
    assert torch.equal(whole.bfloat16(), rounded)
    assert not torch.equal(whole, rounded.float())
