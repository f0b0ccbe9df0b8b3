"""The backward kernels: du, the gradient of the mixed form, then workgroups of two kinds for weights and z.

The second kernel reads du of a token for each tap of each gradient and for the skip. To compute it there, again
each time, took all of the LDS of a compute unit. It is kept in the format of z, as products take it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from zslurm.kernels.qk_conv.operands import ConvolutionOperands
from zslurm.kernels.qk_conv.triton.records import Heads, angles, heads_of, partners, plan
from zslurm.kernels.triton_tools import dot, launch, on_one_die


class _Gradients(NamedTuple):
    """What comes in beside the operands: gradients of the results, and what the forward kept."""

    q: Heads
    k: Heads
    mixed: Tensor
    inverse: Tensor


def backward(
    grad_q_BHSP: Tensor, grad_k_BJSP: Tensor, u_hBSP: Tensor, inverse_hBS1: Tensor, *operands: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of z, weight, bias and temperature."""
    tensors = ConvolutionOperands(*operands)  # type: ignore[arg-type]
    z_BSQ, weight_hIP, temperature_J = tensors.z_BSQ, tensors.weight_hIP, tensors.temperature_J
    heads, inputs, head_dim = weight_hIP.shape
    grad_z_BSQ = z_BSQ.new_empty(z_BSQ.shape)
    operands_given, shape, chosen, arch, tiles = plan(tensors)
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
            operands_given,
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
            operands_given,
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
