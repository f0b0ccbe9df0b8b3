"""The sources of a run: opened together, made with one tokenizer, read wherever their bundles begin and end."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.train.data.numbered import HEADER, numbered
from zslurm.train.config import DataConfig
from zslurm.train.data.bundle import Corpus
from zslurm.train.data.training_data import OTHER_FILES, TrainingData
from zslurm.train.errors import ConfigError, DataError

CONTEXTS = [2, 7, 64]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> TrainingData:
    """Two sources, one of them in bundles of which some are shorter than a sequence."""
    directory = tmp_path_factory.mktemp("data")
    numbered(directory / "code", 500, 3, 1, 700, first=10_000)
    numbered(directory / "web", 900)
    return TrainingData.open(DataConfig(sources={name: str(directory / name) for name in ("web", "code")}))


@settings(max_examples=50, deadline=None)
@given(
    context=st.sampled_from(CONTEXTS), draws=st.lists(st.tuples(st.booleans(), st.integers(0, 10**6)), min_size=1)
)
def test_sequences_are_read_across_bundles_and_sources(
    data: TrainingData, context: int, draws: list[tuple[bool, int]]
) -> None:
    source = np.array([int(web) for web, _ in draws])
    sizes = [data.sequences(name, context) for name in data.names]
    index = np.array([draw % sizes[place] for place, (_, draw) in zip(source, draws, strict=True)])
    sequences = data.locate(source, index, context)
    sequences.will_need()
    rows = data.read(sequences)
    first = np.where(source == 0, 10_000, 0) + index * context
    assert rows.dtype == np.uint16
    assert np.array_equal(rows, first[:, None] + np.arange(context + 1))
    part = sequences.part(1, 4)
    assert len(part) == len(rows[1:4])
    assert not len(part) or np.array_equal(data.read(part), rows[1:4])


def test_names_are_sorted_and_the_fingerprint_depends_on_all_of_them(data: TrainingData, tmp_path: Path) -> None:
    assert data.names == ("code", "web")
    assert data.token_count == 500 + 3 + 1 + 700 + 900
    paths = {name: str(corpus.path) for name, corpus in data.corpora.items()}
    assert TrainingData.open(DataConfig(sources=paths)).fingerprint == data.fingerprint
    renamed = {"code": paths["code"], "webb": paths["web"]}
    assert TrainingData.open(DataConfig(sources=renamed)).fingerprint != data.fingerprint
    swapped = {"code": paths["web"], "web": paths["code"]}
    assert TrainingData.open(DataConfig(sources=swapped)).fingerprint != data.fingerprint


def test_one_path_has_the_fingerprint_of_its_corpus(data: TrainingData) -> None:
    """Checkpoints of runs before there were mixtures hold that."""
    corpus = data.corpora["web"]
    assert TrainingData.open(DataConfig(path=str(corpus.path))).fingerprint == corpus.fingerprint


def test_sources_of_two_tokenizers_are_refused_with_both_named(data: TrainingData, tmp_path: Path) -> None:
    numbered(tmp_path / "other", 100, header=replace(HEADER, tokenizer_sha256="ef" * 32))
    paths = {name: str(corpus.path) for name, corpus in data.corpora.items()}
    with pytest.raises(DataError) as caught:
        TrainingData.open(DataConfig(sources=paths | {"news": str(tmp_path / "other")}))
    assert str(caught.value) == (
        "data.sources.news: made with another tokenizer than data.sources.code (tokenizer_sha256 efefefefefef, "
        "not cdcdcdcdcdcd); build one again with the tokenizer of the other (zslurm data build --tokenizer)"
    )


def test_what_is_wrong_with_a_source_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^data\.path: required, but not given"):
        TrainingData.open(DataConfig())
    with pytest.raises(DataError, match=r"^data\.path: .*nowhere: no such file"):
        TrainingData.open(DataConfig(path=str(tmp_path / "nowhere")))
    with pytest.raises(DataError, match=r"^data\.sources\.web: .*nowhere: no such file"):
        TrainingData.open(DataConfig(sources={"web": str(tmp_path / "nowhere")}))
    numbered(tmp_path / "web", 100)
    with pytest.raises(DataError, match=r"^data\.sources\.web: .*has a vocabulary of 60000 tokens, more than"):
        TrainingData.open(DataConfig(sources={"web": str(tmp_path / "web")})).check_fits(50_000)


def test_a_corpus_of_thousands_of_bundles_raises_the_limit_of_open_files_or_says_what_is_missing(
    data: TrainingData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One mapping is one open file, and 1,024 of them are a common limit."""
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: raised.append(limits))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 4096))
    data.allow_open_files()
    assert raised == []
    many = TrainingData({"web": replace(data.corpora["web"], bundles=data.corpora["web"].bundles * 1500)})
    many.allow_open_files()
    assert raised == [(2 * 1500 + OTHER_FILES, 4096)]
    more = TrainingData({"web": replace(data.corpora["web"], bundles=data.corpora["web"].bundles * 4000)})
    with pytest.raises(
        DataError, match=r"4000 bundles are more than may be open at once \(4096 files, ulimit -Hn\)"
    ):
        more.allow_open_files()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, resource.RLIM_INFINITY))
    more.allow_open_files()
    assert raised[1] == (2 * 4000 + OTHER_FILES, resource.RLIM_INFINITY)


def test_a_token_beyond_the_vocabulary_is_named(tmp_path: Path) -> None:
    corpus = numbered(tmp_path / "web", 100)
    (bundle,) = corpus.bundles
    with h5py.File(bundle.path, "r+") as file:
        file["tokens"][57] = 65_000
    data = TrainingData({"web": Corpus.open(corpus.path)})
    zeros = np.zeros(3, np.int64)
    data.read(data.locate(zeros, np.array([0, 1, 2]), 10))
    with pytest.raises(DataError, match=r"token 57 has id 65000, but the vocabulary has 60000 entries"):
        data.read(data.locate(zeros, np.array([0, 5, 2]), 10))
