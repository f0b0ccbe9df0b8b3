"""Balancing: AdamW on the pseudo-gradient, and that it balances."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from tests.train.models import ROPE_BASE, scrambled, tiny_config, tokens
from zslurm.train.optim.balance import BalanceState, balance_over, balance_step

BETAS = (0.9, 0.999)


def test_state_starts_with_the_skip_class_at_minus_one() -> None:
    state = BalanceState.initial(tiny_config())
    assert state.bias.tolist() == [[0, 0, 0, -1]] * 2
    assert BalanceState.initial(tiny_config(skip_expert=False)).bias.tolist() == [[0, 0, 0]] * 2
    assert state.step == 0
    for moment in (state.exp_avg, state.exp_avg_sq):
        assert moment.dtype == torch.float32
        assert moment.shape == (2, 4)
        assert (moment == 0).all()


def test_steps_are_those_of_torch_adamw_on_the_pseudo_gradient() -> None:
    state = BalanceState.initial(tiny_config())
    bias = torch.nn.Parameter(state.bias.clone())
    adamw = torch.optim.AdamW([bias], lr=0.01, betas=BETAS, eps=1e-8, weight_decay=0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        counts = torch.randint(0, 50, (2, 4), generator=generator)
        state = balance_step(state, counts, lr=0.01, betas=BETAS)
        bias.grad = counts / counts.sum(dim=-1, keepdim=True) - 1 / 4
        adamw.step()
    torch.testing.assert_close(state.bias, bias.detach(), rtol=1e-5, atol=1e-6)
    assert state.step == 20


def test_first_step_moves_each_class_by_the_learning_rate_against_its_excess() -> None:
    state = BalanceState.initial(tiny_config(layers=1))
    after = balance_step(state, torch.tensor([[70, 25, 5, 0]]), lr=0.001, betas=BETAS)
    moved = (after.bias - state.bias)[0].tolist()
    assert moved == pytest.approx([-0.001, 0, 0.001, 0.001], abs=1e-6)


def test_a_step_changes_nothing_in_place_and_is_repeatable() -> None:
    state = BalanceState.initial(tiny_config())
    copies = [value.clone() for value in (state.bias, state.exp_avg, state.exp_avg_sq)]
    counts = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])
    one, two = (balance_step(state, counts, lr=0.1, betas=BETAS) for _ in range(2))
    for value, copy in zip((state.bias, state.exp_avg, state.exp_avg_sq), copies, strict=True):
        assert torch.equal(value, copy)
    for field in dataclasses.fields(BalanceState):
        first, second = getattr(one, field.name), getattr(two, field.name)
        assert torch.equal(first, second) if isinstance(first, Tensor) else first == second


def test_counts_beyond_the_integers_of_fp32_are_exact() -> None:
    base = 2**24
    state = BalanceState.initial(tiny_config(layers=1))
    after = balance_step(state, torch.tensor([[base + 1, base, base, base - 1]]), lr=1.0, betas=(0.0, 0.0))
    assert after.exp_avg[0, 0] > 0 > after.exp_avg[0, 3]
    assert after.exp_avg[0, 1] == after.exp_avg[0, 2] == 0


def test_shares_of_a_batch_are_balanced_in_their_order() -> None:
    state = BalanceState.initial(tiny_config())
    counts_MLC = torch.randint(0, 50, (3, 2, 4), generator=torch.Generator().manual_seed(0))
    expected = state
    for counts_LC in counts_MLC:
        expected = balance_step(expected, counts_LC, lr=0.01, betas=BETAS)
    result = balance_over(state, counts_MLC, lr=0.01, betas=BETAS)
    assert torch.equal(result.bias, expected.bias)
    assert result.step == 3


def entropy(counts_LC: Tensor) -> Tensor:
    """Entropy of each layer's load as a share of the largest possible."""
    shares = counts_LC / counts_LC.sum(dim=-1, keepdim=True)
    return -(shares * shares.clamp_min(1e-12).log()).sum(dim=-1) / math.log(counts_LC.shape[-1])


@torch.no_grad()
def test_balancing_a_real_router_makes_its_load_uniform() -> None:
    config = tiny_config(vocab_size=400, hidden_size=24, router_hidden_size=12)
    model = scrambled(config, torch.float32, seed=1)
    state = dataclasses.replace(BalanceState.initial(config), bias=torch.zeros(2, 4))
    tokens_BS = tokens(config, batch=16, length=32)
    loads = []
    for _ in range(120):
        model.balancing_bias.copy_(state.bias)
        _, counts_LC = model(tokens_BS, rope_base=ROPE_BASE)
        loads.append(entropy(counts_LC))
        state = balance_step(state, counts_LC, lr=0.01, betas=BETAS)
    assert (loads[0] < 0.85).all()
    assert (torch.stack(loads[-20:]).mean(dim=0) > 0.97).all()
