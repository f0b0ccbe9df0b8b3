"""Tiny models for the tests of the trainer."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from zslurm.train.config import ModelConfig
from zslurm.train.model.zaya import Zaya, build

ROPE_BASE = 100.0


def tiny_config(**changes: Any) -> ModelConfig:
    """A model that runs in a few milliseconds and has every part of the real one."""
    values: dict[str, Any] = {
        "vocab_size": 31,
        "hidden_size": 12,
        "layers": 2,
        "query_heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "experts": 3,
        "expert_hidden_size": 10,
        "router_hidden_size": 6,
    }
    return ModelConfig(**(values | changes))


def random_like(tensor: Tensor, seed: str) -> Tensor:
    """Normal fp64 noise that depends on the seed alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    return torch.randn(tensor.shape, dtype=torch.float64, generator=generator)


@torch.no_grad()
def scrambled(config: ModelConfig, dtype: torch.dtype = torch.float64, seed: int = 5) -> Zaya:
    """A model in which no scale is one, no bias is zero, and (with this seed) every router class is used."""
    model = build(config, seed, dtype=dtype)
    for name, parameter in model.named_parameters():
        noise = random_like(parameter, f"{seed}{name}")
        if parameter.dim() == 1:
            parameter.add_(0.3 * noise)
        else:
            fan_in = parameter[0].numel() if "conv" in name else parameter.shape[-1]
            parameter.copy_(noise * (3.0 if "router" in name else 1.0) / fan_in**0.5)
    model.balancing_bias.copy_(0.1 * random_like(model.balancing_bias, f"{seed}balance"))
    return model


def autograd_nodes(y: Tensor) -> set[str]:
    """Names of what backward from `y` will go through."""
    found: set[str] = set()
    waiting = [y.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None:
            found.add(node.name())
            waiting += [following for following, _ in node.next_functions]
    return found


def tokens(config: ModelConfig, batch: int = 2, length: int = 9, seed: int = 0) -> Tensor:
    """Random token ids [batch, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (batch, length), generator=generator)
