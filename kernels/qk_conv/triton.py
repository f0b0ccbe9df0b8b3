"""Make queries and keys on a GPU in one kernel, and their gradients in two more and sums.

The forward's workgroup computes some tokens of one sequence and one head: the products of its window, tap by tap,
each tap's rows loaded from their place in memory; then skip, norm, temperature and rotation, in fp32.

The gradient needs, of each output, du = s (g - u (u g) / |u|^2), g being the gradient turned back and s the scale.
The forward keeps u in fp32 and s. A kernel computes du from them, with the sums for bias and temperature, and
keeps it in the format of z, as products take it: of a token it is read for each tap of each gradient and for the
skip, and to compute it again each time took all of the LDS of a compute unit. The next launch has workgroups of
two kinds:

    of weights      one head, one tap and a part of the tokens: z^T du. What it sums up is one row of partial sums;
                    torch adds the rows: no atomics, always the same bits
    of inputs       some tokens of one head: du of the tokens ahead times the weight, and the skip's part

The first kind has more to do and comes first. Windows are not written to memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from zslurm.kernels.arch import Arch, arch_of
from zslurm.kernels.code_object import KernelLaunch
from zslurm.kernels.qk_conv.reference import ConvolutionOperands
from zslurm.kernels.triton_tools import dies, dot, launch, on_one_die


class ConvolutionConfiguration(NamedTuple):
    """How a kernel is computed: tokens of a tile, terms of a step of a product, waves, stages of the pipeline."""

    rows: int
    terms: int
    num_warps: int
    num_stages: int


def configuration(arch: Arch, dtype: torch.dtype, tokens: int, head_dim: int) -> ConvolutionConfiguration:
    """Return the tiles for sequences of `tokens` tokens: rows, terms of a product, warps and stages."""
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
    """The arguments and the configuration of a launch, of either pass."""

    given: GivenOperands
    shape: ConvolutionShape
    chosen: ConvolutionConfiguration
    arch: Arch
    tiles: int


def plan(operands: ConvolutionOperands) -> ConvolutionPlan:
    """Return the arguments and the configuration of a launch for these operands."""
    heads, batch, length, head_dim = operands.mixed_shape
    keys, inputs = len(operands.temperature_J), operands.weight_hIP.shape[1]
    arch = arch_of(operands.z_BSQ.device)
    chosen = configuration(arch, operands.z_BSQ.dtype, length, head_dim)
    cos, seen, before = operands.cos.contiguous(), operands.seen_BSW, operands.before_BWQ
    arguments = GivenOperands(
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
    return ConvolutionPlan(arguments, shape, chosen, arch, batch * triton.cdiv(length, chosen.rows))


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


def forward(keeps: bool, *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys, and if it `keeps` them the mixed form [h, B, S, P] and its scale [h, B, S, 1]."""
    operands = ConvolutionOperands(*tensors)  # type: ignore[arg-type]
    q_BHSP, k_BJSP, u_hBSP, inverse_hBS1 = operands.empty(keeps)
    if q_BHSP.numel():
        arguments, shape, chosen, _, tiles = plan(operands)
        launch(
            _forward,
            tiles * arguments.heads,
            q_BHSP,
            arguments,
            q_BHSP,
            k_BJSP,
            u_hBSP if keeps else None,
            inverse_hBS1 if keeps else None,
            math.sqrt(shape.HEAD_DIM),
            SHAPE=shape,
            num_warps=chosen.num_warps,
            num_stages=chosen.num_stages,
        )
    return q_BHSP, k_BJSP, u_hBSP, inverse_hBS1


