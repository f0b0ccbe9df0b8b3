"""Describe a launch of every kind that the compiler makes other code of: ZAYA1's heads, and others."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zslurm.kernels.arch import Arch
from zslurm.kernels.code_object import KernelLaunch
from zslurm.kernels.qk_conv.operands import ConvolutionOperands
from zslurm.kernels.qk_conv.triton.backward import backward
from zslurm.kernels.qk_conv.triton.forward import forward


def launches(arch: Arch) -> Iterator[KernelLaunch]:
    """Yield them."""
    kinds = [
        ("bfloat16", 128, 4096, 3, False),
        ("bfloat16", 128, 4096, 3, True),
        ("float16", 128, 4096, 3, False),
        ("bfloat16", 128, 16, 3, False),
        ("bfloat16", 64, 999, 5, True),
        ("bfloat16", 24, 77, 3, True),
    ]
    if arch.is_amd:
        kinds.append(("float32", 64, 4096, 3, False))
    for dtype, head_dim, tokens, taps, divided in kinds:
        name = f"{dtype} {head_dim} channels, {tokens} tokens{', documents' * divided}"
        passes = _on_meta(getattr(torch, dtype), head_dim, tokens, taps, divided)
        for what in ("forward", "backward") if tokens > 16 else passes:
            narrow = head_dim < 128 or tokens <= 16
            yield KernelLaunch(f"{name}, {what}", passes[what], narrow=narrow, without_products=("_mixed",))


def _on_meta(dtype: torch.dtype, head_dim: int, tokens: int, taps: int, divided: bool) -> dict[str, Any]:
    """Return calls of each pass, by its name, with operands on the device `meta`."""
    heads, keys = 10, 2

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    operands_given = ConvolutionOperands(
        z_BSQ=empty(2, tokens, (heads + keys) * head_dim)[:, :, : heads * head_dim],  # of a wider product
        weight_hIP=empty(heads, taps * head_dim, head_dim),
        bias_hP=empty(heads, head_dim, dtype=torch.float32),
        temperature_J=empty(keys),
        cos=empty(tokens, head_dim // 4, dtype=torch.float32),
        sin=empty(tokens, head_dim // 4, dtype=torch.float32),
        seen_BSW=empty(2, tokens, taps, dtype=torch.bool) if divided else None,
        before_BWQ=None,
    )
    behind = operands_given._replace(before_BWQ=empty(2, taps - 1, heads * head_dim))
    results = operands_given.empty(keeps=True)
    return {
        "forward": partial(forward, True, *operands_given),
        "forward behind others": partial(forward, False, *behind),
        "backward": partial(backward, *results, *operands_given),
    }
