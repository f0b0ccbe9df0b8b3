"""Every element has exactly one owner, at any world size."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint_tools import ALIGN, Mismatch, partition


class Row(NamedTuple):
    """A row of someone else's tensor table."""

    name: str
    shape: tuple[int, ...]


shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
tables = st.lists(shapes, max_size=12).map(lambda found: [Row(f"t{i}", s) for i, s in enumerate(found)])


@given(tables, st.integers(1, 33))
def test_extents_cover_every_element_exactly_once(table: list[Row], world_size: int) -> None:
    layout = partition(table, world_size)
    owned: dict[str, list[tuple[int, int]]] = {row.name: [] for row in table}
    for rank in range(world_size):
        for extent in layout.extents(rank):
            owned[extent.tensor].append((extent.start, extent.stop))
    for row in table:
        end = 0
        for start, stop in sorted(owned[row.name]):
            assert start == end < stop
            end = stop
        assert end == math.prod(row.shape)


@given(tables, st.integers(1, 33))
def test_an_extent_lies_where_the_flat_layout_says(table: list[Row], world_size: int) -> None:
    layout = partition(table, world_size)
    offsets = {placement.name: placement.offset for placement in layout.placements}
    assert layout.length == layout.chunk * world_size
    assert layout.chunk % ALIGN == 0
    assert all(offset % ALIGN == 0 for offset in offsets.values())
    for rank in range(world_size):
        end = 0
        for extent in layout.extents(rank):
            assert extent.offset_in_chunk >= end
            assert rank * layout.chunk + extent.offset_in_chunk == offsets[extent.tensor] + extent.start
            assert extent.in_chunk == slice(extent.offset_in_chunk, extent.offset_in_chunk + extent.numel)
            end = extent.in_chunk.stop
        assert end <= layout.chunk


@given(tables, st.integers(1, 33))
def test_the_same_table_gives_the_same_partition(table: list[Row], world_size: int) -> None:
    assert partition(iter(table), world_size) == partition(table, world_size)


def test_more_ranks_than_elements_leave_ranks_empty() -> None:
    layout = partition([Row("scale", (3,))], 4)
    assert [len(layout.extents(rank)) for rank in range(4)] == [1, 0, 0, 0]


def test_one_giant_tensor_is_shared_by_all() -> None:
    layout = partition([Row("experts", (1 << 33,))], 1024)
    assert all([e.numel for e in layout.extents(rank)] == [(1 << 33) // 1024] for rank in range(1024))


def test_no_tensors_are_no_extents() -> None:
    assert partition([], 3).length == 0
    assert partition([], 3).extents(2) == ()


@pytest.mark.parametrize(
    ("table", "world_size", "message"),
    [
        ([Row("a", (1,)), Row("a", (2,))], 1, "'a' comes twice"),
        ([Row("a", (2, -1))], 1, "negative dimension"),
        ([], 0, "world_size must be at least 1"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(table: list[Row], world_size: int, message: str) -> None:
    with pytest.raises(Mismatch, match=message):
        partition(table, world_size)


def test_there_is_no_rank_beyond_the_world() -> None:
    with pytest.raises(Mismatch, match=r"rank must be in \[0, 2\)"):
        partition([Row("a", (64,))], 2).extents(2)
