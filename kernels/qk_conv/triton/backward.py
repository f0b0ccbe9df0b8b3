"""The backward kernel: workgroups of two kinds, for the gradients of the weights and of z."""

from __future__ import annotations

from typing import NamedTuple

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
    sums = u_hBSP.new_empty(partials, heads * (inputs * head_dim + head_dim + 1))
    if not z_BSQ.numel():
        sums.zero_()
    else:
        launch(
            _backward,
            heads * (shape.TAPS * partials + tiles),
            z_BSQ,
            operands_given,
            _Gradients(heads_of(grad_q_BHSP), heads_of(grad_k_BJSP), u_hBSP, inverse_hBS1),
            grad_z_BSQ,
            sums,
            tiles,
            partials,
            SHAPE=shape,
            num_warps=chosen.num_warps,
            num_stages=chosen.num_stages,
        )
    sizes = [heads * inputs * head_dim, heads * head_dim, heads]
    grad_weight, grad_bias, grad_temperature = sums.sum(dim=0).split(sizes)
    return (
        grad_z_BSQ,
        grad_weight.view(weight_hIP.shape).to(weight_hIP.dtype),
        grad_bias.view(heads, head_dim),
        grad_temperature[heads - shape.KEYS :].to(temperature_J.dtype),
    )


@triton.jit
def _backward(given, grad, z_grad, sums, all_tiles, partials, SHAPE: tl.constexpr):
    """Do one of the two kinds of work."""
    of_weights = given.heads * SHAPE.TAPS * partials
    if tl.program_id(0) < of_weights:
        _of_weights(tl.program_id(0), given, grad, sums, all_tiles, partials, SHAPE)
    else:
        program = on_one_die(tl.program_id(0) - of_weights, all_tiles * given.heads, SHAPE.DIES)
        _of_inputs(program, given, grad, z_grad, SHAPE)


@triton.jit
def _head_of(heads, head, batch):
    """Return the address of the gradients of a head of a sequence, and the stride of its tokens."""
    return heads.first + batch * heads.batch + head.to(tl.int64) * heads.head, heads.token


@triton.jit
def _of_mixed(given, grad, own, own_token, head, batch, scale, rows, is_row, columns, SHAPE: tl.constexpr):
    """Return du of some tokens of a head, zero if there is no token, and sqrt(P) g u / |u| of each; fp32."""
    is_inside = is_row[:, None] & (columns < SHAPE.HEAD_DIM)[None, :]
    of_rows = own + rows.to(tl.int64)[:, None] * own_token
    partner = partners(columns, SHAPE.PAIRS)
    g = tl.load(of_rows + columns[None, :], mask=is_inside, other=0.0).to(tl.float32)
    turned = tl.load(of_rows + partner[None, :], mask=is_inside, other=0.0).to(tl.float32)
    cosine, sine = angles(given, batch, rows, is_row, columns, SHAPE.PAIRS)
    g = g * cosine - turned * sine
    first = (head.to(tl.int64) * given.batches + batch) * given.length
    mixed = grad.mixed + first * SHAPE.HEAD_DIM
    u = tl.load(mixed + rows[:, None] * SHAPE.HEAD_DIM + columns[None, :], mask=is_inside, other=0.0)
    one_over = tl.load(grad.inverse + first + rows, mask=is_row, other=0.0)
    along = tl.sum(g * u, 1) * one_over
    du = (g - u * (along * one_over / SHAPE.HEAD_DIM)[:, None]) * (one_over * scale)[:, None]
    return du, along


@triton.jit
def _of_own(given, grad, head, batch, scale, rows, is_row, columns, SHAPE: tl.constexpr):
    """Return the same of a head of the queries or, behind them, of the keys.

    No pointer leaves a branch: Triton 3.6 does not compile that for AMD's GPUs.
    """
    queries = given.heads - SHAPE.KEYS
    if head < queries:
        head_index, token = _head_of(grad.q, head, batch)
        du, along = _of_mixed(given, grad, head_index, token, head, batch, scale, rows, is_row, columns, SHAPE)
    else:
        head_index, token = _head_of(grad.k, head - queries, batch)
        du, along = _of_mixed(given, grad, head_index, token, head, batch, scale, rows, is_row, columns, SHAPE)
    return du, along


