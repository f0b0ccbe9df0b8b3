"""Every element has exactly one owner, at any world size, and whole matrices are not cut."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zslurm.checkpoint_tools import ALIGN, Mismatch, partition
from zslurm.checkpoint_tools.format.packing import Size, lower_bound, pack
from zslurm.checkpoint_tools.format.partition import MAX_RANKS


class Row(NamedTuple):
    """A row of someone else's tensor table."""

    name: str
    shape: tuple[int, ...]
    whole: int = 0


flat_rows = st.lists(st.integers(0, 40), max_size=3).map(lambda shape: Row("", tuple(shape)))
whole_rows = st.tuples(st.integers(1, 9), st.integers(0, 12), st.integers(0, 12)).map(lambda s: Row("", s, s[0]))
tables = st.lists(st.one_of(flat_rows, whole_rows), max_size=12).map(
    lambda rows: [row._replace(name=f"t{index}") for index, row in enumerate(rows)]
)
world_sizes = st.integers(1, 33)


@given(tables, world_sizes)
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


@given(tables, world_sizes)
def test_an_extent_lies_where_the_flat_layout_says(table: list[Row], world_size: int) -> None:
    layout = partition(table, world_size)
    offsets = {placement.name: placement.offset for placement in layout.placements}
    assert layout.flat_length == layout.flat_share * world_size
    assert layout.flat_share % ALIGN == 0
    assert all(offset % ALIGN == 0 for offset in offsets.values())
    for rank in range(world_size):
        end = 0
        for extent in layout.extents(rank):
            assert extent.offset_in_chunk >= end
            if extent.tensor in offsets:
                position = rank * layout.flat_share + extent.offset_in_chunk
                assert position == offsets[extent.tensor] + extent.start
                assert extent.in_chunk.stop <= layout.flat_share
            else:
                assert extent.offset_in_chunk >= layout.flat_share
                assert extent.offset_in_chunk % ALIGN == 0
            assert extent.in_chunk == slice(extent.offset_in_chunk, extent.offset_in_chunk + extent.numel)
            end = extent.in_chunk.stop
        assert end <= layout.chunk(rank)
        assert layout.chunk(rank) % ALIGN == 0


