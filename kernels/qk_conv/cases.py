"""Cases of the queries and keys of CCA: what they are checked and measured on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

from zslurm.kernels.case import TOLERANCE, Call, Case, drawn
from zslurm.kernels.qk_conv import reference
from zslurm.kernels.qk_conv.reference import ConvolutionOperands, Convolutions, join

_TAPS = 2  # of each convolution, as ZAYA1 has them


class _Sizes(NamedTuple):
    """Sequences, their length, heads of queries and of keys, channels of a head."""

    batch: int
    length: int
    queries: int
    keys: int
    head_dim: int


def checks() -> Iterator[Case]:
    """Yield heads and lengths of several sizes, with documents and without."""
    for dtype in (torch.bfloat16, torch.float32):
        for sizes in (_Sizes(2, 33, 4, 2, 16), _Sizes(1, 130, 8, 2, 32), _Sizes(1, 7, 2, 1, 24)):
            for documents in (False, True):
                yield from _all(dtype, sizes, documents)


def benchmarks(small: bool) -> Iterator[Case]:
    """Yield zaya1-8b's heads for microbatches of several sizes."""
    for length in (64, 256) if small else (4096, 16384, 65536):
        sizes = _Sizes(1, length, 4, 2, 32) if small else _Sizes(1, length, 8, 2, 128)
        yield from _all(torch.bfloat16, sizes, False)


def _all(dtype: torch.dtype, sizes: _Sizes, documents: bool) -> Iterator[Case]:
    batch, length, queries, keys, head_dim = sizes
    heads = queries + keys
    name = f"{str(dtype).removeprefix('torch.')} {batch} x {length}, {queries} + {keys} heads of {head_dim}"
    elements = batch * length * heads * head_dim
    products = 2.0 * elements * head_dim * (2 * _TAPS - 1)
    # Projections, queries and keys in their format, the mixed form in fp32.
    narrow = dtype.itemsize
    for operation, make, flops, moved in (
        ("forward", _forward, products, 2 * narrow + 4),
        ("backward", _backward, 2 * products, 3 * narrow + 4),
    ):
        yield Case(
            f"qk_conv.{operation}",
            f"{name}, documents" if documents else name,
            partial(make, dtype, sizes, documents),
            TOLERANCE[dtype] * 2,  # the product of the convolutions is rounded as well
            flops=flops,
            bytes=float(moved * elements),
            axis="tokens",
        )


def _operands(dtype: torch.dtype, sizes: _Sizes, documents: bool, device: torch.device) -> ConvolutionOperands:
    batch, length, queries, keys, head_dim = sizes
    channels, reach = (queries + keys) * head_dim, 2 * _TAPS - 2
    convolutions = Convolutions(
        drawn(device, dtype, channels, 1, _TAPS, seed=1),
        drawn(device, dtype, channels, seed=2),
        drawn(device, dtype, channels, head_dim, _TAPS, seed=3) / head_dim**0.5,
        drawn(device, dtype, channels, seed=4),
    )
    frequencies_A = torch.logspace(0, -3, head_dim // 4, device=device)
    angles_SA = torch.arange(length, device=device).unsqueeze(1) * frequencies_A
    seen_BSW = None
    if documents:  # of five tokens each
        position_B1S1 = torch.arange(length, device=device).view(1, length, 1).expand(batch, length, 1)
        seen_BSW = torch.cat([position_B1S1 % 5 >= distance for distance in range(reach + 1)], dim=-1)
    z_BSQ, temperature_J = drawn(device, dtype, batch, length, channels), drawn(device, dtype, keys, seed=5)
    weight_hIP, bias_hP = join(convolutions)
    angles = angles_SA.cos(), angles_SA.sin()
    return ConvolutionOperands(z_BSQ, weight_hIP, bias_hP, 1 + 0.1 * temperature_J, *angles, seen_BSW, None)


def _forward(dtype: torch.dtype, sizes: _Sizes, documents: bool, device: torch.device) -> Call:
    operands = _operands(dtype, sizes, documents, device)
    return Call(lambda: (True, *operands), list)


def _backward(dtype: torch.dtype, sizes: _Sizes, documents: bool, device: torch.device) -> Call:
    operands = _operands(dtype, sizes, documents, device)
    q_BHSP, k_BJSP, *kept = reference.forward(True, *operands)
    gradients = [drawn(device, dtype, *tensor.shape, seed=seed) for seed, tensor in ((6, q_BHSP), (7, k_BJSP))]
    return Call(lambda: (*gradients, *kept, *operands), list)
