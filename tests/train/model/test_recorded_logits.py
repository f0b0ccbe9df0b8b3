"""Logits of the published implementation: `ZayaForCausalLM` of transformers 5.23.0.

The weights are no one's checkpoint: they are drawn from numpy's legacy generator, whose streams are frozen,
and were loaded into that class under its own names. recorded_logits.json holds what came out (fp32, CPU,
eager attention).
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from zslurm.train.config import ModelConfig
from zslurm.train.model.zaya import Zaya
from zslurm.train.shapes import TensorKind, tensor_table

RECORDED = json.loads((Path(__file__).parent / "recorded_logits.json").read_text())


def drawn(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Normal numbers that depend on the name alone."""
    return torch.from_numpy(np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape))


@torch.no_grad()
def model_of_the_recording() -> Zaya:
    config = ModelConfig(**RECORDED["model"])
    model = Zaya(config)
    for info in tensor_table(config):
        value = drawn(info.name, info.shape)
        if info.kind in (TensorKind.NORM, TensorKind.SCALE, TensorKind.BIAS):
            value = 0.2 * value + (0.0 if info.kind is TensorKind.BIAS else 1.0)
        else:
            fan_in = info.shape[1:] if info.kind is TensorKind.CONVOLUTION else info.shape[-1:]
            value = value / np.sqrt(np.prod(fan_in)) * (2.0 if ".router." in info.name else 1.0)
        model.get_parameter(info.name).copy_(value)
    model.balancing_bias.copy_(0.05 * drawn("balancing_bias", tuple(model.balancing_bias.shape)))
    return model


def test_logits_are_those_of_transformers() -> None:
    model = model_of_the_recording()
    tokens_BS = torch.tensor(RECORDED["tokens"])
    with torch.no_grad():
        logits, counts_LC = model(tokens_BS, rope_base=RECORDED["rope_base"])
    torch.testing.assert_close(logits, torch.tensor(RECORDED["logits"]), rtol=1e-5, atol=1e-5)
    assert (counts_LC.sum(dim=0) > 0).all(), "every expert and the skip class take part"


@pytest.mark.parametrize("name", ["layers.1.attention.temperature", "layers.1.router.previous_scale"])
def test_the_recording_would_notice_a_changed_tensor(name: str) -> None:
    model = model_of_the_recording()
    with torch.no_grad():
        model.get_parameter(name).mul_(0.9)
        logits, _ = model(torch.tensor(RECORDED["tokens"]), rope_base=RECORDED["rope_base"])
    assert (logits - torch.tensor(RECORDED["logits"])).abs().max() > 1e-3
