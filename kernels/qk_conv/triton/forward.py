"""The forward kernel: products of windows, skip, norm, temperature and rotation."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from zslurm.kernels.qk_conv.operands import ConvolutionOperands
from zslurm.kernels.qk_conv.triton.records import angles, partners, plan
from zslurm.kernels.triton_tools import dot, launch, on_one_die


def forward(keeps: bool, *operands: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys, and if it `keeps` them the mixed form [h, B, S, P] and its scale [h, B, S, 1]."""
    tensors = ConvolutionOperands(*operands)  # type: ignore[arg-type]
    q_BHSP, k_BJSP, u_hBSP, inverse_hBS1 = tensors.empty(keeps)
    if q_BHSP.numel():
        operands_given, shape, chosen, _, tiles = plan(tensors)
        launch(
            _forward,
            tiles * operands_given.heads,
            q_BHSP,
            operands_given,
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