@given(tables, world_sizes)
def test_a_whole_matrix_has_one_owner(table: list[Row], world_size: int) -> None:
    layout = partition(table, world_size)
    sizes = {row.name: math.prod(row.shape) // row.whole for row in table if row.whole}
    for rank in range(world_size):
        for extent in layout.extents(rank):
            if extent.tensor in sizes:
                assert extent.numel == sizes[extent.tensor]
                assert extent.start % extent.numel == 0


@given(tables, world_sizes)
def test_batches_are_the_matrices_of_one_shape_at_equal_distances(table: list[Row], world_size: int) -> None:
    layout = partition(table, world_size)
    for rank in range(world_size):
        found = [
            (batch.rows, batch.columns, batch.offset + index * batch.stride)
            for batch in layout.batches(rank)
            for index in range(batch.count)
        ]
        assert found == [(matrix.rows, matrix.columns, matrix.offset) for matrix in layout.matrices[rank]]
        shapes = [(batch.rows, batch.columns) for batch in layout.batches(rank)]
        assert len(set(shapes)) == len(shapes), "one batch per shape"


@given(tables, world_sizes)
def test_the_same_table_gives_the_same_partition(table: list[Row], world_size: int) -> None:
    assert partition(iter(table), world_size) == partition(table, world_size)


@given(tables, world_sizes)
def test_who_owns_a_matrix_does_not_depend_on_the_order_of_the_table(table: list[Row], world_size: int) -> None:
    assert partition(table[::-1], world_size).matrices == partition(table, world_size).matrices


def test_matrices_of_experts_can_be_halved() -> None:
    """[E, 2F, D] as 2E matrices [F, D]: what comes first in memory is the first half of an expert's rows."""
    layout = partition([Row("gate_up", (2, 6, 4), whole=4)], 3)
    extents = sorted((e.start, e.stop) for rank in range(3) for e in layout.extents(rank))
    assert extents == [(0, 12), (12, 24), (24, 36), (36, 48)]
    assert {(m.rows, m.columns) for rank in range(3) for m in layout.matrices[rank]} == {(3, 4)}


def test_more_ranks_than_elements_leave_ranks_empty() -> None:
    layout = partition([Row("scale", (3,))], 4)
    assert [len(layout.extents(rank)) for rank in range(4)] == [1, 0, 0, 0]


def test_more_ranks_than_matrices_leave_ranks_idle() -> None:
    layout = partition([Row("a", (2, 3), 1), Row("b", (2, 5, 4), 2)], 5)
    assert [len(layout.matrices[rank]) for rank in range(5)] == [1, 1, 1, 0, 0]
    assert [layout.chunk(rank) for rank in range(5)] == [32, 32, 32, 0, 0]
    assert layout.balance().idle_ranks == 2


def test_one_giant_tensor_is_shared_by_all() -> None:
    layout = partition([Row("experts", (1 << 33,))], 1024)
    assert all([e.numel for e in layout.extents(rank)] == [(1 << 33) // 1024] for rank in range(1024))


def test_no_tensors_are_no_extents() -> None:
    assert partition([], 3).flat_length == 0
    assert partition([], 3).extents(2) == ()


@pytest.mark.parametrize(
    ("table", "world_size", "message"),
    [
        ([Row("a", (1,)), Row("a", (2,))], 1, "'a' comes twice"),
        ([Row("a", (2, -1))], 1, "negative dimension"),
        ([], 0, "must be between 1 and 1048576, got 0"),
        ([], MAX_RANKS + 1, "must be between 1 and 1048576, got 1048577"),
        ([Row("a", (7,), 1)], 1, "cannot be cut into 1 matrix"),
        ([Row("a", (5, 4), 2)], 1, "cannot be cut into 2 matrices"),
        ([Row("a", (5, 4), -1)], 1, "cannot be cut into -1 matrices"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(table: list[Row], world_size: int, message: str) -> None:
    with pytest.raises(Mismatch, match=message):
        partition(table, world_size)


def test_there_is_no_rank_beyond_the_world() -> None:
    layout = partition([Row("a", (64,))], 2)
    for ask in (layout.extents, layout.chunk, layout.batches):
        with pytest.raises(Mismatch, match=r"rank must be in \[0, 2\)"):
            ask(2)


# ------------------------------------------------------------------------------------------------ even packing


@given(st.lists(st.integers(0, 30), max_size=9), st.integers(1, 4))
def test_no_packing_is_below_the_lower_bound(sizes: list[int], bins: int) -> None:
    """Against the best of all packings, found by trying them."""
    reached = {(0,) * bins}
    for size in sizes:
        reached = {
            tuple(sorted((*loads[:i], loads[i] + size, *loads[i + 1 :]))) for loads in reached for i in range(bins)
        }
    best = min(max(loads) for loads in reached)
    assert lower_bound(sizes, bins) <= best
    assert best <= 2 * max(lower_bound(sizes, bins), 0), "and it is no idle bound: greedy packing is within 2"


def test_the_bound_sees_that_two_sizes_do_not_fit_together() -> None:
    assert lower_bound([2] * 640 + [1] * 640, 768) == 3
    assert lower_bound([5] * 7, 3) == 15
    assert lower_bound([], 3) == 0


def test_memory_is_kept_even_where_cost_alone_would_not() -> None:
    """One costly small thing and many cheap large ones: by cost alone one bin would hold all of the latter."""
    sizes = [Size(1000, 1), *[Size(1, 100)] * 20]
    owners = pack(sizes, 2)
    assert [sum(s.elements for s, o in zip(sizes, owners, strict=True) if o == b) for b in (0, 1)] == [1001, 1000]


def zaya1_base() -> list[Row]:
    """The shapes of ZAYA1-base (arXiv 2511.17127), whole if Muon wants them so."""
    layer = {
        "query": (1024, 2048), "key": (256, 2048), "value_current": (128, 2048), "value_previous": (128, 2048),
        "output": (2048, 1024), "router.down": (256, 2048), "router.first": (256, 256),
        "router.second": (256, 256), "router.output": (17, 256), "gate_up": (16, 4096, 2048),
        "down": (16, 2048, 2048),
    }  # fmt: skip
    return [
        Row(f"layers.{index}.{name}", shape, shape[0] if len(shape) == 3 else 1)
        for index in range(40)
        for name, shape in layer.items()
    ] + [Row("rest", (551_321_424,))]


@pytest.mark.parametrize("world_size", [8, 64, 768, 1024])
def test_zaya1_base_is_packed_within_a_percent_of_what_whole_matrices_allow(world_size: int) -> None:
    balance = partition(zaya1_base(), world_size).balance()
    assert balance.cost <= 1.01 * balance.cost_bound
    assert balance.elements <= 1.01 * balance.elements_bound
    assert balance.idle_ranks == 0


def test_the_bound_for_zaya1_base_is_that_of_its_experts() -> None:
    """At 1,024 ranks one fc1 is 1.055 of the mean cost and 1.036 of the elements; at 768, fc1 + fc2 are 1.187."""
    at_768, at_1024 = (partition(zaya1_base(), ranks).balance() for ranks in (768, 1024))
    assert at_1024.cost_bound / at_1024.cost_mean == pytest.approx(1.055, abs=1e-3)
    assert at_1024.elements_bound / at_1024.elements_mean == pytest.approx(1.036, abs=1e-3)
    assert at_768.cost_bound / at_768.cost_mean == pytest.approx(1.187, abs=1e-3)
