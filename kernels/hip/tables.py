"""Fill the tables of multi_tensor.h: the addresses of many tensors as arguments of as few launches as it takes.

A table has room for some eighty to a hundred and twenty tensors, and counts a tensor's elements in 32 bits. More
tensors take more launches; a longer tensor becomes several rows, cut at whole chunks, so that sums over chunks
stay what they are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from ctypes import c_uint32, c_uint64
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

CHUNK = 256 * 8 * 4
"""Elements of one block's work; multi_tensor.h has the same."""

LONGEST = 2**30
"""Elements of one row, a multiple of CHUNK."""

MOST_BLOCKS = 2**23
"""Blocks of one launch: HIP counts its threads in 32 bits."""

_TABLE_BYTES = 3968


class Row(NamedTuple):
    """One tensor or a piece of it: the address of each operand, 0 for one that is absent, and their elements."""

    addresses: tuple[int, ...]
    elements: int


@dataclass(frozen=True)
class Launch:
    """One launch: its table, a ctypes value, and how many blocks it has."""

    table: Any
    blocks: int


def chunks_of(elements: int) -> int:
    """Return how many chunks a tensor has."""
    return -(-elements // CHUNK)


def launches(rows: Sequence[Row], itemsizes: Sequence[int]) -> Iterator[Launch]:
    """Return the launches that work on all rows, in their order.

    Args:
        rows: tensors with any number of elements; those without any take no block.
        itemsizes: bytes of one element of each operand.
    """
    room = capacity(len(itemsizes))
    pieces = [piece for row in rows for piece in _pieces(row, itemsizes)]
    start = 0
    while start < len(pieces):
        stop, blocks = start, 0
        while stop < len(pieces) and stop - start < room:
            more = chunks_of(pieces[stop].elements)
            if blocks and blocks + more > MOST_BLOCKS:
                break
            blocks += more
            stop += 1
        yield Launch(_table(pieces[start:stop], len(itemsizes)), blocks)
        start = stop


def capacity(operands: int) -> int:
    """Return how many rows a table for so many operands has."""
    return _TABLE_BYTES // (8 * operands + 8)


def matrices(tensor: Tensor) -> list[int]:
    """Return the address of each matrix of [K, M, N], without making K tensors."""
    start, step = tensor.data_ptr(), tensor.stride(0) * tensor.element_size()
    return [start + index * step for index in range(tensor.shape[0])]


def _pieces(row: Row, itemsizes: Sequence[int]) -> Iterator[Row]:
    for start in range(0, row.elements, LONGEST):
        addresses = tuple(
            address + start * itemsize if address else 0
            for address, itemsize in zip(row.addresses, itemsizes, strict=True)
        )
        yield Row(addresses, min(LONGEST, row.elements - start))


def _table(rows: Sequence[Row], operands: int) -> Any:
    table = _table_type(operands)()
    for operand in range(operands):
        table.address[operand][: len(rows)] = [row.addresses[operand] for row in rows]
    blocks = 0
    for index, row in enumerate(rows):
        table.elements[index], table.first_block[index] = row.elements, blocks
        blocks += chunks_of(row.elements)
    table.tensors = len(rows)
    return table


@cache
def _table_type(operands: int) -> type[ctypes.Structure]:
    rows = capacity(operands)

    class Table(ctypes.Structure):
        _fields_ = (
            ("address", c_uint64 * rows * operands),
            ("elements", c_uint32 * rows),
            ("first_block", c_uint32 * rows),
            ("tensors", c_uint32),
        )

    return Table
