"""Join two streams and normalise their sum on a GPU: one kernel in each direction.

Forward, every row is read once and written once. A tile of a workgroup is one row of up to 8,192 elements, or
several rows if those are narrow, and is held in registers.

Backward, the kernel recomputes t from both streams, which it needs anyway for the gradients of their scales,
instead of reading it. Each workgroup adds up the gradients of scales, biases and weights over its rows and writes
them once; torch adds up these partial sums, in an order that depends on the number of rows and the card alone: the
result has the same bits every time.

The grid is persistent: no more workgroups than keep the card's compute units busy, each with every n-th tile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from zslurm.kernels.arch import Arch, arch_of
from zslurm.kernels.code_object import KernelLaunch
from zslurm.kernels.residual_norm.reference import Gradients, NormOperands
from zslurm.kernels.triton_tools import launch

_TILE = 2048  # elements of a tile of narrow rows: 8 for each of 256 lanes
_MOST_WARPS = 16


class NormShape(NamedTuple):
    """Constants of both kernels.

    Attributes:
        ROWS: of a tile.
        COLUMNS: of a tile, a power of 2.
        HOISTED: whether scales, biases and weights stay in registers from tile to tile.
        WHOLE: whether no tile is cut by the last row or column.
        CENTERED: LayerNorm instead of RMSNorm.
    """

    ROWS: int
    COLUMNS: int
    HOISTED: bool
    WHOLE: bool
    CENTERED: bool


class NormConfiguration(NamedTuple):
    """The constants of a launch, the warps of a workgroup, and the workgroups."""

    shape: NormShape
    num_warps: int
    programs: int


def configuration(
    arch: Arch, rows: int, width: int, *, centered: bool = False, backward: bool = False
) -> NormConfiguration:
    """Return how rows of this width are cut into tiles, and how these are dealt out.

    Backward, each workgroup writes a row of partial sums: there are no more of them than keep the card busy.
    """
    columns = triton.next_power_of_2(width)
    tile_rows = max(1, _TILE // columns)
    # 8 elements a lane are 16 bytes of bf16: with more warps a lane would move less at a time. On NVIDIA 16 warps
    # may have no more than 128 registers each.
    most = _MOST_WARPS if arch.wave_size == 64 else 8
    warps = min(max(tile_rows * columns // (8 * arch.wave_size), 4), most)
    hoisted = tile_rows * columns // (warps * arch.wave_size) <= 8
    if backward and warps == _MOST_WARPS:  # with 128 registers a lane, Triton 3.6 spills some of the vectors
        hoisted = False
    whole = width == columns and rows % tile_rows == 0
    programs = min(triton.cdiv(rows, tile_rows), arch.compute_units * max(1, (8 if backward else 32) // warps))
    return NormConfiguration(NormShape(tile_rows, columns, hoisted, whole, centered), warps, programs)


def _for_kernels(tensors: Iterable[Tensor | None]) -> NormOperands:
    """Return the operands as kernels take them: without gaps between their elements."""
    return NormOperands(*(None if tensor is None else _packed(tensor) for tensor in tensors))  # type: ignore[arg-type]


def _packed(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def forward(eps: float, centered: bool, *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, t and the statistics of each row, as the reference does."""
    operands = _for_kernels(tensors)
    hidden, width = operands.hidden, operands.hidden.shape[-1]
    rows = hidden.numel() // width
    x = torch.empty_like(hidden, dtype=operands.weight.dtype)
    joined = torch.empty_like(hidden, dtype=torch.float32)
    statistics_KR = hidden.new_empty((2 if centered else 1, rows), dtype=torch.float32)
    if rows:
        shape, num_warps, programs = configuration(arch_of(hidden.device), rows, width, centered=centered)
        arguments = operands, x, joined, statistics_KR, rows, width, eps
        launch(_forward_rows, programs, hidden, *arguments, SHAPE=shape, num_warps=num_warps)
    return x, joined, statistics_KR


def backward(
    grad_x: Tensor, grad_joined: Tensor, joined: Tensor, statistics: Tensor, *tensors: Tensor | None
) -> Gradients:
    """Return the gradients of the operands, as the reference does."""
    operands = _for_kernels(tensors)
    hidden, residual, width = operands.hidden, operands.residual, operands.hidden.shape[-1]
    rows = hidden.numel() // width
    arch, centered = arch_of(hidden.device), len(statistics) == 2
    shape, num_warps, programs = configuration(arch, rows, width, centered=centered, backward=True)
    vectors = [operand for operand in operands if operand is not None and operand.dim() == 1]
    sums_KPD = hidden.new_empty((len(vectors), programs, width), dtype=torch.float32)
    grad_hidden = torch.empty_like(hidden)
    grad_residual = None if residual is None else torch.empty_like(residual)
    if rows:
        grads = _packed(grad_x), _packed(grad_joined), statistics
        results = grad_hidden, grad_residual, sums_KPD
        options = {"SHAPE": shape, "num_warps": num_warps}
        launch(_backward_rows, programs, hidden, operands, *grads, *results, rows, width, **options)
    sums = iter(sums_KPD.sum(dim=1).to(operands.weight.dtype).unbind())
    streams = {"hidden": grad_hidden, "residual": grad_residual}
    return tuple(
        streams[name] if name in streams else None if operand is None else next(sums)
        for name, operand in operands._asdict().items()
    )


