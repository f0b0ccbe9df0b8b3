"""Initial values: a function of (seed, tensor name), so no order, rank or world size can change them.

Not published for ZAYA1; these are our choices:

    matrices, embedding     normal, standard deviation init_std (0.02)
    attention.output,       normal, init_std / sqrt(2 * layers): 2 * layers stages add to the residual stream,
      experts.down            which so keeps its scale at any depth (as in GPT-2 and Megatron)
    convolutions            normal, 1 / sqrt(fan in): the convolved queries and keys then start as large as
                              the projections. Their sum with the mean skip is normalised, so what counts is
                              their ratio, and with 0.02 the convolutions would start as good as absent
    router.first, second,   normal, 1 / sqrt(fan in), if the router is an MLP: its logits then differ between
      output                  tokens by 0.3 at any width. With 0.02 they would by 0.0003 at width 32 and 0.009 at
                              256: all tokens prefer the same class, and the balancing biases, which shift all of
                              them, only send them together from class to class
    norms, scales           1; so are the keys' temperatures (zero would erase every key)
    biases                  0
    balancing biases        0; the skip class -1, so that it starts unused

Numbers come from numpy's Philox in fp32 on the CPU, whatever format and device the model has.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from zslurm.train.config import ModelConfig
from zslurm.train.shapes import TensorInfo, TensorKind

_RESIDUAL_WRITERS = (".attention.output.weight", ".experts.down.weight")
_ROUTER_MLP = (".router.first.weight", ".router.second.weight", ".router.output.weight")
_CONSTANTS = {TensorKind.NORM: 1.0, TensorKind.SCALE: 1.0, TensorKind.BIAS: 0.0}


def initial_tensor(info: TensorInfo, config: ModelConfig, seed: int) -> Tensor:
    """Return the initial value of one parameter: fp32, on the CPU."""
    if info.kind in _CONSTANTS:
        return torch.full(info.shape, _CONSTANTS[info.kind], dtype=torch.float32)
    values = _generator(seed, info.name).standard_normal(info.shape, dtype=np.float32)
    return torch.from_numpy(values).mul_(_standard_deviation(info, config))


def initial_balancing_bias(config: ModelConfig) -> Tensor:
    """Return the initial balancing biases [layers, classes]: fp32, on the CPU."""
    bias_LC = torch.zeros(config.layers, config.router_classes, dtype=torch.float32)
    if config.skip_expert:
        bias_LC[:, -1] = -1.0
    return bias_LC


def _standard_deviation(info: TensorInfo, config: ModelConfig) -> float:
    if info.kind is TensorKind.CONVOLUTION:
        return 1 / math.sqrt(math.prod(info.shape[1:]))
    if info.name.endswith(_RESIDUAL_WRITERS):
        return config.init_std / math.sqrt(2 * config.layers)
    if config.router == "mlp" and info.name.endswith(_ROUTER_MLP):
        return 1 / math.sqrt(info.shape[-1])
    return config.init_std


def _generator(seed: int, name: str) -> np.random.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
