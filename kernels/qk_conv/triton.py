"""Make queries and keys on a GPU in one kernel, and their gradients in one more and a sum.

The forward's workgroup computes some tokens of one sequence and one head: the products of its window, tap by tap,
each tap's rows loaded where they are in memory; then skip, norm, temperature and rotation, in fp32.

The gradient needs, of each output, du = s (g - u (u g) / |u|^2), g being the gradient turned back and s the scale.
The forward keeps u in fp32 and s, so du is a few operations on what is loaded, and every workgroup computes the du
that it needs, shifted by a tap or of another head. The backward's launch has workgroups of two kinds:

    of weights      one head, one tap and every so many tokens: z^T du, and the sums for bias and temperature. What
                    it sums up is one row of partial sums; torch adds the rows: no atomics, always the same bits
    of inputs       some tokens of one head: du of the tokens ahead times the weight, and the skip's part

The first kind has more to do and comes first. Of windows, or of du, nothing is written to memory.
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
from zslurm.kernels.code_object import Launch
from zslurm.kernels.triton_tools import INTERPRETED, compiler_options, dies, launching_on


class Configuration(NamedTuple):
    """How a kernel is computed: tokens of a tile, terms of a step of a product, waves, stages of the pipeline."""

    rows: int
    terms: int
    num_warps: int
    num_stages: int


def configuration(arch: Arch, dtype: torch.dtype, tokens: int, head_dim: int) -> Configuration:
    """Return how sequences of so many tokens are computed."""
    width = _padded(head_dim)
    if tokens <= 16:
        return Configuration(16, min(width, 32), 4, 2)
    if dtype == torch.float32 or width < 128:
        return Configuration(32, min(width, 32), 4, 2)
    return Configuration(64, 64, 8, 2)


def forward(
    z_BSQ: Tensor,
    weight_hIP: Tensor,
    bias_hP: Tensor,
    temperature_J: Tensor,
    cos: Tensor,
    sin: Tensor,
    seen_BSW: Tensor | None,
    before_BWQ: Tensor | None,
    keeps: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys, and if it `keeps` them the mixed form [h, B, S, P] and its scale [h, B, S, 1]."""
    (batch, length, _), (heads, _, head_dim), keys = z_BSQ.shape, weight_hIP.shape, len(temperature_J)
    q_BHSP = z_BSQ.new_empty(batch, heads - keys, length, head_dim)
    k_BJSP = z_BSQ.new_empty(batch, keys, length, head_dim)
    kept = (heads, batch, length) if keeps else (0, batch, length)
    u_hBSP, inverse_hBS1 = bias_hP.new_empty(*kept, head_dim), bias_hP.new_empty(*kept, 1)
    if not q_BHSP.numel():
        return q_BHSP, k_BJSP, u_hBSP, inverse_hBS1
    arch = arch_of(z_BSQ.device)
    chosen = configuration(arch, z_BSQ.dtype, length, head_dim)
    z_BSQ, cos, sin = _rows_together(z_BSQ), cos.contiguous(), sin.contiguous()
    before_BWQ = z_BSQ if before_BWQ is None else _rows_together(before_BWQ)
    with launching_on(z_BSQ):
        _forward[(batch * triton.cdiv(length, chosen.rows) * heads,)](
            z_BSQ,
            before_BWQ,
            weight_hIP.contiguous(),
            bias_hP.contiguous(),
            temperature_J.contiguous(),
            cos,
            sin,
            z_BSQ if seen_BSW is None else seen_BSW.contiguous().view(torch.uint8),
            q_BHSP,
            k_BJSP,
            u_hBSP,
            inverse_hBS1,
            length,
            heads,
            *z_BSQ.stride()[:2],
            *before_BWQ.stride()[:2],
            cos.stride(0) if cos.dim() == 3 else 0,
            math.sqrt(head_dim),
            HAS_BEFORE=before_BWQ is not z_BSQ,
            KEEPS=keeps,
            **_shared(arch, chosen, weight_hIP, keys, cos, seen_BSW),
            TERMS=chosen.terms,
        )
    return q_BHSP, k_BJSP, u_hBSP, inverse_hBS1


