"""Logits and gradients of drawn models against `ZayaForCausalLM` of transformers, same weights and tokens.

The draws vary layers, heads, head size, convolution widths, experts, router width, rotary share, rotary base
and padding. No scale, bias or temperature is at its default, and in every draw some tokens skip the experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.train.model.reference import gradients_of, reference_names, reference_of
from tests.train.models import random_like, scrambled
from zslurm.train.config import ModelConfig
from zslurm.train.model.head import IGNORED_TARGET
from zslurm.train.model.zaya import Zaya

DRAWS = 36
BF16_DRAWS = 12


@dataclass(frozen=True)
class Draw:
    """A model and a batch for it."""

    config: ModelConfig
    rope_base: float
    tokens_BS: Tensor
    valid_BS: Tensor | None
    seed: int

    @property
    def targets(self) -> Tensor:
        """Next tokens; what follows padding or is padding does not count."""
        targets_BS = self.tokens_BS.roll(-1, dims=1)
        targets_BS[:, -1] = IGNORED_TARGET
        if self.valid_BS is not None:
            both_BS = self.valid_BS & self.valid_BS.roll(-1, dims=1)
            targets_BS = targets_BS.where(both_BS, IGNORED_TARGET)
        return targets_BS

    @property
    def counted(self) -> Tensor:
        """Positions whose logits mean something."""
        return torch.ones_like(self.tokens_BS, dtype=torch.bool) if self.valid_BS is None else self.valid_BS


def draw(seed: int) -> Draw:
    """The seed-th model and batch."""
    generator = np.random.Generator(np.random.Philox(key=seed))

    def pick(*values: Any) -> Any:
        return values[int(generator.integers(len(values)))]

    kv_heads = pick(1, 2, 3, 4)
    head_dim = pick(8, 16, 32)
    config = ModelConfig(
        vocab_size=pick(31, 64, 97),
        hidden_size=pick(24, 40, 64),
        layers=pick(1, 2, 3, 5),
        query_heads=kv_heads * pick(1, 2, 4),
        kv_heads=kv_heads,
        head_dim=head_dim,
        conv_widths=(pick(1, 2, 3), pick(2, 3, 4)),
        rotary_share=pick(0.25, 0.5, 1.0),
        experts=pick(1, 2, 4, 8),
        expert_hidden_size=pick(16, 24),
        router_hidden_size=pick(6, 12, 16),
        skip_rule="zero",
    )
    batch, length = pick(2, 3), pick(5, 17, 24)
    tokens_BS = torch.from_numpy(generator.integers(config.vocab_size, size=(batch, length)))
    valid_BS = None
    side = pick("none", "left", "right")
    if side != "none":
        kept_B1 = torch.from_numpy(generator.integers(2, length, size=(batch, 1)))
        kept_B1[0] = length  # the reference drops a mask that leaves nothing unpadded
        position_S = torch.arange(length)
        valid_BS = position_S < kept_B1 if side == "right" else position_S >= length - kept_B1
    return Draw(config, pick(1e4, 1e6, 5e6), tokens_BS, valid_BS, seed)


@torch.no_grad()
def model_of(case: Draw) -> Zaya:
    """A scrambled model in which a tenth to half of the tokens skip: by bisection of the skip class's bias."""
    for attempt in range(10):  # some routers prefer one class for every token
        model = scrambled(case.config, torch.float32, seed=case.seed + 1000 * attempt)
        low, high = -2.0, 2.0
        for _ in range(30):
            model.balancing_bias[:, -1] = (low + high) / 2
            counts_LC = ours(model, case)[1]
            share = counts_LC[:, -1].sum() / counts_LC.sum()
            if 0.1 <= share <= 0.5:
                return model
            low, high = ((low + high) / 2, high) if share < 0.1 else (low, (low + high) / 2)
    raise AssertionError("no bias makes some tokens skip and some not")


def ours(model: Zaya, case: Draw, targets_BS: Tensor | None = None) -> tuple[Tensor, Tensor]:
    logits, counts = model(case.tokens_BS, targets_BS, rope_base=case.rope_base, valid_BS=case.valid_BS)
    return logits, counts


def theirs(reference: torch.nn.Module, case: Draw) -> Tensor:
    mask = None if case.valid_BS is None else case.valid_BS.long()
    logits: Tensor = reference(case.tokens_BS, attention_mask=mask, use_cache=False).logits
    return logits


