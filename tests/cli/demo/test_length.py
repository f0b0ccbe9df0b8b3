"""The demo trains on as many tokens as a machine has time for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import forked
from tests.train.runs import make_corpus, make_run
from zslurm.cli.demo import (
    FEWEST_TOKENS,
    LARGE_BATCH,
    MOST_TOKENS,
    SMALL_BATCH,
    TIME_S,
    Machine,
    affordable_tokens,
    batch_for,
    measure,
)
from zslurm.core.errors import ZslurmError


@pytest.mark.parametrize(
    ("tokens_per_s", "start_s", "spent_s", "tokens"),
    [
        (16_000, 3, 6, MOST_TOKENS),  # two cores of today
        (5_000, 4, 8, 450_000),
        (2_500, 8, 20, 150_000),
        (800, 15, 40, FEWEST_TOKENS),
        (800, 60, 200, FEWEST_TOKENS),  # no time is left: the lesson is the same
        (1e6, 1, 1, MOST_TOKENS),
    ],
)
def test_a_machine_gets_what_it_has_time_for(
    tokens_per_s: float, start_s: float, spent_s: float, tokens: int
) -> None:
    chosen = affordable_tokens(Machine(tokens_per_s, start_s), spent_s)
    assert chosen == tokens
    if chosen > FEWEST_TOKENS:
        assert spent_s + 4 * start_s + chosen / tokens_per_s <= TIME_S


def test_every_choice_makes_enough_steps_to_learn_in() -> None:
    for tokens in range(FEWEST_TOKENS, MOST_TOKENS + 1, 50_000):
        assert tokens // (batch_for(tokens) * 256) >= 48
    assert batch_for(FEWEST_TOKENS) == SMALL_BATCH
    assert batch_for(MOST_TOKENS) == LARGE_BATCH


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What measures need not wait for torch; in tests/test_demo.py it does."""
    for name, value in forked.environment(forked.server(torch=True), forked.BESIDE_RANKS).items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("forks")
def test_the_machine_is_measured_by_the_model_itself(tmp_path: Path) -> None:
    config = make_run(tmp_path / "run", make_corpus(tmp_path / "tokens.h5")) / "config.json"
    machine = measure(config, 2)
    assert machine.tokens_per_s > 0
    assert machine.start_s > 0


@pytest.mark.usefixtures("forks")
def test_a_measurement_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(ZslurmError, match=r"could not be measured: /\S+/nonesuch\.json: no such file"):
        measure(tmp_path / "nonesuch.json", 1)
