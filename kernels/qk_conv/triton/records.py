"""What both kernels take: operands with their strides, constants, and the angles of a tile's tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from zslurm.kernels.arch import Arch, arch_of
from zslurm.kernels.qk_conv.operands import ConvolutionOperands
from zslurm.kernels.triton_tools import dies


class ConvolutionConfiguration(NamedTuple):
    """How a kernel is computed: tokens of a tile, terms of a step of a product, waves, stages of the pipeline."""

    rows: int
    terms: int
    num_warps: int
    num_stages: int


def configuration(arch: Arch, dtype: torch.dtype, tokens: int, head_dim: int) -> ConvolutionConfiguration:
    """Return how sequences of so many tokens are computed."""
    width = _padded(head_dim)
    if tokens <= 16:
        return ConvolutionConfiguration(16, min(width, 32), 4, 2)
    if dtype == torch.float32 or width < 128:
        return ConvolutionConfiguration(32, min(width, 32), 4, 2)
    return ConvolutionConfiguration(64, 64, 8, 2)


class Tokens(NamedTuple):
    """A tensor [B, S, ...], whose last dimension is together in memory, and its strides."""

    first: Tensor
    batch: int
    token: int


class Heads(NamedTuple):
    """A tensor [B, h, S, P], whose last dimension is together in memory, and its strides."""

    first: Tensor
    batch: int
    head: int
    token: int


class GivenOperands(NamedTuple):
    """The operands of both kernels, and their sizes."""

    z: Tokens
    before: Tokens | None
    weight: Tensor
    bias: Tensor
    temperature: Tensor
    cos: Tensor
    sin: Tensor
    angle_batch: int
    seen: Tensor | None
    length: int
    batches: int
    heads: int


class ConvolutionShape(NamedTuple):
    """Constants of both kernels.

    Attributes:
        KEYS: key heads.
        GROUP: query heads of each.
        TAPS: tokens of a window.
        HEAD_DIM: channels of a head.
        PADDED: the same as a power of two.
        PAIRS: of channels that rotate.
        ROWS: tokens of a tile.
        TERMS: of a step of the forward's product.
        DIES: of the GPU.
    """

    KEYS: int
    GROUP: int
    TAPS: int
    HEAD_DIM: int
    PADDED: int
    PAIRS: int
    ROWS: int
    TERMS: int
    DIES: int


class ConvolutionPlan(NamedTuple):
    """All that both passes prepare for their launch."""

    given: GivenOperands
    shape: ConvolutionShape
    chosen: ConvolutionConfiguration
    arch: Arch
    tiles: int


def plan(operands: ConvolutionOperands) -> ConvolutionPlan:
    """Return what a launch for these operands takes."""
    heads, batch, length, head_dim = operands.mixed_shape
    keys, inputs = len(operands.temperature_J), operands.weight_hIP.shape[1]
    arch = arch_of(operands.z_BSQ.device)
    chosen = configuration(arch, operands.z_BSQ.dtype, length, head_dim)
    cos, seen, before = operands.cos.contiguous(), operands.seen_BSW, operands.before_BWQ
    operands_given = GivenOperands(
        z=_tokens(operands.z_BSQ),
        before=None if before is None else _tokens(before),
        weight=operands.weight_hIP.contiguous(),
        bias=operands.bias_hP.contiguous(),
        temperature=operands.temperature_J.contiguous(),
        cos=cos,
        sin=operands.sin.contiguous(),
        angle_batch=cos.stride(0) if cos.dim() == 3 else 0,
        seen=None if seen is None else seen.contiguous().view(torch.uint8),
        length=length,
        batches=batch,
        heads=heads,
    )
    shape = ConvolutionShape(
        KEYS=keys,
        GROUP=(heads - keys) // keys,
        TAPS=inputs // head_dim,
        HEAD_DIM=head_dim,
        PADDED=_padded(head_dim),
        PAIRS=cos.shape[-1],
        ROWS=chosen.rows,
        TERMS=chosen.terms,
        DIES=dies(arch),
    )
    return ConvolutionPlan(operands_given, shape, chosen, arch, batch * triton.cdiv(length, chosen.rows))


def heads_of(x_BHSP: Tensor) -> Heads:
    """Return a tensor of heads with its strides."""
    x_BHSP = _rows_together(x_BHSP)
    return Heads(x_BHSP, *x_BHSP.stride()[:3])


def _tokens(x_BSQ: Tensor) -> Tokens:
    x_BSQ = _rows_together(x_BSQ)
    return Tokens(x_BSQ, *x_BSQ.stride()[:2])


def _padded(head_dim: int) -> int:
    return max(16, int(triton.next_power_of_2(head_dim)))


def _rows_together(x: Tensor) -> Tensor:
    """Return x with its last dimension together in memory."""
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def partners(columns, PAIRS: tl.constexpr):
    """Return the channel that each channel is turned with, or itself."""
    partner = tl.where(columns < PAIRS, columns + PAIRS, columns - PAIRS)
    partner = tl.where(columns < 2 * PAIRS, partner, columns)
    if PAIRS % 8 == 0:  # so that loads are of 16 bytes
        partner = tl.max_contiguous(tl.multiple_of(partner, [8]), [8])
    return partner


@triton.jit
def angles(given, batch, rows, is_row, columns, PAIRS: tl.constexpr):
    """Return the cosine, and the sine with the sign with which the partner is added, of each channel."""
    turns = is_row[:, None] & (columns < 2 * PAIRS)[None, :]
    pair = tl.where(columns < PAIRS, columns, columns - PAIRS)
    if PAIRS % 8 == 0:
        pair = tl.max_contiguous(tl.multiple_of(pair, [8]), [8])
    offsets = rows[:, None] * PAIRS + pair[None, :]
    cosine = tl.load(given.cos + batch * given.angle_batch + offsets, mask=turns, other=1.0)
    sine = tl.load(given.sin + batch * given.angle_batch + offsets, mask=turns, other=0.0)
    return cosine, tl.where((columns < PAIRS)[None, :], -sine, sine)
