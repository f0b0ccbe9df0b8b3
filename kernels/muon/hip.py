"""Run Muon's passes by the kernels of kernels/hip/muon.hip: one pass each over a table of matrices.

Memory in addition to the operands: 4 bytes for every 8,192 elements, for the sums of squares.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float, c_uint, c_uint64
from typing import Any

import torch
from torch import Tensor

from zslurm.kernels.checks import short
from zslurm.kernels.hip.tables import Row, chunks_of, launches, matrices
from zslurm.kernels.muon.reference import places_of

_PRODUCTS = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def supports_momentum(momenta: list[Tensor], gradients: list[Tensor], x_KMN: Tensor, **_: Any) -> str | None:
    """Return None, or what of the operands the kernel does not take."""
    return _unsupported([*momenta, *gradients], x_KMN)


def momentum(
    momenta: list[Tensor], gradients: list[Tensor], x_KMN: Tensor, *, mu: float, nesterov: bool
) -> Tensor:
    """Run `muon.momentum`."""
    from zslurm.kernels.hip.driver import kernels

    muon, product = kernels("muon", x_KMN.device), _PRODUCTS[x_KMN.dtype]
    count, chunks = x_KMN.shape[0], chunks_of(x_KMN.shape[1] * x_KMN.shape[2])
    norms_K = x_KMN.new_zeros(count)
    if not x_KMN.numel():
        return norms_K
    partials = torch.empty(count * chunks, dtype=torch.float32, device=x_KMN.device)
    first = partials.data_ptr()
    rows = _rows(x_KMN, _addresses(gradients), _addresses(momenta), matrices(x_KMN))
    for launch in launches(rows, (4, 4, x_KMN.element_size())):
        arguments = (launch.table, c_float(1 - mu), c_uint(nesterov), c_uint64(first))
        muon.launch(f"muon_momentum_{product}", launch.blocks, arguments)
        first += 4 * launch.blocks
    sums = (c_uint64(partials.data_ptr()), c_uint(chunks), c_uint64(norms_K.data_ptr()))
    muon.launch(f"muon_norms_{product}", count, sums)
    return norms_K


def supports_update(
    masters: list[Tensor],
    x_KMN: Tensor,
    *,
    weights: list[Tensor] | None = None,
    pieces: list[Tensor] | None = None,
    **_: Any,
) -> str | None:
    """Return None, or what of the operands the kernel does not take."""
    rounded = (*(weights or ()), *(pieces or ()))
    unrounded = next((weight for weight in rounded if weight.dtype != torch.bfloat16), None)
    if unrounded is not None:
        return f"{short(unrounded.dtype)} weights"
    return _unsupported([*masters, *(weights or ()), x_KMN], x_KMN)


def update(
    masters: list[Tensor],
    x_KMN: Tensor,
    *,
    decay: float,
    rate: float,
    weights: list[Tensor] | None = None,
    pieces: list[Tensor] | None = None,
) -> None:
    """Run `muon.update`: with pieces, a row of the table for each."""
    from zslurm.kernels.hip.driver import kernels

    muon, product = kernels("muon", x_KMN.device), _PRODUCTS[x_KMN.dtype]
    if not x_KMN.numel():
        return
    if pieces is not None:
        rows = _rows_of_pieces(x_KMN, _addresses(masters), pieces)
    else:
        to = _addresses(weights) if weights is not None else [0] * x_KMN.shape[0]
        rows = _rows(x_KMN, _addresses(masters), matrices(x_KMN), to)
    for launch in launches(rows, (4, x_KMN.element_size(), 2)):
        arguments = (launch.table, c_float(decay), c_float(rate))
        muon.launch(f"muon_update_{product}", launch.blocks, arguments)


def _unsupported(tensors: list[Tensor], x_KMN: Tensor) -> str | None:
    if x_KMN.dtype not in _PRODUCTS:
        return f"{short(x_KMN.dtype)} products"
    for tensor in tensors:
        if tensor.dtype == torch.float64:
            return "float64 operands"
        if tensor.numel() and not tensor[0].is_contiguous():
            return "matrices whose elements are not contiguous"
    return None


def _addresses(tensors: list[Tensor]) -> list[int]:
    return [address for tensor in tensors for address in matrices(tensor)]


def _rows_of_pieces(x_KMN: Tensor, masters: Sequence[int], pieces: list[Tensor]) -> list[Row]:
    """Return the rows of an update by pieces: of fp32 masters, and x."""
    x, itemsize = matrices(x_KMN), x_KMN.element_size()
    places = places_of(pieces, x_KMN.shape[1] * x_KMN.shape[2])
    return [
        Row((masters[at] + 4 * start, x[at] + itemsize * start, piece.data_ptr()), len(piece))
        for piece, (at, start) in zip(pieces, places, strict=True)
    ]


def _rows(x_KMN: Tensor, *operands: Sequence[int]) -> list[Row]:
    elements = x_KMN.shape[1] * x_KMN.shape[2]
    return [Row(addresses, elements) for addresses in zip(*operands, strict=True)]