@triton.jit
def _of_weights(program, given, grad, sums, all_tiles, partials, SHAPE: tl.constexpr):
    """Sum up, over a part of the tokens, what one tap of one head's weight takes, bias and temperature."""
    heads = given.heads
    length = given.length
    queries = heads - SHAPE.KEYS
    tiles = (length + SHAPE.ROWS - 1) // SHAPE.ROWS
    columns = tl.arange(0, SHAPE.PADDED)
    is_column = columns < SHAPE.HEAD_DIM
    tap = program % SHAPE.TAPS
    head = program // SHAPE.TAPS % heads
    first_tile = program // (SHAPE.TAPS * heads)
    is_key = head >= queries
    scale = tl.load(given.temperature + head - queries, mask=is_key, other=1.0).to(tl.float32)
    back = SHAPE.TAPS - 1 - tap
    total = tl.full((SHAPE.PADDED, SHAPE.PADDED), 0.0, dtype=tl.float32)
    bias_total = tl.full((SHAPE.PADDED,), 0.0, dtype=tl.float32)
    along_total = tl.full((SHAPE.ROWS,), 0.0, dtype=tl.float32)
    for tile in range(first_tile, all_tiles, partials):
        batch = (tile // tiles).to(tl.int64)
        rows = tile % tiles * SHAPE.ROWS + tl.arange(0, SHAPE.ROWS)
        is_row = rows < length
        du, along = _of_own(given, grad, head, batch, scale, rows, is_row, columns, SHAPE)
        bias_total += tl.sum(du, 0)
        along_total += along
        source = rows - back
        is_seen = is_row & (source >= 0)
        if given.seen is not None:
            seen = given.seen + (batch * length + rows) * SHAPE.TAPS + back
            is_seen &= tl.load(seen, mask=is_row, other=0) != 0
        z = given.z.first + batch * given.z.batch
        channels = (head * SHAPE.HEAD_DIM + columns)[:, None]
        z_tile = tl.load(
            z + source.to(tl.int64)[None, :] * given.z.token + channels,
            mask=is_column[:, None] & is_seen[None, :],
            other=0.0,
        )
        total = dot(z_tile, du.to(z_tile.dtype), total)

    sums += first_tile.to(tl.int64) * heads * (SHAPE.TAPS * SHAPE.HEAD_DIM * SHAPE.HEAD_DIM + SHAPE.HEAD_DIM + 1)
    corner = sums + (head * SHAPE.TAPS + tap) * SHAPE.HEAD_DIM * SHAPE.HEAD_DIM
    tl.store(
        corner + columns[:, None] * SHAPE.HEAD_DIM + columns[None, :],
        total,
        mask=is_column[:, None] & is_column[None, :],
    )
    if back == 0:
        sums += heads * SHAPE.TAPS * SHAPE.HEAD_DIM * SHAPE.HEAD_DIM
        tl.store(sums + head * SHAPE.HEAD_DIM + columns, bias_total, mask=is_column)
        tl.store(sums + heads * SHAPE.HEAD_DIM + head, tl.sum(along_total, 0))


@triton.jit
def _of_inputs(program, given, grad, z_grad, SHAPE: tl.constexpr):
    """Compute a tile of tokens of z's gradient of one head of one sequence."""
    heads = given.heads
    length = given.length
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
    key_scale = tl.load(given.temperature + key).to(tl.float32)
    of_key, key_token = _head_of(grad.k, key, batch)
    weight = given.weight + head.to(tl.int64) * (SHAPE.TAPS * SHAPE.HEAD_DIM * SHAPE.HEAD_DIM)

    # The skip: each head's own du, and the others' of its group.
    if head < queries:
        scale = 1.0
        share, _ = _of_mixed(
            given, grad, of_key, key_token, queries + key, batch, key_scale, rows, is_row, columns, SHAPE
        )
        total = share * (0.5 / SHAPE.GROUP)
    else:
        scale = key_scale
        total = tl.full((SHAPE.ROWS, SHAPE.PADDED), 0.0, dtype=tl.float32)
        for member in range(SHAPE.GROUP):
            query = key * SHAPE.GROUP + member
            of_query, query_token = _head_of(grad.q, query, batch)
            share, _ = _of_mixed(
                given, grad, of_query, query_token, query, batch, 1.0, rows, is_row, columns, SHAPE
            )
            total += 0.5 * share

    for ahead in tl.range(0, SHAPE.TAPS, disable_licm=True):
        target = rows + ahead
        is_target = target < length
        if given.seen is not None:
            seen = given.seen + (batch * length + target) * SHAPE.TAPS + ahead
            is_target &= tl.load(seen, mask=is_target, other=0) != 0
        du, _ = _of_own(given, grad, head, batch, scale, target, is_target, columns, SHAPE)
        if ahead == 0:
            total += 0.5 * du
        turned = tl.load(
            weight
            + (SHAPE.TAPS - 1 - ahead) * SHAPE.HEAD_DIM * SHAPE.HEAD_DIM
            + columns[None, :] * SHAPE.HEAD_DIM
            + columns[:, None],
            mask=is_column[:, None] & is_column[None, :],
            other=0.0,
        )
        total = dot(du.to(turned.dtype), turned, total)
    out = z_grad + (batch * length + rows)[:, None] * (heads * SHAPE.HEAD_DIM)
    channels = (head * SHAPE.HEAD_DIM + columns)[None, :]
    is_inside = is_row[:, None] & is_column[None, :]
    tl.store(out + channels, total.to(z_grad.dtype.element_ty), mask=is_inside)
