"""Tables of tensors: as many launches as it takes, and no element twice or left out."""

from __future__ import annotations

import mmap
from ctypes import c_float
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from zslurm.kernels.hip.driver import HostLibrary, kernels
from zslurm.kernels.hip.tables import (
    CHUNK,
    LONGEST,
    MOST_BLOCKS,
    Launch,
    Row,
    capacity,
    chunks_of,
    launches,
    matrices,
)

NORESERVE = 0x4000
"""Linux's MAP_NORESERVE, which Python's mmap does not name."""


def rows_of(launch: Launch, operands: int) -> list[Row]:
    table = launch.table
    return [
        Row(tuple(table.address[operand][index] for operand in range(operands)), table.elements[index])
        for index in range(table.tensors)
    ]


@pytest.mark.parametrize("count", [0, 1, capacity(2) - 1, capacity(2), capacity(2) + 1, 5 * capacity(2)])
def test_every_row_is_in_one_launch(count: int) -> None:
    rows = [Row((4096 * index, 8192 * index + 16), 1 + index * 100) for index in range(count)]
    made = list(launches(rows, (4, 2)))
    assert [row for launch in made for row in rows_of(launch, 2)] == rows
    assert len(made) == -(-count // capacity(2))
    for launch in made:
        blocks = [chunks_of(row.elements) for row in rows_of(launch, 2)]
        assert launch.blocks == sum(blocks)
        assert [launch.table.first_block[index] for index in range(len(blocks))] == [
            sum(blocks[:index]) for index in range(len(blocks))
        ]


def test_rows_without_elements_take_no_place() -> None:
    made = list(launches([Row((16,), 0), Row((32,), 5), Row((48,), 0)], (4,)))
    assert [rows_of(launch, 1) for launch in made] == [[Row((32,), 5)]]
    assert list(launches([Row((16,), 0)], (4,))) == []


def test_long_tensors_are_cut_at_whole_chunks() -> None:
    """Into rows whose elements fit into 32 bits, and launches whose threads do."""
    assert LONGEST % CHUNK == 0
    elements = 100 * LONGEST + 12_345
    made = list(launches([Row((1 << 40, 0, 1 << 44), elements)], (4, 4, 2)))
    rows = [row for launch in made for row in rows_of(launch, 3)]
    assert sum(row.elements for row in rows) == elements
    assert all(row.elements % CHUNK == 0 for row in rows[:-1])
    for before, after in pairwise(rows):
        assert after.addresses[0] - before.addresses[0] == 4 * before.elements
        assert after.addresses[1] == 0, "an operand that is absent stays so"
        assert after.addresses[2] - before.addresses[2] == 2 * before.elements
    assert len(made) > 1
    assert all(launch.blocks <= MOST_BLOCKS for launch in made)


def test_a_huge_tensor_is_updated_at_its_ends_and_at_the_cut() -> None:
    """The kernel itself, on sampled blocks of 2^30 + 20,000 elements, of which only those take memory."""
    elements = LONGEST + 20_000
    master, x = _sparse(elements, torch.float32), _sparse(elements, torch.bfloat16)
    library = kernels("muon", torch.device("cpu"))
    assert isinstance(library, HostLibrary)
    (launch,) = launches([Row((master.data_ptr(), x.data_ptr(), 0), elements)], (4, 2, 2))
    assert launch.table.tensors == 2
    sampled = (0, 1, chunks_of(LONGEST) - 1, chunks_of(LONGEST), launch.blocks - 1)
    places = [slice(block * CHUNK, min((block + 1) * CHUNK, elements)) for block in sampled]
    for block, place in zip(sampled, places, strict=True):
        master[place], x[place] = 1 + block, 2
        library.launch("muon_update_bf16", 1, (launch.table, c_float(0.5), c_float(0.25)), first=block)
    for block, place in zip(sampled, places, strict=True):
        assert bool((master[place] == (1 + block) / 2 - 0.5).all()), block
    assert not master[2 * CHUNK : 3 * CHUNK].any()
    assert not master[places[3].stop : places[4].start].any()


def _sparse(elements: int, dtype: torch.dtype) -> Tensor:
    """Zeros that take memory where they are touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    room = mmap.mmap(-1, elements * dtype.itemsize, flags=flags)
    return torch.frombuffer(room, dtype=dtype)


def test_matrices_of_a_view_with_gaps() -> None:
    batch = torch.zeros(4, 6, 5)[:, :3]
    assert matrices(batch) == [matrix.data_ptr() for matrix in batch]
