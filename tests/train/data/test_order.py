"""The order of a run: as ever for one corpus, exact for many, on from phase to phase; changes are noticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.train.data.numbered import numbered, order_of, phase
from zslurm.train.data.bundle import Corpus
from zslurm.train.data.mixture import SMALLEST_BLOCK
from zslurm.train.data.order import DataOrder
from zslurm.train.data.sampler import Sampler
from zslurm.train.errors import ConfigError, DataError
from zslurm.train.sections.phases import ZAYA1_MID_TRAINING, PhaseConfig

SIZES = {"books": 400, "code": 1000, "web": 2345}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Corpus]:
    directory = tmp_path_factory.mktemp("data")
    return {name: numbered(directory / name, size) for name, size in SIZES.items()}


def of_blocks(context: int, blocks: int, mix: dict[str, float]) -> PhaseConfig:
    """A phase that ends with a block of its mixture, so that its counts are exact; 8 steps a block."""
    return phase(context, blocks * SMALLEST_BLOCK, global_batch=8, mix=mix)


def whole(order: DataOrder) -> list[tuple[int, str, int]]:
    """(context, source, index) of every sequence of a run, in order."""
    found = []
    for step in range(order.plan.total_steps):
        here = order.plan.at(step)
        numbers = here.sequence + np.arange(here.global_batch)
        for source, index in zip(*order.at(here.phase_index, numbers), strict=True):
            found.append((here.phase.context, order.data.names[source], int(index)))
    return found


MIXES = st.dictionaries(st.sampled_from(sorted(SIZES)), st.integers(0, 9)).filter(
    lambda mix: not mix or any(mix.values())
)
PHASES = st.lists(
    st.tuples(st.sampled_from([8, 16, 20]), st.integers(1, 150), st.sampled_from([6, 12]), MIXES),
    min_size=1,
    max_size=4,
).map(lambda drawn: [phase(c, n, global_batch=batch, mix=mix) for c, n, batch, mix in drawn])


@settings(max_examples=40, deadline=None)
@given(phases=PHASES, seed=st.integers(0, 5), data=st.data())
def test_each_source_is_visited_once_an_epoch_through_all_phases_of_a_context(
    corpora: dict[str, Corpus], phases: list[Any], seed: int, data: st.DataObject
) -> None:
    order = order_of(corpora, phases, seed)
    run = whole(order)
    for context in {each.context for each in phases}:
        for name, corpus in corpora.items():
            visited = [index for c, source, index in run if (c, source) == (context, name)]
            n = corpus.sequences(context)
            counters = np.arange(len(visited))
            assert visited == Sampler(n, seed, name).indices(counters).tolist(), "no gap, and nothing twice"
            for start in range(0, len(visited) - n + 1, n):
                assert sorted(visited[start : start + n]) == list(range(n))
    done = data.draw(st.integers(0, order.plan.total_steps))
    taken: dict[str, dict[str, int]] = {}
    sequences = sum(order.plan.at(step).global_batch for step in range(done))
    for context, source, _ in run[:sequences]:
        taken.setdefault(str(context), {}).setdefault(source, 0)
        taken[str(context)][source] += 1
    assert order.taken(done) == taken


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**64), contexts=st.lists(st.sampled_from([8, 16]), min_size=1, max_size=4))
def test_one_corpus_keeps_the_order_of_runs_before_there_were_mixtures(
    corpora: dict[str, Corpus], seed: int, contexts: list[int]
) -> None:
    order = order_of({"": corpora["code"]}, [phase(context, 90) for context in contexts], seed)
    run = whole(order)
    used = {8: 0, 16: 0}
    for step in range(order.plan.total_steps):
        here = order.plan.at(step)
        old = Sampler(corpora["code"].sequences(here.phase.context), seed)
        counters = used[here.phase.context] + np.arange(here.global_batch)
        used[here.phase.context] += here.global_batch
        assert [index for _, _, index in run[step * 6 : step * 6 + 6]] == old.indices(counters).tolist()


def test_without_a_mix_sources_are_mixed_by_their_tokens(corpora: dict[str, Corpus]) -> None:
    (mixture,) = order_of(corpora, [phase(8, 300)]).mixtures
    assert dict(zip(mixture.names, mixture.weights, strict=True)) == SIZES


def test_a_source_that_is_left_out_stays_where_it_was(corpora: dict[str, Corpus]) -> None:
    mixed, alone = {"web": 1, "code": 1}, {"web": 1}
    order = order_of(corpora, [of_blocks(8, 1, mix) for mix in (mixed, alone, mixed)])
    code = [index for _, source, index in whole(order) if source == "code"]
    assert [order.taken(done) for done in (8, 16, 24)] == [
        {"8": {"code": 32, "web": 32}},
        {"8": {"code": 32, "web": 96}},
        {"8": {"code": 64, "web": 128}},
    ]
    assert code == Sampler(corpora["code"].sequences(8), 0, "code").indices(np.arange(64)).tolist()


def test_sources_have_orders_of_their_own(corpora: dict[str, Corpus]) -> None:
    twins = {"a": corpora["web"], "b": corpora["web"]}
    run = whole(order_of(twins, [phase(8, 240)]))
    a, b = ([index for _, source, index in run if source == name] for name in "ab")
    assert a[:50] != b[:50]


def test_a_source_that_is_too_short_or_a_share_that_is_too_small_is_named(corpora: dict[str, Corpus]) -> None:
    with pytest.raises(
        DataError, match=r"^data\.sources\.books: .* holds 400 tokens, but one sequence of context"
    ):
        order_of(corpora, [phase(500, 6)])
    order_of(corpora, [phase(500, 6, mix={"web": 1, "books": 0})])
    with pytest.raises(ConfigError, match=r"^phases\[1\]\.mix: code has less than one sequence in 1,048,576"):
        order_of(corpora, [phase(8, 6), phase(8, 6, mix={"web": 1, "code": 1e-8})])


# --------------------------------------------------------------------------- what a resumed run is warned of


SHARES = {"web": 2, "code": 1}


def test_an_unchanged_run_is_told_nothing(corpora: dict[str, Corpus]) -> None:
    phases = [of_blocks(8, 1, SHARES), phase(16, 60)]
    for done in (0, 7, 8, 15, 18):
        assert order_of(corpora, phases).changes(order_of(corpora, phases).record(done), done) == []


def test_a_mix_may_change_ahead_and_not_behind(corpora: dict[str, Corpus]) -> None:
    first, second = of_blocks(8, 3, SHARES), phase(8, 120)
    recorded = order_of(corpora, [first, second]).record(24)
    ahead = order_of(corpora, [first, phase(8, 120, mix={"books": 1})])
    assert ahead.changes(recorded, 24) == []
    behind = order_of(corpora, [of_blocks(8, 3, {"web": 1, "code": 1}), second])
    with pytest.raises(ConfigError) as caught:
        behind.changes(recorded, 24)
    assert str(caught.value) == (
        "phases[].mix or packing: the 24 steps that are done took 64 of code, 128 of web; now they would "
        "take 96 of code, 96 of web; set the mix back and give the new one to a phase that begins after them"
    )


def test_changed_data_are_named(corpora: dict[str, Corpus], tmp_path: Path) -> None:
    phases = [of_blocks(8, 1, SHARES)]
    recorded = order_of(corpora, phases).record(7)
    other = numbered(tmp_path / "other", 1000, first=7)
    assert order_of(corpora | {"code": other}, phases).changes(recorded, 7) == [
        f"{other.path} is not the data that the checkpoint was trained on"
    ]
    assert order_of(corpora | {"new": other}, phases).changes(recorded, 7) == ["data.sources.new is new"]
    fewer = {name: corpora[name] for name in ("web", "code")}
    assert order_of(fewer, phases).changes(recorded, 7) == ["data.sources.books is gone"]
    assert order_of(corpora, phases, seed=1).changes(recorded, 7) == [
        "run.seed is 1, and was 0: from here on the order is another"
    ]


# --------------------------------------------------------------------------- what is taken, and how often


def test_progress_is_tokens_and_epochs_over_all_contexts(corpora: dict[str, Corpus]) -> None:
    order = order_of(corpora, [phase(8, 120), phase(20, 60, mix={"web": 1})])
    assert {name: taken.tokens for name, taken in order.progress(0).items()} == dict.fromkeys(corpora, 0)
    done = order.progress(order.plan.total_steps)
    assert sum(taken.tokens for taken in done.values()) == order.plan.total_tokens
    taken = order.taken(order.plan.total_steps)
    epochs = taken["8"]["web"] / corpora["web"].sequences(8) + taken["20"]["web"] / corpora["web"].sequences(20)
    assert done["web"].epochs == pytest.approx(epochs)


def test_a_source_is_repeated_as_often_as_it_may(corpora: dict[str, Corpus]) -> None:
    sequences = corpora["code"].sequences(8)
    order = order_of(corpora, [phase(8, sequences * 6, mix={"code": 1})])
    order.check_epochs(None)
    order.check_epochs(6.0)
    with pytest.raises(
        DataError, match=r"^data\.sources\.code: the run takes 6 epochs of it, more than data.max_epo"
    ):
        order.check_epochs(5.9)


@pytest.mark.parametrize(
    ("mix", "note"),
    [
        (
            {"web": 0.5, "code": 0.47},
            "phases[0].mix: the shares sum to 0.97, not 1; each counts as its part of the sum",
        ),
        (
            {"web": 60, "code": 45},
            "phases[0].mix: the shares sum to 105, not 100; each counts as its part of the sum",
        ),
        ({"web": 0.7, "code": 0.2, "books": 0.1}, None),
        ({"web": 86.1, "code": 13.9}, None),
        ({"web": 1, "code": 3}, None),
        ({}, None),
    ],
)
def test_shares_that_look_like_a_whole_and_are_none_are_noted(
    corpora: dict[str, Corpus], mix: dict[str, float], note: str | None
) -> None:
    assert order_of(corpora, [phase(8, 12, mix=mix)]).notes() == ([] if note is None else [note])


def test_the_published_mixture_has_a_name() -> None:
    named = phase(8, 12, mix="zaya1-mid-training")
    assert named.mix == ZAYA1_MID_TRAINING
    assert sum(named.mix.values()) == pytest.approx(100)
    with pytest.raises(ValidationError, match="did you mean `zaya1-mid-training`"):
        phase(8, 12, mix="zaya-mid-training")
