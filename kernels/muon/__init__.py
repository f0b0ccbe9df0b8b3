"""Run Muon's two passes over matrices around the Newton-Schulz steps: matrices of one shape, from several tensors.

    momentum    the momentum, what is orthogonalised, and the norm that this is divided by
    update      decay and step of the masters, and the weights rounded from them

reference.py defines both. by_torch.py runs them by torch's multi-tensor functions, which serve every device and
are what a CPU takes; hip.py in one pass each. With bf16 products `momentum` moves 14 bytes an element, `update`
10, or 12 with weights. On several ranks these go to the pieces that are sent to other ranks (docs/kernels.md). hip
and the reference are equal bit by bit; torch's functions round a product and a sum at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zslurm.kernels import checks
from zslurm.kernels.dispatch import Implementation, Operation, Sizes, anywhere, everything, on_gpus
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
    _disjoint(name, {"momenta": momenta, "x_KMN": [x_KMN]}, {"gradients": gradients})


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
    _same_shapes(name, {"masters": masters} | out)
    if pieces is not None:
        if weights is not None:
            raise ValueError(f"{name}: weights and pieces were given: give one of them")
        _check_pieces(name, pieces, x_KMN)
        out = {"pieces": pieces}
    _one_device(name, {"x_KMN": [x_KMN]} | out)
    _disjoint(name, {"masters": masters} | out, {"x_KMN": [x_KMN]})


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


def _check_matrices(name: str, lists: _Lists, x_KMN: Tensor) -> None:
    """Raise ValueError unless each list has the matrices of x, in fp32 or fp64."""
    checks.shape(name, "x_KMN", x_KMN, (None, None, None), "KMN")
    checks.dtype_among(name, _PRODUCTS, x_KMN=x_KMN)
    _same_shapes(name, lists)
    _one_device(name, {**lists, "x_KMN": [x_KMN]})
    _one_dtype(name, _MASTERS, lists)
    for what, tensors in lists.items():
        shapes = [tuple(tensor.shape) for tensor in tensors]
        same = all(len(shape) == 3 and shape[1:] == x_KMN.shape[1:] for shape in shapes)
        if not same or sum(shape[0] for shape in shapes) != x_KMN.shape[0]:
            raise ValueError(f"{name}: {what} have the shapes {shapes}, but x_KMN has {tuple(x_KMN.shape)}")


_Lists = Mapping[str, Sequence[Tensor]]


def _same_shapes(operation: str, lists: _Lists) -> None:
    """Raise ValueError unless all lists are as long as the first and their tensors have the same shapes."""
    (first, tensors), *others = lists.items()
    expected_shapes = [tuple(tensor.shape) for tensor in tensors]
    for name, tensors in others:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if len(shapes) != len(expected_shapes):
            raise ValueError(f"{operation}: {len(shapes)} {name} were given for {len(expected_shapes)} {first}")
        for index, (shape, expected) in enumerate(zip(shapes, expected_shapes, strict=True)):
            if shape != expected:
                raise ValueError(
                    f"{operation}: {name}[{index}] has the shape {list(shape)}, {first}[{index}] has "
                    f"{list(expected)}"
                )


def _one_device(operation: str, lists: _Lists) -> None:
    """Raise ValueError unless all tensors are on one device."""
    devices = {tensor.device: f"{name}[{index}]" for name, index, tensor in _each(lists)}
    if len(devices) > 1:
        where = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(f"{operation}: all operands must be on one device, not {where}")


def _one_dtype(operation: str, dtypes: Collection[torch.dtype], lists: _Lists) -> None:
    """Raise ValueError unless all tensors have one format, of these."""
    names_by_dtype = {tensor.dtype: f"{name}[{index}]" for name, index, tensor in _each(lists)}
    if len(names_by_dtype) > 1 or not names_by_dtype.keys() <= set(dtypes):
        what = ", ".join(f"{name} is {checks.short(dtype)}" for dtype, name in names_by_dtype.items())
        allowed = " or ".join(checks.short(dtype) for dtype in dtypes)
        raise ValueError(f"{operation}: {' and '.join(lists)} must all be {allowed}, but {what}")


def _disjoint(operation: str, written: _Lists, read: _Lists) -> None:
    """Raise ValueError if an element that is written is also written or read through another operand.

    A tensor of three dimensions is taken matrix by matrix: other matrices may be in the gaps between them.
    """
    spans = []
    for lists, writes in ((written, True), (read, False)):
        for name, index, tensor in _each(lists):
            if writes and _expanded(tensor):
                raise ValueError(f"{operation}: {name}[{index}] is expanded: its elements share memory")
            spans += [(*span, writes, f"{name}[{index}]") for span in _spans(tensor)]
    spans.sort()
    any_stop, any_name, written_stop, written_name = 0, "", 0, ""
    for start, stop, writes, name in spans:
        if start < written_stop or (writes and start < any_stop):
            other_name = written_name if start < written_stop else any_name
            raise ValueError(f"{operation}: {name} shares memory with {other_name}: give separate tensors")
        if stop > any_stop:
            any_stop, any_name = stop, name
        if writes and stop > written_stop:
            written_stop, written_name = stop, name


def _expanded(tensor: Tensor) -> bool:
    return any(not step and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _each(lists: _Lists) -> Iterator[tuple[str, int, Tensor]]:
    for name, tensors in lists.items():
        for index, tensor in enumerate(tensors):
            yield name, index, tensor


def _spans(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """Yield the addresses of the first byte and the one behind the last, of each matrix if there are gaps."""
    if not tensor.numel():
        return
    size, start = tensor.element_size(), tensor.data_ptr()
    if tensor.dim() < 3 or tensor.is_contiguous():
        count, step, shape, strides = 1, 0, tensor.shape, tensor.stride()
    else:
        count, step, shape, strides = tensor.shape[0], tensor.stride(0), tensor.shape[1:], tensor.stride()[1:]
    reach = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    for index in range(count):
        first = start + index * step * size
        yield first, first + reach * size


def _sizes(*args: Any, **_: Any) -> Sizes:
    x_KMN: Tensor = args[-1]
    return {"matrices": len(x_KMN), "elements": x_KMN.numel(), "dtype": checks.short(x_KMN.dtype)}


def _pass(name: str, check: Callable[..., None], lacks_in_hip: Callable[..., str | None]) -> Operation:
    """Return a pass as an operation: a function of one name in three modules, whose last argument is x."""
    return Operation(
        name=f"muon.{name}",
        reference=getattr(reference, name),
        candidates=[
            (on_gpus, Implementation("hip", getattr(hip, name), lacks_in_hip)),
            (anywhere, Implementation("torch", getattr(by_torch, name), everything)),
        ],
        check=check,
        device=lambda *args, **_: args[-1].device,
        sizes=_sizes,
    )


momentum = _pass("momentum", _check_momentum, hip.supports_momentum)
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

update = _pass("update", _check_update, hip.supports_update)
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
