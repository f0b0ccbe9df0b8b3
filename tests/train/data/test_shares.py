"""A step's sequences are divided without gap or overlap, evenly, whatever the number of ranks."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.train.data.numbered import phase
from zslurm.train.data.shares import SharePiece, Shares, share_of
from zslurm.train.schedule import Plan


@st.composite
def divisions(draw: st.DrawFn, most: int = 40) -> Shares:
    """Any division."""
    micro_batch, ranks = draw(st.integers(1, 8)), draw(st.integers(1, most))
    return Shares(micro_batch * draw(st.integers(0, 24)), micro_batch, ranks)


def pieces(shares: Shares) -> Iterator[SharePiece]:
    return itertools.chain.from_iterable(shares.of(rank) for rank in range(shares.ranks))


@given(divisions())
def test_every_sequence_is_in_exactly_one_share(shares: Shares) -> None:
    whole = {(j, at) for j in range(shares.sequences // shares.micro_batch) for at in range(shares.micro_batch)}
    found = Counter((number, at) for number, first, last in pieces(shares) for at in range(first, last))
    assert found == Counter(whole)
    assert all(0 <= first < last <= shares.micro_batch for _, first, last in pieces(shares))


@given(divisions())
def test_a_share_is_its_size_in_whole_microbatches_and_less_than_one_more(shares: Shares) -> None:
    for rank, size in enumerate(shares.sizes):
        sizes = [piece.sequences for piece in shares.of(rank)]
        assert sum(sizes) == size
        whole, edge = divmod(size, shares.micro_batch)
        assert sizes[:whole] == [shares.micro_batch] * whole
        assert sum(sizes[whole:]) == edge
        assert len(sizes) <= whole + 2
        assert list(shares.of(rank)) == sorted(shares.of(rank))


@given(st.integers(1, 8), st.integers(0, 24), st.integers(1, 40))
def test_equal_shares_are_as_small_as_can_be(micro_batch: int, microbatches: int, ranks: int) -> None:
    shares = Shares(micro_batch * microbatches, micro_batch, ranks)
    assert max(shares.sizes) == -(-shares.sequences // ranks)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 30))
def test_where_ranks_divide_the_microbatches_each_computes_whole_ones_in_turn(
    micro_batch: int, each: int, ranks: int
) -> None:
    """The division is the former one, so that earlier runs resume bit for bit."""
    shares = Shares(micro_batch * each * ranks, micro_batch, ranks)
    for rank in range(ranks):
        assert shares.of(rank) == tuple(SharePiece(j, 0, micro_batch) for j in range(rank, each * ranks, ranks))


def test_a_lost_node_of_128_costs_a_quarter_of_a_step() -> None:
    whole, smaller = Shares(4096, 4, 1024), Shares(4096, 4, 1016)
    assert set(whole.sizes) == {4}
    assert Counter(smaller.sizes) == {4: 984, 5: 32}
    assert smaller.of(3) == (SharePiece(3, 0, 4), SharePiece(1016, 3, 4))
    assert smaller.of(4) == (SharePiece(4, 0, 4),)
    assert smaller.of(127) == (SharePiece(127, 0, 4), SharePiece(1017, 0, 1)), (
        "those with more are in different nodes"
    )


@pytest.mark.parametrize(
    ("sequences", "micro_batch", "ranks", "sizes"),
    [
        (16, 4, 3, (6, 5, 5)),
        (16, 4, 5, (4, 4, 4, 4, 0)),  # no division is faster, and whole microbatches are
        (12, 2, 4, (3, 3, 3, 3)),
        (12, 4, 5, (3, 3, 2, 2, 2)),  # two ranks have sequences of two microbatches: no other way
        (12, 4, 6, (2, 2, 2, 2, 2, 2)),
        (12, 4, 7, (2, 1, 1, 2, 2, 2, 2)),  # each microbatch has its own ranks
        (3, 1, 5, (1, 1, 1, 0, 0)),
    ],
)
def test_small_ones_by_hand(sequences: int, micro_batch: int, ranks: int, sizes: tuple[int, ...]) -> None:
    assert Shares(sequences, micro_batch, ranks).sizes == sizes


def test_a_context_group_has_one_share() -> None:
    alone, shared = (Plan((phase(8, 6, context_parallel=c),)).at(0) for c in (1, 2))
    assert [share_of(shared, rank, 4) for rank in range(4)] == [
        share_of(alone, group, 2) for group in (0, 0, 1, 1)
    ]
    with pytest.raises(ValueError, match="context_parallel 2 does not divide 3 ranks"):
        share_of(shared, 0, 3)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((5, 2, 1), "5 sequences in microbatches of 2 for 1 rank"),
        ((4, 2, 0), "for 0 ranks"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[int, int, int], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Shares(*arguments)


def test_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 2 is not in a world of 2"):
        Shares(4, 1, 2).of(2)
