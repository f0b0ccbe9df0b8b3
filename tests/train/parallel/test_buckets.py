"""The plan of reductions and exchanges: every element of every matrix goes from one holder to its owner."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.train.sharded import TABLE
from zslurm.checkpoint_tools import ALIGN, partition
from zslurm.train.config import ModelConfig, OptimConfig
from zslurm.train.parallel.buckets import MatrixSpace
from zslurm.train.shapes import TensorInfo, TensorKind, owned_table

rows = st.tuples(st.integers(0, 4), st.integers(1, 12), st.integers(1, 12))
tables = st.lists(rows, max_size=6).map(
    lambda found: tuple(
        TensorInfo(f"t{i}", (max(whole, 1), m, n), TensorKind.EXPERTS, whole=whole)
        for i, (whole, m, n) in enumerate(found)
    )
)


@settings(max_examples=60, deadline=None)
@given(tables, st.integers(1, 9), st.integers(1, 4000))
def test_holders_and_owners_agree_on_every_piece(
    table: tuple[TensorInfo, ...], ranks: int, bucket_elements: int
) -> None:
    space = MatrixSpace(table, partition(table, ranks), bucket_elements)
    held = [space.held_by(rank) for rank in range(ranks)]
    owned = [space.owned_by(rank) for rank in range(ranks)]
    for sender in range(ranks):
        for receiver in range(ranks):
            sent = [piece for piece in held[sender] if piece.owner == receiver]
            assert sent == [piece for piece in owned[receiver] if piece.holder == sender], "and in one order"
        assert [piece.owner for piece in held[sender]] == sorted(piece.owner for piece in held[sender])
        assert [piece.holder for piece in owned[sender]] == sorted(piece.holder for piece in owned[sender])
    assert sum(piece.numel for pieces in held for piece in pieces) == sum(r.numel for r in table if r.whole)


@settings(max_examples=60, deadline=None)
@given(tables, st.integers(1, 9), st.integers(1, 4000))
def test_a_piece_lies_where_the_buckets_and_the_partition_say(
    table: tuple[TensorInfo, ...], ranks: int, bucket_elements: int
) -> None:
    layout = partition(table, ranks)
    space = MatrixSpace(table, layout, bucket_elements)
    starts = {place.name: place.offset for place in space.placements}
    for rank in range(ranks):
        shares = [bucket.held(rank) for bucket in space.buckets]
        positions = [position for share in shares for position in range(share.start, share.stop)]
        assert len(positions) == space.share
        expected = {
            matrix.offset + i: starts[matrix.tensor] + matrix.index * matrix.numel + i
            for matrix in layout.matrices[rank]
            for i in range(matrix.numel)
        }
        found = {}
        for piece in space.owned_by(rank):
            found |= {piece.offset + i: piece.start + i for i in range(piece.numel)}
        assert found == expected
        for piece in space.held_by(rank):
            assert positions[piece.in_share : piece.in_share + piece.numel] == list(
                range(piece.start, piece.start + piece.numel)
            )


def test_buckets_tile_the_space_and_are_equal_but_for_the_last() -> None:
    ranks = 3
    space = MatrixSpace(TABLE, partition(TABLE, ranks), 200)
    lengths = [bucket.stop - bucket.start for bucket in space.buckets]
    assert space.buckets[0].start == 0
    assert [bucket.start for bucket in space.buckets[1:]] == [bucket.stop for bucket in space.buckets[:-1]]
    assert space.buckets[-1].stop == space.length
    assert set(lengths[:-1]) == {192}, "200, rounded down to a multiple of 3 x 32"
    assert all(length % (ranks * ALIGN) == 0 for length in lengths)


def test_what_is_used_last_comes_first() -> None:
    """That is the order in which backward finishes gradients; each tensor knows its buckets."""
    space = MatrixSpace(TABLE, partition(TABLE, 2), 64)
    assert [place.name for place in space.placements] == ["second", "halves", "experts", "matrix"]
    for place in space.placements:
        inside = [
            number
            for number, bucket in enumerate(space.buckets)
            if bucket.start < place.offset + place.numel and place.offset < bucket.stop
        ]
        assert list(space.buckets_of(place)) == inside


@pytest.mark.parametrize("ranks", [8, 1024])
def test_zaya1_base_is_planned_in_pieces_that_are_not_many(ranks: int) -> None:
    """In buckets of 64 MiB a rank sends about one message per bucket and ends where it should."""
    table = owned_table(ModelConfig(), OptimConfig())
    space = MatrixSpace(table, partition(table, ranks), (64 << 20) // 4)
    assert len(space.buckets) == 495
    held, owned = space.held_by(ranks - 1), space.owned_by(ranks - 1)
    assert len(held) <= 2 * len(space.buckets)
    assert len(owned) <= 2000
    padding = 0.001 * space.share
    assert sum(piece.numel for piece in held) == pytest.approx(space.share, abs=padding + ranks * ALIGN)
