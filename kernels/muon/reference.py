"""Define Muon's passes: each operation of torch is one rounding, so every implementation can repeat the bits.

With w = 1 - mu, in the masters' format:

    M <- M + (G - M) w
    U  = M - (M - G) w       Nesterov's look ahead, which is (1 - mu) G + mu M, or M without it
    x  = U in the format of the products
    W <- W decay - x rate    and the weights are W in theirs

The norm of a matrix of x is the root of a sum of squares in fp32 (fp64 for fp64), in an order that is the same on
every device: the elements are taken in chunks of 8,192; in a chunk, 256 lanes take 8 neighbours each, four times
over, and each adds its 32 squares one after the other; then the upper half of the lanes is added to the lower
half, until one is left. The sums of the chunks are added up in the same way: 256 lanes take every 256th one after
the other. Equal bit by bit means of this sum too; torch's own norm adds in another order, and differs by rounding.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

LANES, WIDTH, ROWS = 256, 8, 4


def momentum(
    momenta: list[Tensor], gradients: list[Tensor], x_KMN: Tensor, *, mu: float, nesterov: bool
) -> Tensor:
    """Run `muon.momentum`."""
    weight = 1 - mu
    parts = parts_of(x_KMN, momenta)
    for momentum_KMN, gradient_KMN, part_KMN in zip(momenta, gradients, parts, strict=True):
        momentum_KMN.add_((gradient_KMN - momentum_KMN) * weight)
        ahead_KMN = momentum_KMN - (momentum_KMN - gradient_KMN) * weight if nesterov else momentum_KMN
        part_KMN.copy_(ahead_KMN)
    return norms(x_KMN)


def update(
    masters: list[Tensor],
    x_KMN: Tensor,
    *,
    decay: float,
    rate: float,
    weights: list[Tensor] | None = None,
    pieces: list[Tensor] | None = None,
) -> None:
    """Run `muon.update`."""
    for master_KMN, part_KMN in zip(masters, parts_of(x_KMN, masters), strict=True):
        master_KMN.copy_(master_KMN * decay - part_KMN.to(master_KMN.dtype) * rate)
    for weight_KMN, master_KMN in zip(weights or (), masters, strict=False):
        weight_KMN.copy_(master_KMN)
    matrices = [matrix_MN.flatten() for master_KMN in masters for matrix_MN in master_KMN]
    places = places_of(pieces or [], x_KMN.shape[1] * x_KMN.shape[2])
    for piece, (matrix, start) in zip(pieces or (), places, strict=True):
        piece.copy_(matrices[matrix][start : start + len(piece)])


def places_of(pieces: list[Tensor], elements: int) -> list[tuple[int, int]]:
    """Return of each piece the matrix, of so many elements, and the element of it at which the piece begins."""
    ends = accumulate(len(piece) for piece in pieces)
    return [divmod(end - len(piece), elements) for end, piece in zip(ends, pieces, strict=True)]


def parts_of(x_KMN: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Return views of x: the matrices that belong to each of the tensors, in their order."""
    return list(torch.split(x_KMN, [len(tensor) for tensor in tensors]))


def norms(x_KMN: Tensor) -> Tensor:
    """Return the Frobenius norms of K matrices, summed in the order that the module states, in x's format."""
    if not x_KMN.numel():
        return x_KMN.new_zeros(len(x_KMN))
    chunk, count = LANES * WIDTH * ROWS, len(x_KMN)
    x_KE = x_KMN.flatten(1).to(torch.promote_types(x_KMN.dtype, torch.float32))
    squares_KE = _padded(x_KE * x_KE, chunk)
    squares = squares_KE.view(count, squares_KE.shape[1] // chunk, ROWS, LANES, WIDTH)
    lanes_KCL = squares.new_zeros(count, squares.shape[1], LANES)
    for row in range(ROWS):
        for neighbour in range(WIDTH):
            lanes_KCL = lanes_KCL + squares[:, :, row, :, neighbour]
    partials_KP = _padded(_halved(lanes_KCL), LANES).view(count, -1, LANES)
    lanes_KL = partials_KP.new_zeros(count, LANES)
    for partial_KL in partials_KP.unbind(1):
        lanes_KL = lanes_KL + partial_KL
    return _root(_halved(lanes_KL)).to(x_KMN.dtype)


def _halved(lanes: Tensor) -> Tensor:
    """Add halves of the last dimension to halves until it is gone."""
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes.squeeze(-1)


def _padded(values_KE: Tensor, multiple: int) -> Tensor:
    missing = -values_KE.shape[1] % multiple
    return torch.nn.functional.pad(values_KE, (0, missing)) if missing else values_KE.contiguous()


def _root(x: Tensor) -> Tensor:
    """Return the square root, rounded correctly for fp32.

    With MKL, torch's own is off by one unit for every fifth fp32 number. The root in fp64 has more than twice the
    digits, so that rounding it again changes nothing.
    """
    return x.double().sqrt().to(x.dtype) if x.dtype == torch.float32 else x.sqrt()
