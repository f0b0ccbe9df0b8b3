"""Run Muon's passes by torch's multi-tensor functions: any device, format and strides."""

from __future__ import annotations

import torch
from torch import Tensor

from zslurm.kernels.muon.reference import parts_of, places_of


def momentum(
    momenta: list[Tensor], gradients: list[Tensor], x_KMN: Tensor, *, mu: float, nesterov: bool
) -> Tensor:
    """Run `muon.momentum`; the norms are torch's, as torch.optim.Muon takes them."""
    if not x_KMN.numel():
        return x_KMN.new_zeros(len(x_KMN))
    torch._foreach_lerp_(momenta, gradients, 1 - mu)
    ahead = torch._foreach_lerp(gradients, momenta, mu) if nesterov else momenta
    torch._foreach_copy_(parts_of(x_KMN, momenta), ahead)
    # A norm per matrix and not one call over two dimensions, which adds up in another order than torch's Muon.
    return torch.stack(torch._foreach_norm(x_KMN.unbind()))


def update(
    masters: list[Tensor],
    x_KMN: Tensor,
    *,
    decay: float,
    rate: float,
    weights: list[Tensor] | None = None,
    pieces: list[Tensor] | None = None,
) -> None:
    """Run `muon.update`; weights are rounded in a second pass."""
    if not x_KMN.numel():
        return
    torch._foreach_mul_(masters, decay)
    torch._foreach_add_(masters, parts_of(x_KMN, masters), alpha=-rate)
    if weights is not None:
        torch._foreach_copy_(weights, masters)
    if pieces:
        matrices = [matrix_MN.flatten() for master_KMN in masters for matrix_MN in master_KMN]
        places = places_of(pieces, x_KMN.shape[1] * x_KMN.shape[2])
        destinations = zip(pieces, places, strict=True)
        torch._foreach_copy_(
            pieces, [matrices[at][start : start + len(piece)] for piece, (at, start) in destinations]
        )