@triton.jit
def _vector(pointer, column, is_column, default: tl.constexpr):
    """Load a part of a vector [D] in fp32; what is None has one value everywhere."""
    if pointer is None:
        values = tl.full(column.shape, default, tl.float32)
    else:
        values = tl.load(pointer + column, mask=is_column, other=0.0).to(tl.float32)
    return values


@triton.jit
def _scales(given, column, is_column):
    """Return a, c and b a + d c, of which t = h a + r c + the last, the same for all rows."""
    scale = _vector(given.hidden_scale, column, is_column, 1.0)
    other_scale = _vector(given.residual_scale, column, is_column, 1.0)
    own_bias = _vector(given.hidden_bias, column, is_column, 0.0) * scale
    other_bias = _vector(given.residual_bias, column, is_column, 0.0) * other_scale
    return scale, other_scale, own_bias + other_bias


@triton.jit
def _tile(pointer, offsets, inside):
    """Load a tile of rows in fp32; what is None is zero."""
    if pointer is None:
        values = tl.zeros(inside.shape, tl.float32)
    else:
        values = tl.load(pointer + offsets, mask=inside, other=0.0).to(tl.float32)
    return values


@triton.jit
def _store(pointer, offsets, inside, values):
    if pointer is not None:
        tl.store(pointer + offsets, values.to(pointer.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "eps"])