@triton.jit
def _forward(given, q_out, k_out, mixed_out, inverse_out, root, SHAPE: tl.constexpr):
    """Compute a tile of tokens of one head of one sequence."""
    heads = given.heads
    length = given.length
    program = on_one_die(tl.program_id(0), tl.num_programs(0), SHAPE.DIES)
    head = program % heads
    tile = program // heads
    tiles = (length + SHAPE.ROWS - 1) // SHAPE.ROWS
    batch = (tile // tiles).to(tl.int64)
    queries = heads - SHAPE.KEYS
    rows = tile % tiles * SHAPE.ROWS + tl.arange(0, SHAPE.ROWS)
    is_row = rows < length
    columns = tl.arange(0, SHAPE.PADDED)
    is_column = columns < SHAPE.HEAD_DIM
    is_inside = is_row[:, None] & is_column[None, :]
    z = given.z.first + batch * given.z.batch
    weight = given.weight + head.to(tl.int64) * (SHAPE.TAPS * SHAPE.HEAD_DIM * SHAPE.HEAD_DIM)

    total = tl.full((SHAPE.ROWS, SHAPE.PADDED), 0.0, dtype=tl.float32)
    in_terms = tl.arange(0, SHAPE.TERMS)
    for step in range(SHAPE.TAPS * (SHAPE.PADDED // SHAPE.TERMS)):
        tap = step // (SHAPE.PADDED // SHAPE.TERMS)
        terms = step % (SHAPE.PADDED // SHAPE.TERMS) * SHAPE.TERMS + in_terms
        is_term = terms < SHAPE.HEAD_DIM
        source = rows + (tap - (SHAPE.TAPS - 1))
        is_seen = is_row
        if given.seen is not None:
            seen = given.seen + (batch * length + rows) * SHAPE.TAPS + (SHAPE.TAPS - 1 - tap)
            is_seen = is_row & (tl.load(seen, mask=is_row, other=0) != 0)
        channels = head * SHAPE.HEAD_DIM + terms
        z_tile = tl.load(
            z + source.to(tl.int64)[:, None] * given.z.token + channels[None, :],
            mask=(is_seen & (source >= 0))[:, None] & is_term[None, :],
            other=0.0,
        )
        if given.before is not None:
            before = given.before.first + batch * given.before.batch
            earlier = tl.load(
                before
                + (source + (SHAPE.TAPS - 1)).to(tl.int64)[:, None] * given.before.token
                + channels[None, :],
                mask=(is_seen & (source < 0))[:, None] & is_term[None, :],
                other=0.0,
            )
            z_tile = tl.where((source < 0)[:, None], earlier, z_tile)
        weight_tile = tl.load(
            weight + (tap * SHAPE.HEAD_DIM + terms)[:, None] * SHAPE.HEAD_DIM + columns[None, :],
            mask=is_term[:, None] & is_column[None, :],
            other=0.0,
        )
        total = dot(z_tile, weight_tile, total)
    total += tl.load(given.bias + head * SHAPE.HEAD_DIM + columns, mask=is_column, other=0.0)[None, :]

    row_pointers = z + rows.to(tl.int64)[:, None] * given.z.token + columns[None, :]
    total += 0.5 * tl.load(row_pointers + head * SHAPE.HEAD_DIM, mask=is_inside, other=0.0).to(tl.float32)
    scale = 1.0
    if head < queries:
        key = tl.load(row_pointers + (queries + head // SHAPE.GROUP) * SHAPE.HEAD_DIM, mask=is_inside, other=0.0)
        total += 0.5 * key.to(tl.float32)
    else:
        for member in range(SHAPE.GROUP):
            query = (head - queries) * SHAPE.GROUP + member
            z_tile = tl.load(row_pointers + query * SHAPE.HEAD_DIM, mask=is_inside, other=0.0)
            total += (0.5 / SHAPE.GROUP) * z_tile.to(tl.float32)
        scale = tl.load(given.temperature + head - queries).to(tl.float32)

    squares = tl.sum(tl.where(is_column[None, :], total * total, 0.0), 1)
    inverse = root / tl.maximum(tl.sqrt(squares), 1.1920928955078125e-07, propagate_nan=tl.PropagateNan.ALL)
    if mixed_out is not None:
        token = (head.to(tl.int64) * given.batches + batch) * length + rows
        tl.store(mixed_out + token[:, None] * SHAPE.HEAD_DIM + columns[None, :], total, mask=is_inside)
        tl.store(inverse_out + token, inverse, mask=is_row)

    cosine, sine = angles(given, batch, rows, is_row, columns, SHAPE.PAIRS)
    partner = partners(columns, SHAPE.PAIRS)[None, :]
    partner = tl.gather(total, tl.broadcast_to(partner, (SHAPE.ROWS, SHAPE.PADDED)), 1)
    result = ((total * cosine + partner * sine) * (inverse * scale)[:, None]).to(q_out.dtype.element_ty)
    if head < queries:
        out = q_out + ((batch * queries + head) * length + rows)[:, None] * SHAPE.HEAD_DIM + columns[None, :]
        tl.store(out, result, mask=is_inside)
    else:
        first = (batch * SHAPE.KEYS + head - queries) * length
        tl.store(k_out + (first + rows)[:, None] * SHAPE.HEAD_DIM + columns[None, :], result, mask=is_inside)


class _Gradients(NamedTuple):
    """What comes in beside the operands: gradients of the results, and what the forward kept."""

    q: Heads
    k: Heads
    mixed: Tensor
    inverse: Tensor


def backward(
    grad_q_BHSP: Tensor, grad_k_BJSP: Tensor, u_hBSP: Tensor, inverse_hBS1: Tensor, *tensors: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of z, weight, bias and temperature."""
    operands = ConvolutionOperands(*tensors)  # type: ignore[arg-type]
    z_BSQ, weight_hIP, temperature_J = operands.z_BSQ, operands.weight_hIP, operands.temperature_J
    heads, inputs, head_dim = weight_hIP.shape
    grad_z_BSQ = z_BSQ.new_empty(z_BSQ.shape)
    arguments, shape, chosen, arch, tiles = plan(operands)
    partials = max(1, min(tiles, triton.cdiv(arch.compute_units, heads * shape.TAPS)))
    weight_sums = u_hBSP.new_empty(partials, heads * inputs * head_dim)
    bias_sums = u_hBSP.new_empty(max(1, tiles), heads, head_dim)
    along_sums = u_hBSP.new_empty(max(1, tiles), heads)
    if not z_BSQ.numel():
        for sums in (weight_sums, bias_sums, along_sums):
            sums.zero_()
    else:
        du_hBSP = u_hBSP.new_empty(u_hBSP.shape, dtype=z_BSQ.dtype)
        options: dict[str, Any] = {"SHAPE": shape, "num_warps": chosen.num_warps}
        coming = _Gradients(heads_of(grad_q_BHSP), heads_of(grad_k_BJSP), u_hBSP, inverse_hBS1)
        launch(
            _mixed,
            heads * tiles,
            z_BSQ,
            arguments,
            coming,
            du_hBSP,
            bias_sums,
            along_sums,
            tiles,
            num_stages=1,
            **options,
        )
        launch(
            _backward,
            heads * (shape.TAPS * partials + tiles),
            z_BSQ,
            arguments,
            du_hBSP,
            grad_z_BSQ,
            weight_sums,
            tiles,
            partials,
            num_stages=chosen.num_stages,
            **options,
        )
    return (
        grad_z_BSQ,
        weight_sums.sum(dim=0).view(weight_hIP.shape).to(weight_hIP.dtype),
        bias_sums.sum(dim=0),
        along_sums.sum(dim=0)[heads - shape.KEYS :].to(temperature_J.dtype),
    )


@triton.jit
def _backward(tensors, du, z_grad, sums, all_tiles, partials, SHAPE: tl.constexpr):
    """Do one of the two kinds of work."""
    of_weights = tensors.heads * SHAPE.TAPS * partials
    if tl.program_id(0) < of_weights:
        _of_weights(tl.program_id(0), tensors, du, sums, all_tiles, partials, SHAPE)
    else:
        program = on_one_die(tl.program_id(0) - of_weights, all_tiles * tensors.heads, SHAPE.DIES)
        _of_inputs(program, tensors, du, z_grad, SHAPE)


@triton.jit
def _head_of(heads, head, batch):
    """Return the address of the gradients of a head of a sequence, and the stride of its tokens."""
    return heads.first + batch * heads.batch + head.to(tl.int64) * heads.head, heads.token


@triton.jit
def _of_mixed(tensors, grad, coming, coming_token, head, batch, scale, rows, is_row, columns, SHAPE: tl.constexpr):
    """Return du of some tokens of a head, zero if there is no token, and sqrt(P) g u / |u| of each; fp32."""
    is_inside = is_row[:, None] & (columns < SHAPE.HEAD_DIM)[None, :]
    of_rows = coming + rows.to(tl.int64)[:, None] * coming_token
    partner = partners(columns, SHAPE.PAIRS)
    g = tl.load(of_rows + columns[None, :], mask=is_inside, other=0.0).to(tl.float32)
    turned = tl.load(of_rows + partner[None, :], mask=is_inside, other=0.0).to(tl.float32)
    cosine, sine = angles(tensors, batch, rows, is_row, columns, SHAPE.PAIRS)
    g = g * cosine - turned * sine
    first = (head.to(tl.int64) * tensors.batches + batch) * tensors.length
    mixed = grad.mixed + first * SHAPE.HEAD_DIM
    u = tl.load(mixed + rows[:, None] * SHAPE.HEAD_DIM + columns[None, :], mask=is_inside, other=0.0)
    one_over = tl.load(grad.inverse + first + rows, mask=is_row, other=0.0)
    along = tl.sum(g * u, 1) * one_over
    du = (g - u * (along * one_over / SHAPE.HEAD_DIM)[:, None]) * (one_over * scale)[:, None]
    return du, along


@triton.jit
def _of_own(tensors, grad, head, batch, scale, rows, is_row, columns, SHAPE: tl.constexpr):
    """Return the same of a head of the queries or, behind them, of the keys.

    No pointer leaves a branch: Triton 3.6 does not compile that for AMD's GPUs.
    """
    queries = tensors.heads - SHAPE.KEYS
    if head < queries:
        head_index, token = _head_of(grad.q, head, batch)
        du, along = _of_mixed(tensors, grad, head_index, token, head, batch, scale, rows, is_row, columns, SHAPE)
    else:
        head_index, token = _head_of(grad.k, head - queries, batch)
        du, along = _of_mixed(tensors, grad, head_index, token, head, batch, scale, rows, is_row, columns, SHAPE)
    return du, along


@triton.jit
def _mixed(tensors, grad, du_out, bias_sums, along_sums, all_tiles, SHAPE: tl.constexpr):
    """Compute du of a tile of tokens of one head, and what they add to the gradients of bias and temperature."""
    heads = tensors.heads
    length = tensors.length
    queries = heads - SHAPE.KEYS
    tiles = (length + SHAPE.ROWS - 1) // SHAPE.ROWS
    program = on_one_die(tl.program_id(0), all_tiles * heads, SHAPE.DIES)
    head = program % heads
    tile = program // heads
    batch = (tile // tiles).to(tl.int64)
    columns = tl.arange(0, SHAPE.PADDED)
    is_column = columns < SHAPE.HEAD_DIM
    rows = tile % tiles * SHAPE.ROWS + tl.arange(0, SHAPE.ROWS)
    is_row = rows < length
    scale = tl.load(tensors.temperature + head - queries, mask=head >= queries, other=1.0).to(tl.float32)
    du, along = _of_own(tensors, grad, head, batch, scale, rows, is_row, columns, SHAPE)
    token = (head.to(tl.int64) * tensors.batches + batch) * length + rows
    is_inside = is_row[:, None] & is_column[None, :]
    out = du_out + token[:, None] * SHAPE.HEAD_DIM + columns[None, :]
    tl.store(out, du.to(du_out.dtype.element_ty), mask=is_inside)
    own_sums = tile.to(tl.int64) * heads + head
    tl.store(bias_sums + own_sums * SHAPE.HEAD_DIM + columns, tl.sum(du, 0), mask=is_column)
    tl.store(along_sums + own_sums, tl.sum(along, 0))


@triton.jit
def _load_mixed(tensors, du, head, batch, rows, is_row, columns, SHAPE: tl.constexpr):
    """Return du of some tokens of a head, zero if there is no token."""
    first = (head.to(tl.int64) * tensors.batches + batch) * tensors.length
    is_inside = is_row[:, None] & (columns < SHAPE.HEAD_DIM)[None, :]
    offsets = rows[:, None] * SHAPE.HEAD_DIM + columns[None, :]
    return tl.load(du + first * SHAPE.HEAD_DIM + offsets, mask=is_inside, other=0.0)


@triton.jit
def _of_weights(program, tensors, du, sums, all_tiles, partials, SHAPE: tl.constexpr):
    """Sum up, over a part of the tokens, what one tap of one head's weight takes."""
    heads = tensors.heads
    length = tensors.length
    tiles = (length + SHAPE.ROWS - 1) // SHAPE.ROWS
    columns = tl.arange(0, SHAPE.PADDED)
    is_column = columns < SHAPE.HEAD_DIM
    tap = program % SHAPE.TAPS
    head = program // SHAPE.TAPS % heads
    first_tile = program // (SHAPE.TAPS * heads)
    back = SHAPE.TAPS - 1 - tap
    total = tl.full((SHAPE.PADDED, SHAPE.PADDED), 0.0, dtype=tl.float32)
    for tile in range(first_tile, all_tiles, partials):
        batch = (tile // tiles).to(tl.int64)
        rows = tile % tiles * SHAPE.ROWS + tl.arange(0, SHAPE.ROWS)
        is_row = rows < length
        du_tile = _load_mixed(tensors, du, head, batch, rows, is_row, columns, SHAPE)
        source = rows - back
        is_seen = is_row & (source >= 0)
        if tensors.seen is not None:
            seen = tensors.seen + (batch * length + rows) * SHAPE.TAPS + back
            is_seen &= tl.load(seen, mask=is_row, other=0) != 0
        z = tensors.z.first + batch * tensors.z.batch
        channels = (head * SHAPE.HEAD_DIM + columns)[:, None]
        z_tile = tl.load(
            z + source.to(tl.int64)[None, :] * tensors.z.token + channels,
            mask=is_column[:, None] & is_seen[None, :],
            other=0.0,
        )
        total = dot(z_tile, du_tile, total)

    sums += first_tile.to(tl.int64) * heads * (SHAPE.TAPS * SHAPE.HEAD_DIM * SHAPE.HEAD_DIM)
    corner = sums + (head * SHAPE.TAPS + tap) * SHAPE.HEAD_DIM * SHAPE.HEAD_DIM
    tl.store(
        corner + columns[:, None] * SHAPE.HEAD_DIM + columns[None, :],
        total,
        mask=is_column[:, None] & is_column[None, :],
    )


@triton.jit
def _of_inputs(program, tensors, du, z_grad, SHAPE: tl.constexpr):
    """Compute a tile of tokens of z's gradient of one head of one sequence."""
    heads = tensors.heads
    length = tensors.length
    queries = heads - SHAPE.KEYS
    tiles = (length + SHAPE.ROWS - 1) // SHAPE.ROWS
    columns = tl.arange(0, SHAPE.PADDED)
    is_column = columns < SHAPE.HEAD_DIM
    head = program % heads
    tile = program // heads
    batch = (tile // tiles).to(tl.int64)
    rows = tile % tiles * SHAPE.ROWS + tl.arange(0, SHAPE.ROWS)
    is_row = rows < length
    key = tl.where(head < queries, head // SHAPE.GROUP, head - queries)
    weight = tensors.weight + head.to(tl.int64) * (SHAPE.TAPS * SHAPE.HEAD_DIM * SHAPE.HEAD_DIM)

    # The skip: each head's own du, and the others' of its group.
    total = 0.5 * _load_mixed(tensors, du, head, batch, rows, is_row, columns, SHAPE).to(tl.float32)
    if head < queries:
        share = _load_mixed(tensors, du, queries + key, batch, rows, is_row, columns, SHAPE).to(tl.float32)
        total += share * (0.5 / SHAPE.GROUP)
    else:
        for member in range(SHAPE.GROUP):
            query = key * SHAPE.GROUP + member
            total += 0.5 * _load_mixed(tensors, du, query, batch, rows, is_row, columns, SHAPE).to(tl.float32)

    for ahead in tl.range(0, SHAPE.TAPS, disable_licm=True):
        target = rows + ahead
        is_target = target < length
        if tensors.seen is not None:
            seen = tensors.seen + (batch * length + target) * SHAPE.TAPS + ahead
            is_target &= tl.load(seen, mask=is_target, other=0) != 0
        later = _load_mixed(tensors, du, head, batch, target, is_target, columns, SHAPE)
        turned = tl.load(
            weight
            + (SHAPE.TAPS - 1 - ahead) * SHAPE.HEAD_DIM * SHAPE.HEAD_DIM
            + columns[None, :] * SHAPE.HEAD_DIM
            + columns[:, None],
            mask=is_column[:, None] & is_column[None, :],
            other=0.0,
        )
        total = dot(later, turned, total)
    out = z_grad + (batch * length + rows)[:, None] * (heads * SHAPE.HEAD_DIM)
    channels = (head * SHAPE.HEAD_DIM + columns)[None, :]
    is_inside = is_row[:, None] & is_column[None, :]
    tl.store(out + channels, total.to(z_grad.dtype.element_ty), mask=is_inside)


def launches(arch: Arch) -> Iterator[KernelLaunch]:
    """Yield them."""
    kinds = [
        ("bfloat16", 128, 4096, 3, False),
        ("bfloat16", 128, 4096, 3, True),
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

    operands = ConvolutionOperands(
        z_BSQ=empty(2, tokens, (heads + keys) * head_dim)[:, :, : heads * head_dim],  # of a wider product
        weight_hIP=empty(heads, taps * head_dim, head_dim),
        bias_hP=empty(heads, head_dim, dtype=torch.float32),
        temperature_J=empty(keys),
        cos=empty(tokens, head_dim // 4, dtype=torch.float32),
        sin=empty(tokens, head_dim // 4, dtype=torch.float32),
        seen_BSW=empty(2, tokens, taps, dtype=torch.bool) if divided else None,
        before_BWQ=None,
    )
    behind = operands._replace(before_BWQ=empty(2, taps - 1, heads * head_dim))
    results = operands.empty(keeps=True)
    return {
        "forward": partial(forward, True, *operands),
        "forward behind others": partial(forward, False, *behind),
        "backward": partial(backward, *results, *operands),
    }
