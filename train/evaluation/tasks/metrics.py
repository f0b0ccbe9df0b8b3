"""Metrics: the value of each document, and from all values a score with its standard error.

Every document gives a metric a value and a weight. The score is a function of R = sum(values) / sum(weights):

    mean                        R, all weights being 1
    perplexities                exp(-R): log-likelihoods over numbers of documents, words, bytes or tokens
    bits per byte               -R / ln 2

The standard error of R over n documents is that of a ratio of means (Cochran, Sampling Techniques, 6.3; for equal
weights it is the usual s / sqrt(n)), and that of a function of R its derivative times that.

pass@k of n samples of which c pass is 1 - C(n - c, k) / C(n, k), the unbiased estimator of arXiv 2107.03374.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pydantic import ConfigDict

from zslurm.train.sections.section import Count, Section


class MetricConfig(Section):
    """A metric of a task; the last five are of exact_match."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    metric: str
    aggregation: str | None = None
    higher_is_better: bool | None = None
    ignore_case: bool = False
    ignore_punctuation: bool = False
    ignore_numbers: bool = False
    regexes_to_ignore: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """Return the metric without its number: pass@k for pass@10."""
        return "pass@k" if re.fullmatch(r"pass@[1-9]\d{0,3}", self.metric) else self.metric

    @property
    def k(self) -> Count:
        """Return the number of pass@k."""
        return int(self.metric.partition("@")[2])


class Metric(NamedTuple):
    """A kind of metric.

    Attributes:
        output_types: the kinds of task that have it.
        score: of R.
        slope: the derivative of `score` at R.
        higher_is_better: whether a larger score is a better one.
        usual: whether a task that lists no metric has it.
    """

    output_types: tuple[str, ...]
    score: Callable[[float], float] = lambda ratio: ratio
    slope: Callable[[float], float] = lambda ratio: 1.0
    higher_is_better: bool = True
    usual: bool = True


def _perplexity(ratio: float) -> float:
    return math.exp(min(-ratio, 700.0))


_LIKELIHOODS = ("multiple_choice", "loglikelihood")
_ROLLING = ("loglikelihood_rolling",)

METRICS: dict[str, Metric] = {
    "acc": Metric(_LIKELIHOODS),
    "acc_norm": Metric(("multiple_choice",)),
    "acc_bytes": Metric(("multiple_choice",), usual=False),
    "perplexity": Metric(("loglikelihood",), _perplexity, _perplexity, False),
    "word_perplexity": Metric(_ROLLING, _perplexity, _perplexity, False),
    "byte_perplexity": Metric(_ROLLING, _perplexity, _perplexity, False),
    "token_perplexity": Metric(_ROLLING, _perplexity, _perplexity, False, usual=False),
    "bits_per_byte": Metric(_ROLLING, lambda r: -r / math.log(2), lambda r: 1 / math.log(2), False),
    "exact_match": Metric(("generate_until", "multiple_choice")),
    "pass@k": Metric(("generate_until",), usual=False),
}


def defaults_of(output_type: str) -> tuple[MetricConfig, ...]:
    """Return the metrics of a task that lists none."""
    usual = [name for name, metric in METRICS.items() if metric.usual and output_type in metric.output_types]
    return tuple(MetricConfig(metric=name) for name in usual if (name, output_type) not in _UNUSUAL)


_UNUSUAL = {("exact_match", "multiple_choice")}


class Score(NamedTuple):
    """A score; its standard error is None where one document cannot give any."""

    value: float
    stderr: float | None
    higher_is_better: bool


def score(kind: str, values: Sequence[float], weights: Sequence[float]) -> Score:
    """Return the score of the values and weights of all documents."""
    metric, count, total = METRICS[kind], len(values), math.fsum(weights)
    ratio = math.fsum(values) / total
    error = None
    if count > 1:
        squares = math.fsum((value - ratio * weight) ** 2 for value, weight in zip(values, weights, strict=True))
        of_ratio = math.sqrt(squares * count / (count - 1)) / total
        error = abs(metric.slope(ratio)) * of_ratio
    return Score(metric.score(ratio), error, metric.higher_is_better)


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Return the chance that one of k samples drawn from these passes."""
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def exact_match(config: MetricConfig, answer: str, golds: Sequence[str]) -> float:
    """Return 1 where an answer is any of the right ones, after what is to be ignored is removed from both."""
    return float(any(_compared(config, answer) == _compared(config, gold) for gold in golds))


_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NO_DIGITS = str.maketrans("", "", string.digits)


def _compared(config: MetricConfig, text: str) -> str:
    for pattern in config.regexes_to_ignore:
        text = re.sub(pattern, "", text)
    if config.ignore_case:
        text = text.lower()
    if config.ignore_punctuation:
        text = text.translate(_NO_PUNCTUATION)
    if config.ignore_numbers:
        text = text.translate(_NO_DIGITS)
    return text


def best_of(values: Sequence[float]) -> int:
    """Return the place of the largest value, the first of equal ones."""
    return max(range(len(values)), key=values.__getitem__)


def choice_values(
    choices: Sequence[str], log_likelihoods: Sequence[float], greedy: Sequence[bool], golds: Sequence[int]
) -> dict[str, Any]:
    """Return the values of a multiple-choice document: by likelihoods, and by these per character and byte."""
    per_character = [value / max(1, len(text)) for value, text in zip(log_likelihoods, choices, strict=True)]
    per_byte = [value / max(1, len(text.encode())) for value, text in zip(log_likelihoods, choices, strict=True)]
    return {
        "acc": float(best_of(log_likelihoods) in golds),
        "acc_norm": float(best_of(per_character) in golds),
        "acc_bytes": float(best_of(per_byte) in golds),
        "exact_match": float(any(greedy[gold] for gold in golds)),
    }
