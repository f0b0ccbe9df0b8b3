"""Run Muon's two passes over matrices around the Newton-Schulz steps: matrices of one shape, from several tensors.

    momentum    the momentum, what is orthogonalised, and the norm that this is divided by
    update      decay and step of the masters, and the weights rounded from them

reference.py defines both. by_torch.py runs them by torch's multi-tensor functions, which serve every device and
are what a CPU takes; hip.py in one pass each. With bf16 products `momentum` moves 14 bytes an element, `update`
10, or 12 with weights. On several ranks these go to the pieces that are sent to other ranks (docs/kernels.md). hip
and the reference are equal bit by bit; torch's functions round a product and a sum at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zslurm.kernels import check_lists, checks
from zslurm.kernels.dispatch import Sizes
from zslurm.kernels.multi_tensor import operation
from zslurm.kernels.muon import by_torch, hip, reference

_MASTERS = (torch.float32, torch.float64)
_PRODUCTS = (torch.bfloat16, torch.float32, torch.float64)


def _check_momentum(momenta: list[Tensor], gradients: list[Tensor], x_KMN: Tensor, *, mu: float, **_: Any) -> None:
    name = "muon.momentum"
    if not 0 <= mu < 1:
        raise ValueError(f"{name}: mu is {mu}, but must be at least 0 and less than 1")
    _check_matrices(name, {"momenta": momenta, "gradients": gradients}, x_KMN)
    if not x_KMN.is_contiguous():
        raise ValueError(f"{name}: x_KMN must be contiguous")
    check_lists.disjoint(name, {"momenta": momenta, "x_KMN": [x_KMN]}, {"gradients": gradients})


def _check_update(
    masters: list[Tensor],
    x_KMN: Tensor,
    *,
    weights: list[Tensor] | None = None,
    pieces: list[Tensor] | None = None,
    **_: Any,
) -> None:
    name = "muon.update"
    _check_matrices(name, {"masters": masters}, x_KMN)
    out = {"weights": weights} if weights is not None else {}
    check_lists.same_shapes(name, {"masters": masters} | out)
    if pieces is not None:
        if weights is not None:
            raise ValueError(f"{name}: weights and pieces were given: give one of them")
        _check_pieces(name, pieces, x_KMN)
        out = {"pieces": pieces}
    check_lists.one_device(name, {"x_KMN": [x_KMN]} | out)
    check_lists.disjoint(name, {"masters": masters} | out, {"x_KMN": [x_KMN]})


def _check_pieces(name: str, pieces: list[Tensor], x_KMN: Tensor) -> None:
    """Raise ValueError unless the pieces have each matrix's elements, and none those of two."""
    for index, piece in enumerate(pieces):
        if piece.dim() != 1 or not piece.is_contiguous() or not len(piece):
            raise ValueError(f"{name}: pieces[{index}] must be a contiguous row of elements, not {[*piece.shape]}")
    total = sum(len(piece) for piece in pieces)
    if total != x_KMN.numel():
        raise ValueError(f"{name}: the pieces have {total} elements, but x_KMN has {x_KMN.numel()}")
    elements = x_KMN.shape[1] * x_KMN.shape[2]
    for index, (_, start) in enumerate(reference.places_of(pieces, elements)):
        if start + len(pieces[index]) > elements:
            raise ValueError(f"{name}: pieces[{index}] has elements of two matrices")


def _check_matrices(name: str, lists: check_lists.Lists, x_KMN: Tensor) -> None:
    """Raise ValueError unless each list has the matrices of x, in fp32 or fp64."""
    checks.shape(name, "x_KMN", x_KMN, (None, None, None), "KMN")
    checks.dtype_among(name, _PRODUCTS, x_KMN=x_KMN)
    check_lists.same_shapes(name, lists)
    check_lists.one_device(name, {**lists, "x_KMN": [x_KMN]})
    check_lists.one_dtype(name, _MASTERS, lists)
    for what, tensors in lists.items():
        shapes = [tuple(tensor.shape) for tensor in tensors]
        same = all(len(shape) == 3 and shape[1:] == x_KMN.shape[1:] for shape in shapes)
        if not same or sum(shape[0] for shape in shapes) != x_KMN.shape[0]:
            raise ValueError(f"{name}: {what} have the shapes {shapes}, but x_KMN has {tuple(x_KMN.shape)}")


def _x(*args: Any, **_: Any) -> Tensor:
    x_KMN: Tensor = args[-1]
    return x_KMN


def _sizes(*args: Any, **_: Any) -> Sizes:
    return {"matrices": len(args[-1]), "elements": args[-1].numel()}


_modules = (reference, hip, by_torch)
momentum = operation("muon.momentum", *_modules, check=_check_momentum, tensor=_x, sizes=_sizes)
"""Update the momenta, and write what is to be orthogonalised into x.

Args:
    momenta: [k, M, N] each, of K matrices in all; fp32 or fp64, with any strides.
    gradients: of the same shapes and format; left alone.
    x_KMN: contiguous, in the format of the products.
    mu: decay of the momentum.
    nesterov: whether x is the momentum as the next step would have it.

Returns:
    [K]: the Frobenius norms of x's matrices, in x's format.
"""

update = operation("muon.update", *_modules, check=_check_update, tensor=_x, sizes=_sizes)
"""Multiply the masters by `decay`, take a step of `rate` against x, and round the weights from them.

Args:
    masters: [k, M, N] each, of K matrices in all; fp32 or fp64, with any strides.
    x_KMN: the orthogonalised matrices, in any floating-point format.
    decay: factor of the masters.
    rate: factor of x.
    weights: of the masters' shapes, in any format; or None.
    pieces: in place of `weights`, the same in rows of elements that may be anywhere: first those of the first
        matrix, from its first element on, cut anywhere, then those of the next one.
"""

OPERATIONS = (momentum, update)
