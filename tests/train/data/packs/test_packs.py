"""Packs hold whole documents, each once, whatever the bundling; long ones by the setting."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.train.data.packs.documents import corpus_of
from zslurm.train.data.packs import packs
from zslurm.train.data.packs.packs import LongDocuments, Packs, pack
from zslurm.train.data.training_data import TrainingData
from zslurm.train.errors import DataError

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def pieces_of(found: Packs) -> list[list[tuple[int, int]]]:
    """(start, tokens) of the pieces of each pack."""
    everything = zip(found.starts.tolist(), found.tokens.tolist(), strict=True)
    edges = found.ends.tolist()
    pieces = list(everything)
    return [pieces[first:last] for first, last in pairwise(edges)]


@settings(max_examples=25, deadline=None)
@given(bundles=st.lists(LENGTHS, min_size=1, max_size=3), context=st.integers(2, 20), window=st.integers(1, 9))
def test_every_target_of_every_document_is_in_one_pack_once(
    tmp_path_factory: pytest.TempPathFactory, bundles: list[list[int]], context: int, window: int
) -> None:
    lengths = [length for bundle in bundles for length in bundle]
    corpus = corpus_of(tmp_path_factory.mktemp("data") / "corpus", *bundles)
    if max(lengths) < 2:
        with pytest.raises(DataError, match="has a token to learn"):
            pack(corpus, context, "split")
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packs, "WINDOW", window)
        found = pack(corpus, context, "split")
    assert len(found) == len(pieces_of(found))
    assert all(0 < sum(tokens for _, tokens in pieces) <= context + 1 for pieces in pieces_of(found))
    starts = np.cumsum([0, *lengths]).tolist()
    targets = [
        t for pieces in pieces_of(found) for start, tokens in pieces for t in range(start + 1, start + tokens)
    ]
    first_tokens = set(starts[:-1])
    assert sorted(targets) == [t for t in range(starts[-1]) if t not in first_tokens]
    whole = {(start, length) for start, length in zip(starts, lengths, strict=False) if 2 <= length <= context + 1}
    assert whole <= {piece for pieces in pieces_of(found) for piece in pieces}, "none of these is cut"


@pytest.mark.parametrize(("rule", "pieces"), [("split", {(0, 9), (12, 5), (8, 3)}), ("trim", {(0, 9), (12, 5)})])
def test_a_document_longer_than_a_pack(tmp_path: Path, rule: LongDocuments, pieces: set[tuple[int, int]]) -> None:
    """Of 11 tokens, if a pack takes 9: it is split, its parts sharing a token, or loses its end."""
    corpus = corpus_of(tmp_path / "corpus", [11, 1, 5])
    found = pack(corpus, 8, rule)
    assert {piece for pack_ in pieces_of(found) for piece in pack_} == pieces


def test_a_long_document_is_refused_with_its_number_where_it_shall_be(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "corpus", [9], [4, 11, 12])
    with pytest.raises(DataError) as caught:
        pack(corpus, 8, "refuse")
    assert str(caught.value) == (
        f"data.long_documents: document 2 of {corpus.path} has 11 tokens, and a sequence of context 8 takes 9; "
        "set data.long_documents to split or trim, lengthen the context, or trim answers when building (zslurm "
        "data build --trim-answers)"
    )
    assert len(pack(corpus, 11, "refuse")) == 4, "12 tokens are not too many: the last is a target only"


@pytest.mark.parametrize(("context", "typical"), [(4096, 600), (32768, 6000)])
def test_packs_are_nearly_full_on_drawn_lengths(tmp_path: Path, context: int, typical: int) -> None:
    """Log-normal lengths, as of web pages and of chains of thought; 5,000 documents are far below one window."""
    drawn = np.random.default_rng(1).lognormal(np.log(typical), 1.0, 5000)
    lengths = np.clip(drawn, 2, context + 1).astype(np.int64)
    ends = np.cumsum(lengths)
    part = packs._pack_window(ends - lengths, lengths, context, "refuse")
    assert part.tokens.sum() > 0.98 * len(part.sizes) * (context + 1)


@settings(max_examples=20, deadline=None)
@given(lengths=LENGTHS, context=st.integers(2, 20), draws=st.lists(st.integers(0, 10**6), min_size=1, max_size=9))
def test_what_is_read_are_the_documents_side_by_side(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], context: int, draws: list[int]
) -> None:
    directory = tmp_path_factory.mktemp("data")
    odd_masked = corpus_of(directory / "chats", [*lengths, 5], masked=True)
    plain = corpus_of(directory / "web", [7, 30], first=500_000)
    data = TrainingData({"chats": odd_masked, "web": plain})
    source = np.array([draw % 2 for draw in draws])
    sizes = [data.sequences(name, context, packed=True) for name in data.names]
    index = np.array([draw // 2 % sizes[place] for draw, place in zip(draws, source, strict=True)])
    found = data.locate(source, index, context, packed=True)
    found.will_need()
    rows, mask = data.read(found), data.target_mask(found)
    assert mask is not None
    starts = []
    for row, (place, which) in enumerate(zip(source.tolist(), index.tolist(), strict=True)):
        first_token = [10, 500_000][place]
        tokens, targets = [], []
        for start, count in pieces_of(data.packs(data.names[place], context))[which]:
            starts.append(row * context + len(tokens))
            piece = list(range(first_token + start, first_token + start + count))
            tokens += piece
            targets += [0] + [1 if place else int(token % 2 == 0) for token in piece[1:]]
        if len(tokens) < context:
            starts.append(row * context + len(tokens))
        padding = context + 1 - len(tokens)
        assert rows[row].tolist() == tokens + [1] * padding
        assert mask[row].tolist() == (targets + [0] * padding)[1:]
    assert found.bounds().tolist() == [*starts, len(draws) * context]
    part = found.part(min(1, len(draws) - 1), 3)
    assert np.array_equal(data.read(part), rows[min(1, len(draws) - 1) : 3])
