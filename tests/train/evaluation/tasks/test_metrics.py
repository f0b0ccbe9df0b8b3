"""Scores and their standard errors, against numbers that are worked out another way."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest

from zslurm.train.evaluation.tasks.metrics import MetricConfig, choice_values, exact_match, pass_at_k, score


def test_a_mean_has_the_usual_standard_error() -> None:
    values = [1.0, 0.0, 0.0, 1.0, 1.0]
    found = score("acc", values, [1.0] * 5)
    assert found.value == pytest.approx(0.6)
    assert found.stderr == pytest.approx(statistics.stdev(values) / math.sqrt(5))
    assert score("acc", [1.0], [1.0]).stderr is None


def test_perplexities_are_over_all_words_and_their_errors_are_those_of_resampling() -> None:
    rng = np.random.default_rng(1)
    weights = rng.integers(5, 60, 400).astype(float)
    values = -weights * rng.normal(2.0, 0.3, 400)
    found = score("word_perplexity", values.tolist(), weights.tolist())
    assert found.value == pytest.approx(math.exp(-values.sum() / weights.sum()))
    drawn = rng.integers(0, 400, (4000, 400))
    resampled = np.exp(-values[drawn].sum(1) / weights[drawn].sum(1))
    assert found.stderr == pytest.approx(resampled.std(), rel=0.1)
    bits = score("bits_per_byte", values.tolist(), weights.tolist())
    assert bits.value == pytest.approx(-values.sum() / weights.sum() / math.log(2))
    assert not bits.higher_is_better


@pytest.mark.parametrize(("samples", "passed", "k"), [(5, 2, 1), (5, 2, 3), (4, 0, 2), (4, 4, 4), (6, 1, 6)])
def test_pass_at_k_is_the_share_of_choices_of_k_samples_with_one_that_passes(
    samples: int, passed: int, k: int
) -> None:
    each = [number < passed for number in range(samples)]
    chosen = list(itertools.combinations(each, k))
    assert pass_at_k(samples, passed, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))


def test_choices_are_compared_whole_per_character_and_per_byte() -> None:
    values = choice_values(["no", "indeed", "é"], [-3.0, -6.0, -2.9], [False, True, False], [1])
    assert values == {"acc": 0.0, "acc_norm": 1.0, "acc_bytes": 1.0, "exact_match": 1.0}
    assert choice_values(["a", "b"], [-1.0, -1.0], [False] * 2, [0])["acc"] == 1.0, "of equal ones the first"


def test_what_is_to_be_ignored_is_removed_from_both() -> None:
    config = MetricConfig(metric="exact_match", ignore_case=True, ignore_punctuation=True, ignore_numbers=True)
    assert exact_match(config, "Yes, 3!", ["no", "yes "]) == 1.0
    assert exact_match(MetricConfig(metric="exact_match"), "Yes", ["yes"]) == 0.0
