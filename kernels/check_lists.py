"""Check operands that are lists of tensors, for operations over many tensors at once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from zslurm.kernels.checks import short

Lists = Mapping[str, Sequence[Tensor]]


def same_shapes(operation: str, lists: Lists) -> None:
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


def one_device(operation: str, lists: Lists) -> None:
    """Raise ValueError unless all tensors are on one device."""
    devices = {tensor.device: f"{name}[{index}]" for name, index, tensor in _each(lists)}
    if len(devices) > 1:
        where = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(f"{operation}: all operands must be on one device, not {where}")


def one_dtype(operation: str, dtypes: Collection[torch.dtype], lists: Lists) -> None:
    """Raise ValueError unless all tensors have one format, of these."""
    names_by_dtype = {tensor.dtype: f"{name}[{index}]" for name, index, tensor in _each(lists)}
    if len(names_by_dtype) > 1 or not names_by_dtype.keys() <= set(dtypes):
        what = ", ".join(f"{name} is {short(dtype)}" for dtype, name in names_by_dtype.items())
        allowed = " or ".join(short(dtype) for dtype in dtypes)
        raise ValueError(f"{operation}: {' and '.join(lists)} must all be {allowed}, but {what}")


def disjoint(operation: str, written: Lists, read: Lists) -> None:
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


def _each(lists: Lists) -> Iterator[tuple[str, int, Tensor]]:
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
