"""The data order is a bijection in every epoch."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zslurm.train.data.sampler import Sampler

ORDER_OF_TEN = [3, 2, 6, 8, 5, 0, 1, 4, 7, 9, 2, 7, 5, 8, 9, 3, 4, 0, 6, 1]
ORDER_OF_A_TRILLION = [114618844824, 310166140342, 607572196436]


@given(n=st.integers(1, 5000), seed=st.integers(0, 2**64), epoch=st.integers(0, 1000))
def test_an_epoch_visits_every_sequence_once(n: int, seed: int, epoch: int) -> None:
    indices = Sampler(n, seed).indices(np.arange(epoch * n, (epoch + 1) * n))
    assert np.array_equal(np.sort(indices), np.arange(n))


@settings(deadline=None)  # a machine under load takes longer
@given(
    n=st.integers(1, 10**13),
    seed=st.integers(0, 1000),
    start=st.integers(0, 10**15),
    count=st.integers(1, 200),
)
def test_large_corpora_are_sampled_in_range_and_without_repeats(n: int, seed: int, start: int, count: int) -> None:
    counters = np.arange(start, start + count)
    indices = Sampler(n, seed).indices(counters)
    assert indices.min() >= 0
    assert indices.max() < n
    for epoch in np.unique(counters // n):
        visited = indices[counters // n == epoch]
        assert len(np.unique(visited)) == len(visited)


@given(n=st.integers(1, 3000), counters=st.lists(st.integers(0, 10**6), min_size=1, max_size=50))
def test_a_batch_of_counters_equals_one_at_a_time_in_any_order(n: int, counters: list[int]) -> None:
    sampler = Sampler(n, seed=7)
    assert sampler.indices(counters).tolist() == [int(sampler.indices([c])[0]) for c in counters]


def test_the_order_is_fixed_for_good() -> None:
    """A resumed run relies on it, whatever the version or machine: these numbers never change."""
    assert Sampler(10, 0).indices(np.arange(20)).tolist() == ORDER_OF_TEN
    assert Sampler(10**12, 1).indices([0, 1, 10**12]).tolist() == ORDER_OF_A_TRILLION


def test_epochs_and_seeds_differ() -> None:
    orders = {
        tuple(Sampler(1000, seed).indices(np.arange(1000) + epoch * 1000).tolist())
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


@pytest.mark.parametrize("n", [3, 4, 5])
def test_every_permutation_of_a_tiny_corpus_is_as_likely(n: int) -> None:
    epochs = 3000
    orders = Sampler(n, seed=0).indices(np.arange(epochs * n)).reshape(epochs, n)
    counts = Counter(map(tuple, orders.tolist()))
    expected = epochs / math.factorial(n)
    seen = [counts[order] for order in itertools.permutations(range(n))]
    chi_square = sum((count - expected) ** 2 / expected for count in seen)
    freedom = math.factorial(n) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


def test_places_and_neighbours_are_spread_evenly() -> None:
    """No part of the corpus comes early, and sequences that are together are not visited together."""
    n = 100_000
    order = Sampler(n, seed=3).indices(np.arange(n))
    early = np.histogram(order[: n // 10], bins=20, range=(0, n))[0]
    assert np.abs(early - n / 200).max() < 5 * math.sqrt(n / 200)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 / math.sqrt(n)
    assert (np.abs(np.diff(order)) == 1).sum() < 20


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one sequence"):
        Sampler(0, 0)
    with pytest.raises(ValueError, match="start at 0"):
        Sampler(5, 0).indices([-1])