def _forward_rows(given, x, joined, statistics, rows, width, eps, SHAPE: tl.constexpr):
    """Join and normalise tiles of whole rows."""
    column = tl.arange(0, SHAPE.COLUMNS)[None, :]
    is_column = (column < width) | SHAPE.WHOLE
    in_rows = tl.arange(0, SHAPE.ROWS)[:, None]
    if SHAPE.HOISTED:
        scale, other_scale, shift = _scales(given, column, is_column)
        gain = _vector(given.weight, column, is_column, 1.0)
        offset = _vector(given.bias, column, is_column, 0.0)

    for tile in range(tl.program_id(0), (rows + SHAPE.ROWS - 1) // SHAPE.ROWS, tl.num_programs(0)):
        row = (tile * SHAPE.ROWS + in_rows).to(tl.int64)
        is_row = (row < rows) | SHAPE.WHOLE
        inside = is_row & is_column
        offsets = row * width + column
        h = _tile(given.hidden, offsets, inside)
        r = _tile(given.residual, offsets, inside)
        if not SHAPE.HOISTED:
            scale, other_scale, shift = _scales(given, column, is_column)
        t = h * scale + (r * other_scale + shift)
        _store(joined, offsets, inside, t)
        if SHAPE.CENTERED:
            mean = tl.sum(t, axis=1, keep_dims=True) / width
            tl.store(statistics + rows + row, mean, mask=is_row)
            t = tl.where(is_column, t - mean, 0.0)
        inverse = 1.0 / tl.sqrt(tl.sum(t * t, axis=1, keep_dims=True) / width + eps)
        tl.store(statistics + row, inverse, mask=is_row)
        if not SHAPE.HOISTED:
            gain = _vector(given.weight, column, is_column, 1.0)
            offset = _vector(given.bias, column, is_column, 0.0)
        _store(x, offsets, inside, t * inverse * gain + offset)


@triton.jit(do_not_specialize=["rows"])
def _backward_rows(
    given, grads, grads_joined, statistics, hidden_out, residual_out, sums, rows, width, SHAPE: tl.constexpr
):
    """Write the gradients of both streams, and add up those of the vectors over all tiles of this workgroup."""
    column = tl.arange(0, SHAPE.COLUMNS)[None, :]
    is_column = (column < width) | SHAPE.WHOLE
    in_rows = tl.arange(0, SHAPE.ROWS)[:, None]
    if SHAPE.HOISTED:
        scale, other_scale, shift = _scales(given, column, is_column)
        gain = _vector(given.weight, column, is_column, 1.0)
    of_weight = tl.full((SHAPE.ROWS, SHAPE.COLUMNS), 0.0, tl.float32)
    of_bias = tl.full((SHAPE.ROWS, SHAPE.COLUMNS), 0.0, tl.float32)
    of_sum = tl.full((SHAPE.ROWS, SHAPE.COLUMNS), 0.0, tl.float32)
    of_hidden = tl.full((SHAPE.ROWS, SHAPE.COLUMNS), 0.0, tl.float32)
    of_residual = tl.full((SHAPE.ROWS, SHAPE.COLUMNS), 0.0, tl.float32)

    for tile in range(tl.program_id(0), (rows + SHAPE.ROWS - 1) // SHAPE.ROWS, tl.num_programs(0)):
        row = (tile * SHAPE.ROWS + in_rows).to(tl.int64)
        is_row = (row < rows) | SHAPE.WHOLE
        inside = is_row & is_column
        offsets = row * width + column
        h = _tile(given.hidden, offsets, inside)
        r = _tile(given.residual, offsets, inside)
        grad_row = _tile(grads, offsets, inside)
        g = _tile(grads_joined, offsets, inside)
        if not SHAPE.HOISTED:
            scale, other_scale, shift = _scales(given, column, is_column)
            gain = _vector(given.weight, column, is_column, 1.0)
        inverse = tl.load(statistics + row, mask=is_row, other=0.0)
        deviation = h * scale + (r * other_scale + shift)
        if SHAPE.CENTERED:
            deviation -= tl.load(statistics + rows + row, mask=is_row, other=0.0)
        normal = deviation * inverse
        weighted = grad_row * gain
        along = tl.sum(weighted * normal, axis=1, keep_dims=True) / width
        across = weighted - normal * along
        if SHAPE.CENTERED:
            across -= tl.sum(weighted, axis=1, keep_dims=True) / width
        g += across * inverse
        _store(hidden_out, offsets, inside, g * scale)
        _store(residual_out, offsets, inside, g * other_scale)
        of_weight += grad_row * normal
        of_bias += grad_row
        of_sum += g
        of_hidden += g * h
        of_residual += g * r

    # The partial sums [K, P, D] of the vectors that there are, in their order.
    first = sums + tl.program_id(0).to(tl.int64) * width + column
    step = tl.num_programs(0).to(tl.int64) * width
    total = tl.sum(of_sum, axis=0, keep_dims=True)
    own = tl.sum(of_hidden, axis=0, keep_dims=True) + total * _vector(given.hidden_bias, column, is_column, 0.0)
    tl.store(first, own, mask=is_column)
    tl.store(first + step, total * _vector(given.hidden_scale, column, is_column, 1.0), mask=is_column)
    if given.residual is not None:
        first += 2 * step
        other = tl.sum(of_residual, axis=0, keep_dims=True)
        other += total * _vector(given.residual_bias, column, is_column, 0.0)
        tl.store(first, other, mask=is_column)
        tl.store(first + step, total * _vector(given.residual_scale, column, is_column, 1.0), mask=is_column)
    tl.store(first + 2 * step, tl.sum(of_weight, axis=0, keep_dims=True), mask=is_column)
    if given.bias is not None:
        tl.store(first + 3 * step, tl.sum(of_bias, axis=0, keep_dims=True), mask=is_column)


def launches(arch: Arch) -> Iterator[KernelLaunch]:
    """Yield a launch of every kind that the compiler makes other code of."""
    for width in (256, 2048, 4096, 8192) if arch.is_amd else (256, 2048, 4096):
        yield from _both(f"bfloat16 {width}", torch.bfloat16, width)
    yield from _both("float32 2048", torch.float32, 2048)
    yield from _both("first 2048", torch.bfloat16, 2048, first=True)
    yield from _both("LayerNorm 2048", torch.bfloat16, 2048, centered=True)
    yield from _both("cut 1536", torch.bfloat16, 1536)


def _both(
    name: str, dtype: torch.dtype, width: int, *, first: bool = False, centered: bool = False
) -> Iterator[KernelLaunch]:
    rows = 4096
    vector = torch.empty(width, dtype=dtype, device="meta")
    hidden = torch.empty(rows, width, dtype=dtype, device="meta")
    joined = torch.empty(rows, width, device="meta")
    residual = (None, None, None) if first else (joined, vector, vector)
    operands = hidden, vector, vector, *residual, vector, vector if centered else None
    statistics = torch.empty(2 if centered else 1, rows, device="meta")
    yield KernelLaunch(f"{name} forward", partial(forward, 1e-5, centered, *operands), product=False)
    run = partial(backward, hidden, joined, joined, statistics, *operands)
    yield KernelLaunch(f"{name} backward", run, product=False)