@pytest.mark.parametrize("seed", range(DRAWS))
def test_logits_and_gradients_are_those_of_transformers(seed: int) -> None:
    case = draw(seed)
    model = model_of(case)
    reference = reference_of(model, case.rope_base)
    with torch.no_grad():
        logits, counts_LC = ours(model, case)
    expected = theirs(reference, case)
    difference = (logits - expected)[case.counted].abs().max().item()
    assert difference <= 1e-5
    assert 0 < counts_LC[:, -1].sum() < counts_LC.sum(), "some tokens should skip and some not"
    assert (counts_LC.sum(dim=1) == case.counted.sum()).all()

    loss, _ = ours(model, case, case.targets)
    loss.backward()
    targets_T = case.targets.flatten()
    expected_loss = F.cross_entropy(
        expected.flatten(0, 1), targets_T, reduction="sum", ignore_index=IGNORED_TARGET
    )
    torch.testing.assert_close(loss.detach(), expected_loss.detach(), rtol=1e-5, atol=1e-4)
    expected_loss.backward()
    names = reference_names(case.config.layers)
    expected_gradients = gradients_of(dict(reference.named_parameters()))
    for name, gradient in gradients_of(dict(model.named_parameters())).items():
        other = expected_gradients[names[name]]
        assert (gradient - other).norm() <= 1e-4 * other.norm() + 1e-6, name


def test_the_draws_cover_what_they_should() -> None:
    cases = [draw(seed) for seed in range(DRAWS)]
    for field, least in {"layers": 4, "kv_heads": 4, "head_dim": 3, "experts": 4, "rotary_share": 3}.items():
        assert len({getattr(case.config, field) for case in cases}) == least, field
    assert len({case.config.conv_widths for case in cases}) >= 6
    padded = [case.valid_BS for case in cases if case.valid_BS is not None]
    assert sum(not bool(valid[:, 0].all()) for valid in padded) >= 5, "left padding"
    assert sum(not bool(valid[:, -1].all()) for valid in padded) >= 5, "right padding"


def relative_error(logits: Tensor, exact: Tensor, case: Draw) -> float:
    here = case.counted
    return ((logits.float() - exact)[here].norm() / exact[here].norm()).item()


@torch.no_grad()
def bf16_errors(case: Draw) -> tuple[float, float]:
    """How far bf16 logits are from fp32 ones of the same bf16 weights: ours, and the reference's.

    Routing is fixed (the biases alone choose, another class in every layer): no token can change its expert.
    """
    rounded = Zaya(case.config, torch.bfloat16)
    rounded.load_state_dict(model_of(case).state_dict())
    rounded.balancing_bias.zero_()
    for layer in range(case.config.layers):
        rounded.balancing_bias[layer, layer % case.config.experts] = 10.0
    exact = Zaya(case.config, torch.float32)
    exact.load_state_dict(rounded.state_dict())
    truth = ours(exact, case)[0]
    reference = reference_of(rounded, case.rope_base, attn_implementation="sdpa")
    found = ours(rounded, case)[0], theirs(reference, case)
    return relative_error(found[0], truth, case), relative_error(found[1], truth, case)


def test_bf16_is_no_further_from_fp32_than_the_reference_is() -> None:
    """Single draws scatter, so the bound is on the root mean square over all of them."""
    errors = [bf16_errors(draw(seed)) for seed in range(BF16_DRAWS)]
    one, other = (math.sqrt(sum(e * e for e in each) / BF16_DRAWS) for each in zip(*errors, strict=True))
    assert one <= other
    assert 0 < one < 0.05


@pytest.mark.parametrize("name", ["attention.temperature", "expert_entry.hidden_bias", "router.norm.weight"])
def test_parity_would_notice_a_changed_tensor(name: str) -> None:
    case = draw(0)
    model = model_of(case)
    reference = reference_of(model, case.rope_base)
    with torch.no_grad():
        parameter = model.get_parameter(f"layers.0.{name}")
        parameter.add_(0.1 * random_like(parameter, "change"))
        difference = (ours(model, case)[0] - theirs(reference, case))[case.counted]
    assert difference.abs().max() > 1e-4