def backward(
    grad_q_BHSP: Tensor,
    grad_k_BJSP: Tensor,
    z_BSQ: Tensor,
    weight_hIP: Tensor,
    temperature_J: Tensor,
    cos: Tensor,
    sin: Tensor,
    seen_BSW: Tensor | None,
    u_hBSP: Tensor,
    inverse_hBS1: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of z, weight, bias and temperature."""
    (batch, length, _), (heads, inputs, head_dim), keys = z_BSQ.shape, weight_hIP.shape, len(temperature_J)
    grad_z_BSQ = z_BSQ.new_empty(z_BSQ.shape)
    arch = arch_of(z_BSQ.device)
    chosen = configuration(arch, z_BSQ.dtype, length, head_dim)
    tiles, taps = batch * triton.cdiv(length, chosen.rows), inputs // head_dim
    partials = max(1, min(tiles, triton.cdiv(arch.compute_units, heads * taps)))
    sums = u_hBSP.new_empty(partials, heads * (inputs * head_dim + head_dim + 1))
    if not z_BSQ.numel():
        sums.zero_()
    else:
        grad_q_BHSP, grad_k_BJSP = _rows_together(grad_q_BHSP), _rows_together(grad_k_BJSP)
        z_BSQ, cos, sin = _rows_together(z_BSQ), cos.contiguous(), sin.contiguous()
        with launching_on(z_BSQ):
            _backward[(heads * taps * partials + tiles * heads,)](
                grad_q_BHSP,
                grad_k_BJSP,
                z_BSQ,
                weight_hIP.contiguous(),
                temperature_J.contiguous(),
                cos,
                sin,
                z_BSQ if seen_BSW is None else seen_BSW.contiguous().view(torch.uint8),
                u_hBSP,
                inverse_hBS1,
                grad_z_BSQ,
                sums,
                length,
                heads,
                tiles,
                partials,
                *grad_q_BHSP.stride()[:3],
                *grad_k_BJSP.stride()[:3],
                *z_BSQ.stride()[:2],
                cos.stride(0) if cos.dim() == 3 else 0,
                **_shared(arch, chosen, weight_hIP, keys, cos, seen_BSW),
            )
    grad_weight, grad_bias, grad_temperature = sums.sum(dim=0).split(
        [heads * inputs * head_dim, heads * head_dim, heads]
    )
    return (
        grad_z_BSQ,
        grad_weight.view(weight_hIP.shape).to(weight_hIP.dtype),
        grad_bias.view(heads, head_dim),
        grad_temperature[heads - keys :].to(temperature_J.dtype),
    )


def _shared(
    arch: Arch, chosen: Configuration, weight_hIP: Tensor, keys: int, cos: Tensor, seen_BSW: Tensor | None
) -> dict[str, Any]:
    """Return the constants of both kernels."""
    heads, inputs, head_dim = weight_hIP.shape
    return {
        "KEYS": keys,
        "GROUP": (heads - keys) // keys,
        "TAPS": inputs // head_dim,
        "HEAD_DIM": head_dim,
        "PADDED": _padded(head_dim),
        "PAIRS": cos.shape[-1],
        "DIVIDED": seen_BSW is not None,
        "ROWS": chosen.rows,
        "DIES": dies(arch),
        "WIDENED": INTERPRETED,
        "num_warps": chosen.num_warps,
        "num_stages": chosen.num_stages,
        **compiler_options(arch),
    }


def _padded(head_dim: int) -> int:
    return max(16, int(triton.next_power_of_2(head_dim)))


def _rows_together(x: Tensor) -> Tensor:
    """Return x with its last dimension together in memory."""
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def _on_one_die(program, programs, DIES: tl.constexpr):
    """Return another place of a workgroup, so that neighbours are on one die, where they share a cache."""
    if DIES > 1:
        die = program % DIES
        program = die * (programs // DIES) + tl.minimum(die, programs % DIES) + program // DIES
    return program


@triton.jit
def _dot(left, right, total, WIDENED: tl.constexpr):
    if WIDENED:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    if left.dtype == tl.float32:  # else TF32 on some
        total = tl.dot(left, right, total, input_precision="ieee")
    else:
        total = tl.dot(left, right, total)
    return total


@triton.jit
def _partners(columns, PAIRS: tl.constexpr):
    """Return the channel that each channel is turned with, or itself."""
    partner = tl.where(columns < PAIRS, columns + PAIRS, columns - PAIRS)
    partner = tl.where(columns < 2 * PAIRS, partner, columns)
    if PAIRS % 8 == 0:  # so that loads are of 16 bytes
        partner = tl.max_contiguous(tl.multiple_of(partner, [8]), [8])
    return partner


@triton.jit
def _angles(cos, sin, rows, is_row, columns, PAIRS: tl.constexpr):
    """Return the cosine, and the sine with the sign with which the partner is added, of each channel."""
    turns = is_row[:, None] & (columns < 2 * PAIRS)[None, :]
    pair = tl.where(columns < PAIRS, columns, columns - PAIRS)
    if PAIRS % 8 == 0:
        pair = tl.max_contiguous(tl.multiple_of(pair, [8]), [8])
    offsets = rows[:, None] * PAIRS + pair[None, :]
    cosine = tl.load(cos + offsets, mask=turns, other=1.0)
    sine = tl.load(sin + offsets, mask=turns, other=0.0)
    return cosine, tl.where((columns < PAIRS)[None, :], -sine, sine)


@triton.jit
def _forward(
    z,
    before,
    weight,
    bias,
    temperature,
    cos,
    sin,
    seen,
    q_out,
    k_out,
    mixed_out,
    inverse_out,
    length,
    heads,
    z_batch,
    z_token,
    before_batch,
    before_token,
    angle_batch,
    root,
    HAS_BEFORE: tl.constexpr,
    KEEPS: tl.constexpr,
    KEYS: tl.constexpr,
    GROUP: tl.constexpr,
    TAPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    PAIRS: tl.constexpr,
    DIVIDED: tl.constexpr,
    ROWS: tl.constexpr,
    TERMS: tl.constexpr,
    DIES: tl.constexpr,
    WIDENED: tl.constexpr,
):
    """Compute ROWS tokens of one head of one sequence."""
    program = _on_one_die(tl.program_id(0), tl.num_programs(0), DIES)
    head = program % heads
    tile = program // heads
    tiles = (length + ROWS - 1) // ROWS
    batch = (tile // tiles).to(tl.int64)
    first_row = tile % tiles * ROWS
    queries = heads - KEYS
    in_rows = tl.arange(0, ROWS)
    rows = first_row + in_rows
    is_row = rows < length
    columns = tl.arange(0, PADDED)
    is_column = columns < HEAD_DIM
    whole = is_row[:, None] & is_column[None, :]
    z += batch * z_batch
    before += batch * before_batch
    seen += batch * length * TAPS
    weight += head.to(tl.int64) * (TAPS * HEAD_DIM * HEAD_DIM)

    total = tl.full((ROWS, PADDED), 0.0, dtype=tl.float32)
    in_terms = tl.arange(0, TERMS)
    for step in range(TAPS * (PADDED // TERMS)):
        tap = step // (PADDED // TERMS)
        terms = step % (PADDED // TERMS) * TERMS + in_terms
        is_term = terms < HEAD_DIM
        source = rows + (tap - (TAPS - 1))
        is_seen = is_row
        if DIVIDED:
            is_seen = is_row & (tl.load(seen + rows * TAPS + (TAPS - 1 - tap), mask=is_row, other=0) != 0)
        channels = head * HEAD_DIM + terms
        z_tile = tl.load(
            z + source.to(tl.int64)[:, None] * z_token + channels[None, :],
            mask=(is_seen & (source >= 0))[:, None] & is_term[None, :],
            other=0.0,
        )
        if HAS_BEFORE:
            earlier = tl.load(
                before + (source + (TAPS - 1)).to(tl.int64)[:, None] * before_token + channels[None, :],
                mask=(is_seen & (source < 0))[:, None] & is_term[None, :],
                other=0.0,
            )
            z_tile = tl.where((source < 0)[:, None], earlier, z_tile)
        weight_tile = tl.load(
            weight + (tap * HEAD_DIM + terms)[:, None] * HEAD_DIM + columns[None, :],
            mask=is_term[:, None] & is_column[None, :],
            other=0.0,
        )
        total = _dot(z_tile, weight_tile, total, WIDENED)
    total += tl.load(bias + head * HEAD_DIM + columns, mask=is_column, other=0.0)[None, :]

    own = z + rows.to(tl.int64)[:, None] * z_token + columns[None, :]
    total += 0.5 * tl.load(own + head * HEAD_DIM, mask=whole, other=0.0).to(tl.float32)
    scale = 1.0
    if head < queries:
        key = tl.load(own + (queries + head // GROUP) * HEAD_DIM, mask=whole, other=0.0)
        total += 0.5 * key.to(tl.float32)
    else:
        for member in range(GROUP):
            query = (head - queries) * GROUP + member
            total += (0.5 / GROUP) * tl.load(own + query * HEAD_DIM, mask=whole, other=0.0).to(tl.float32)
        scale = tl.load(temperature + head - queries).to(tl.float32)

    squares = tl.sum(tl.where(is_column[None, :], total * total, 0.0), 1)
    inverse = root / tl.maximum(tl.sqrt(squares), 1.1920928955078125e-07, propagate_nan=tl.PropagateNan.ALL)
    if KEEPS:
        token = (head.to(tl.int64) * (tl.num_programs(0) // heads // tiles) + batch) * length + rows
        tl.store(mixed_out + token[:, None] * HEAD_DIM + columns[None, :], total, mask=whole)
        tl.store(inverse_out + token, inverse, mask=is_row)

    cosine, sine = _angles(cos + batch * angle_batch, sin + batch * angle_batch, rows, is_row, columns, PAIRS)
    partner = tl.gather(total, tl.broadcast_to(_partners(columns, PAIRS)[None, :], (ROWS, PADDED)), 1)
    result = (total * cosine + partner * sine) * (inverse * scale)[:, None]
    if head < queries:
        out = q_out + ((batch * queries + head) * length + rows)[:, None] * HEAD_DIM + columns[None, :]
        tl.store(out, result.to(q_out.dtype.element_ty), mask=whole)
    else:
        out = k_out + ((batch * KEYS + head - queries) * length + rows)[:, None] * HEAD_DIM + columns[None, :]
        tl.store(out, result.to(q_out.dtype.element_ty), mask=whole)


@triton.jit
def _gradient_of_mixed(
    grad,
    grad_token,
    mixed,
    inverse,
    scale,
    cos,
    sin,
    rows,
    is_row,
    columns,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Return du of some tokens of a head, zero where there is no token, and sqrt(P) g u / |u| of each; fp32."""
    whole = is_row[:, None] & (columns < HEAD_DIM)[None, :]
    of_rows = grad + rows.to(tl.int64)[:, None] * grad_token
    g = tl.load(of_rows + columns[None, :], mask=whole, other=0.0).to(tl.float32)
    partner = tl.load(of_rows + _partners(columns, PAIRS)[None, :], mask=whole, other=0.0).to(tl.float32)
    cosine, sine = _angles(cos, sin, rows, is_row, columns, PAIRS)
    g = g * cosine - partner * sine
    u = tl.load(mixed + rows[:, None] * HEAD_DIM + columns[None, :], mask=whole, other=0.0)
    one_over = tl.load(inverse + rows, mask=is_row, other=0.0)
    along = tl.sum(g * u, 1) * one_over
    du = (g - u * (along * one_over / HEAD_DIM)[:, None]) * (one_over * scale)[:, None]
    return du, along


@triton.jit
def _gradient_of_weights(
    program,
    q_grad,
    k_grad,
    z,
    temperature,
    cos,
    sin,
    seen,
    mixed,
    inverse,
    sums,
    length,
    heads,
    all_tiles,
    partials,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    z_batch,
    z_token,
    angle_batch,
    KEYS: tl.constexpr,
    GROUP: tl.constexpr,
    TAPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    PAIRS: tl.constexpr,
    DIVIDED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDENED: tl.constexpr,
):
    """Sum up, over a part of the tokens, what one tap of one head's weight takes, bias and temperature."""
    queries = heads - KEYS
    tiles = (length + ROWS - 1) // ROWS
    in_rows = tl.arange(0, ROWS)
    columns = tl.arange(0, PADDED)
    is_column = columns < HEAD_DIM
    tap = program % TAPS
    head = program // TAPS % heads
    part = program // (TAPS * heads)
    is_key = head >= queries
    scale = tl.load(temperature + head - queries, mask=is_key, other=1.0).to(tl.float32)
    back = TAPS - 1 - tap
    total = tl.full((PADDED, PADDED), 0.0, dtype=tl.float32)
    bias_total = tl.full((PADDED,), 0.0, dtype=tl.float32)
    along_total = tl.full((ROWS,), 0.0, dtype=tl.float32)
    for tile in range(part, all_tiles, partials):
        batch = (tile // tiles).to(tl.int64)
        rows = tile % tiles * ROWS + in_rows
        is_row = rows < length
        first = (head.to(tl.int64) * (all_tiles // tiles) + batch) * length
        if is_key:
            grad, grad_token = k_grad + batch * k_batch + (head - queries).to(tl.int64) * k_head, k_token
        else:
            grad, grad_token = q_grad + batch * q_batch + head.to(tl.int64) * q_head, q_token
        du, along = _gradient_of_mixed(
            grad,
            grad_token,
            mixed + first * HEAD_DIM,
            inverse + first,
            scale,
            cos + batch * angle_batch,
            sin + batch * angle_batch,
            rows,
            is_row,
            columns,
            HEAD_DIM,
            PAIRS,
        )
        bias_total += tl.sum(du, 0)
        along_total += along
        source = rows - back
        is_seen = is_row & (source >= 0)
        if DIVIDED:
            is_seen &= tl.load(seen + (batch * length + rows) * TAPS + back, mask=is_row, other=0) != 0
        z_tile = tl.load(
            z + batch * z_batch + source.to(tl.int64)[None, :] * z_token + (head * HEAD_DIM + columns)[:, None],
            mask=is_column[:, None] & is_seen[None, :],
            other=0.0,
        )
        total = _dot(z_tile, du.to(z.dtype.element_ty), total, WIDENED)

    sums += part.to(tl.int64) * heads * (TAPS * HEAD_DIM * HEAD_DIM + HEAD_DIM + 1)
    corner = sums + (head * TAPS + tap) * HEAD_DIM * HEAD_DIM
    tl.store(
        corner + columns[:, None] * HEAD_DIM + columns[None, :],
        total,
        mask=is_column[:, None] & is_column[None, :],
    )
    if back == 0:
        sums += heads * TAPS * HEAD_DIM * HEAD_DIM
        tl.store(sums + head * HEAD_DIM + columns, bias_total, mask=is_column)
        tl.store(sums + heads * HEAD_DIM + head, tl.sum(along_total, 0))


@triton.jit
def _gradient_of_inputs(
    program,
    q_grad,
    k_grad,
    weight,
    temperature,
    cos,
    sin,
    seen,
    mixed,
    inverse,
    z_grad,
    length,
    heads,
    all_tiles,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    angle_batch,
    KEYS: tl.constexpr,
    GROUP: tl.constexpr,
    TAPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    PAIRS: tl.constexpr,
    DIVIDED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDENED: tl.constexpr,
):
    """Compute ROWS tokens of z's gradient of one head of one sequence."""
    queries = heads - KEYS
    tiles = (length + ROWS - 1) // ROWS
    in_rows = tl.arange(0, ROWS)
    columns = tl.arange(0, PADDED)
    is_column = columns < HEAD_DIM
    head = program % heads
    tile = program // heads
    batch = (tile // tiles).to(tl.int64)
    rows = tile % tiles * ROWS + in_rows
    whole = (rows < length)[:, None] & is_column[None, :]
    cos += batch * angle_batch
    sin += batch * angle_batch
    of_batch = all_tiles // tiles
    key = tl.where(head < queries, head // GROUP, head - queries)
    key_scale = tl.load(temperature + key).to(tl.float32)
    key_first = ((queries + key).to(tl.int64) * of_batch + batch) * length
    key_grad = k_grad + batch * k_batch + key.to(tl.int64) * k_head
    weight += head.to(tl.int64) * (TAPS * HEAD_DIM * HEAD_DIM)

    # The skip: each head's own du, and the others' of its group.
    if head < queries:
        grad, grad_token, scale = q_grad + batch * q_batch + head.to(tl.int64) * q_head, q_token, 1.0
        share, _ = _gradient_of_mixed(
            key_grad,
            k_token,
            mixed + key_first * HEAD_DIM,
            inverse + key_first,
            key_scale,
            cos,
            sin,
            rows,
            rows < length,
            columns,
            HEAD_DIM,
            PAIRS,
        )
        total = share * (0.5 / GROUP)
    else:
        grad, grad_token, scale = key_grad, k_token, key_scale
        total = tl.full((ROWS, PADDED), 0.0, dtype=tl.float32)
        for member in range(GROUP):
            query = (key * GROUP + member).to(tl.int64)
            query_first = (query * of_batch + batch) * length
            share, _ = _gradient_of_mixed(
                q_grad + batch * q_batch + query * q_head,
                q_token,
                mixed + query_first * HEAD_DIM,
                inverse + query_first,
                1.0,
                cos,
                sin,
                rows,
                rows < length,
                columns,
                HEAD_DIM,
                PAIRS,
            )
            total += 0.5 * share

    first = (head.to(tl.int64) * of_batch + batch) * length
    for ahead in range(TAPS):
        target = rows + ahead
        is_target = target < length
        if DIVIDED:
            place = (batch * length + target) * TAPS + ahead
            is_target &= tl.load(seen + place, mask=is_target, other=0) != 0
        du, _ = _gradient_of_mixed(
            grad,
            grad_token,
            mixed + first * HEAD_DIM,
            inverse + first,
            scale,
            cos,
            sin,
            target,
            is_target,
            columns,
            HEAD_DIM,
            PAIRS,
        )
        if ahead == 0:
            total += 0.5 * du
        corner = weight + (TAPS - 1 - ahead) * HEAD_DIM * HEAD_DIM
        turned = tl.load(
            corner + columns[None, :] * HEAD_DIM + columns[:, None],
            mask=is_column[:, None] & is_column[None, :],
            other=0.0,
        )
        total = _dot(du.to(z_grad.dtype.element_ty), turned, total, WIDENED)
    channels = head * HEAD_DIM + columns
    out = z_grad + (batch * length + rows)[:, None] * (heads * HEAD_DIM) + channels[None, :]
    tl.store(out, total.to(z_grad.dtype.element_ty), mask=whole)


@triton.jit
def _backward(
    q_grad,
    k_grad,
    z,
    weight,
    temperature,
    cos,
    sin,
    seen,
    mixed,
    inverse,
    z_grad,
    sums,
    length,
    heads,
    all_tiles,
    partials,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    z_batch,
    z_token,
    angle_batch,
    KEYS: tl.constexpr,
    GROUP: tl.constexpr,
    TAPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    PAIRS: tl.constexpr,
    DIVIDED: tl.constexpr,
    ROWS: tl.constexpr,
    DIES: tl.constexpr,
    WIDENED: tl.constexpr,
):
    """Do one of the two kinds of work."""
    of_weights = heads * TAPS * partials
    if tl.program_id(0) < of_weights:
        _gradient_of_weights(
            tl.program_id(0),
            q_grad,
            k_grad,
            z,
            temperature,
            cos,
            sin,
            seen,
            mixed,
            inverse,
            sums,
            length,
            heads,
            all_tiles,
            partials,
            q_batch,
            q_head,
            q_token,
            k_batch,
            k_head,
            k_token,
            z_batch,
            z_token,
            angle_batch,
            KEYS,
            GROUP,
            TAPS,
            HEAD_DIM,
            PADDED,
            PAIRS,
            DIVIDED,
            ROWS,
            WIDENED,
        )
    else:
        program = _on_one_die(tl.program_id(0) - of_weights, all_tiles * heads, DIES)
        _gradient_of_inputs(
            program,
            q_grad,
            k_grad,
            weight,
            temperature,
            cos,
            sin,
            seen,
            mixed,
            inverse,
            z_grad,
            length,
            heads,
            all_tiles,
            q_batch,
            q_head,
            q_token,
            k_batch,
            k_head,
            k_token,
            angle_batch,
            KEYS,
            GROUP,
            TAPS,
            HEAD_DIM,
            PADDED,
            PAIRS,
            DIVIDED,
            ROWS,
            WIDENED,
        )


def launches(arch: Arch) -> Iterator[Launch]:
    """Yield a launch of every kind that the compiler makes other code of: ZAYA1's heads, and others."""
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
            yield Launch(f"{name}, {what}", passes[what])


def _on_meta(dtype: torch.dtype, head_dim: int, tokens: int, taps: int, divided: bool) -> dict[str, Any]:
    """Return calls of each pass, by its name, with operands on the device `meta`."""
    heads, keys = 10, 2

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    z = empty(2, tokens, (heads + keys) * head_dim)[:, :, : heads * head_dim]  # of a wider product
    weight, temperature = empty(heads, taps * head_dim, head_dim), empty(keys)
    cos, sin = [empty(tokens, head_dim // 4, dtype=torch.float32) for _ in range(2)]
    bias = empty(heads, head_dim, dtype=torch.float32)
    seen = empty(2, tokens, taps, dtype=torch.bool) if divided else None
    u, inverse = (
        empty(heads, 2, tokens, head_dim, dtype=torch.float32),
        empty(heads, 2, tokens, 1, dtype=torch.float32),
    )
    q_grad, k_grad = empty(2, heads - keys, tokens, head_dim), empty(2, keys, tokens, head_dim)
    before = empty(2, taps - 1, heads * head_dim)
    return {
        "forward": partial(forward, z, weight, bias, temperature, cos, sin, seen, None, True),
        "forward behind others": partial(forward, z, weight, bias, temperature, cos, sin, seen, before, False),
        "backward": partial(backward, q_grad, k_grad, z, weight, temperature, cos, sin, seen, u, inverse),
    }
