"""RMSNorm and the entry of a stage."""

from __future__ import annotations

import torch

from tests.train.models import random_like, scrambled, tiny_config
from zslurm.train.model.norm import RMSNorm, StageEntry


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    norm = RMSNorm(4, eps=0.5, dtype=torch.float64)
    weight = torch.tensor([1.0, 2.0, 3.0, -1.0], dtype=torch.float64)
    norm.weight.data.copy_(weight)
    x = torch.tensor([1.0, -2.0, 3.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(norm(x), x / (15 / 4 + 0.5) ** 0.5 * weight)


def test_rms_norm_reads_fp32_even_when_its_weight_is_bf16() -> None:
    norm = RMSNorm(64, eps=1e-5, dtype=torch.bfloat16)
    torch.nn.init.ones_(norm.weight)
    x = random_like(torch.empty(64), "norm").float()
    expected = torch.nn.functional.rms_norm(x, (64,), eps=1e-5).bfloat16()
    assert torch.equal(norm(x), expected)
    assert not torch.equal(norm(x.bfloat16()), expected)


def test_entry_adds_bias_before_scale_on_both_streams() -> None:
    entry: StageEntry = scrambled(tiny_config()).layers[0].expert_entry
    hidden, residual = (random_like(torch.empty(1, 3, 12), name) for name in ("hidden", "residual"))
    x, joined = entry(hidden, residual)
    expected = (hidden + entry.hidden_bias) * entry.hidden_scale
    expected = expected + (residual + entry.residual_bias) * entry.residual_scale
    torch.testing.assert_close(joined, expected)
    torch.testing.assert_close(x, entry.norm(expected))


def test_first_entry_starts_the_residual_stream() -> None:
    entry: StageEntry = scrambled(tiny_config()).layers[0].attention_entry
    hidden = random_like(torch.empty(1, 3, 12), "hidden")
    _, joined = entry(hidden, None)
    torch.testing.assert_close(joined, (hidden + entry.hidden_bias) * entry.hidden_scale)


def test_residual_stream_keeps_what_bf16_would_lose() -> None:
    entry = StageEntry(1, 1e-5, torch.bfloat16)
    for name, parameter in entry.named_parameters():
        torch.nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
    small = torch.full((1, 1, 1), 2.0**-12, dtype=torch.bfloat16)
    _, joined = entry(small, torch.ones(1, 1, 1))
    assert joined.item() == 1 + 2**-12
