"""Mixtures are exact at every border of a block, and every place of them is found by itself."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zslurm.train.data.mixture import LARGEST_BLOCK, SMALLEST_BLOCK, Mixture

SHARES = st.dictionaries(
    st.sampled_from("code math news web wiki books".split()),
    st.one_of(st.integers(1, 100), st.floats(0.1, 3).map(lambda share: round(share, 3))),
    min_size=1,
)
FIRST_SOURCES = "web web web code web web web code code web web web web web web web".split()


def exact(shares: dict[str, float]) -> dict[str, Fraction]:
    """Shares of 1, as they are written."""
    weights = {name: Fraction(str(share)) for name, share in shares.items()}
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


@settings(deadline=None)
@given(shares=SHARES, block=st.integers(0, 10**9))
def test_counts_are_within_one_of_their_share_at_every_border_of_a_block(
    shares: dict[str, float], block: int
) -> None:
    mixture = Mixture.of(shares, "test")
    sequences = block * mixture.block
    counts = mixture.counts(sequences)
    assert sum(counts.values()) == sequences
    for name, share in exact(shares).items():
        assert abs(counts[name] - sequences * share) < 1


@settings(deadline=None)
@given(shares=SHARES, start=st.integers(0, 10**12), count=st.integers(1, 300))
def test_each_source_goes_on_with_its_next_sequence(shares: dict[str, float], start: int, count: int) -> None:
    mixture = Mixture.of(shares, "test")
    source, before = mixture.at(np.arange(start, start + count))
    counts, ends = mixture.counts(start), mixture.counts(start + count)
    for place, name in enumerate(mixture.names):
        assert before[source == place].tolist() == list(range(counts[name], ends[name]))


@settings(deadline=None)
@given(shares=SHARES, wanted=st.lists(st.integers(0, 10**7), min_size=1, max_size=20))
def test_any_place_is_found_by_itself(shares: dict[str, float], wanted: list[int]) -> None:
    mixture = Mixture.of(shares, "test")
    together = list(zip(*(part.tolist() for part in mixture.at(np.array(wanted))), strict=True))
    alone = [tuple(int(part[0]) for part in mixture.at(np.array([place]))) for place in wanted]
    assert together == alone


@settings(deadline=None)
@given(shares=SHARES, scale=st.integers(2, 1000))
def test_neither_scale_nor_order_of_the_shares_matters(shares: dict[str, float], scale: int) -> None:
    whole = {name: round(share * 1000) for name, share in shares.items()}
    backwards = {name: whole[name] * scale for name in reversed(whole)}
    places = np.arange(500)
    ours, theirs = Mixture.of(whole, "test").at(places), Mixture.of(backwards, "test").at(places)
    assert all(map(np.array_equal, ours, theirs))


def test_a_share_is_the_decimal_that_is_written() -> None:
    assert Mixture.of({"a": 0.1, "b": 0.2, "c": 0.7}, "test").weights == (1, 2, 7)
    assert Mixture.of({"a": 0.1, "b": 0.2, "c": 0.7}, "test").counts(640) == {"a": 64, "b": 128, "c": 448}


def test_a_share_of_zero_leaves_a_source_out() -> None:
    assert Mixture.of({"a": 1, "b": 0.0}, "test").names == ("a",)
    source, before = Mixture.of({"a": 1, "b": 0.0}, "test").at(np.arange(1000))
    assert not source.any()
    assert before.tolist() == list(range(1000))


def test_a_small_share_makes_blocks_as_large_as_it_needs_and_a_tiny_one_is_refused() -> None:
    assert Mixture.of({"a": 0.5, "b": 0.5}, "test").block == SMALLEST_BLOCK
    assert Mixture.of({"a": 999, "b": 1}, "test").block == 1024
    rare = Mixture.of({"a": 2**16 - 1, "b": 1}, "test")
    assert [rare.counts(n * rare.block)["b"] for n in range(4)] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=f"b has less than one sequence in {LARGEST_BLOCK:,}"):
        Mixture.of({"a": 1, "b": 1e-9}, "test")
    with pytest.raises(ValueError, match="no source has a share above 0"):
        Mixture.of({"a": 0}, "test")


def test_the_mixture_is_fixed_for_good() -> None:
    """A resumed run relies on it, whatever the version or machine: these never change."""
    mixture = Mixture.of({"web": 3, "code": 1}, "zslurm mixture 0 0")
    source, _ = mixture.at(np.arange(16))
    assert [mixture.names[place] for place in source] == FIRST_SOURCES
    source, before = mixture.at(np.array([10**12]))
    assert (mixture.names[source[0]], int(before[0])) == ("web", 750_000_000_000)


def test_sources_are_spread_over_a_block_at_random() -> None:
    """Neither in runs nor at fixed places: the sum over blocks is even, and no two blocks need be alike."""
    mixture = Mixture.of({"a": 1, "b": 1}, "test")
    source, _ = mixture.at(np.arange(400 * mixture.block))
    by_place = source.reshape(400, mixture.block).mean(axis=0)
    assert np.abs(by_place - 0.5).max() < 5 * 0.5 / np.sqrt(400)
    assert len(np.unique(source.reshape(400, -1), axis=0)) == 400
    assert abs(np.corrcoef(source[:-1], source[1:])[0, 1] + 1 / (mixture.block - 1)) < 5 / np.sqrt(len(source))
