"""A look into a corpus: the beginnings of a few documents, as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from zslurm.train.data.build.tokenizer import load_tokenizer
from zslurm.train.data.bundle import Bundle, Corpus

PREVIEW_TOKENS = 200


@dataclass(frozen=True)
class Preview:
    """The first tokens of a document; `parts` are runs that count as targets (True) or do not."""

    document: int  # in the corpus, from 0
    tokens: int  # in the document
    parts: tuple[tuple[bool, str], ...]
    complete: bool  # the whole document is shown

    @property
    def text(self) -> str:
        """Return the parts together."""
        return "".join(text for _, text in self.parts)


def previews(corpus: Corpus, count: int, tokens: int = PREVIEW_TOKENS) -> list[Preview]:
    """Up to `count` documents, evenly spread over the corpus, each decoded up to so many tokens.

    The end-of-document token is left out.

    Raises:
        DataError: the tokenizer is missing or another one, or a token id is beyond the vocabulary.
    """
    tokenizer = load_tokenizer(corpus.tokenizer_path())
    total = corpus.document_count
    count = min(count, total)
    shown = []
    for number in (which * total // count for which in range(count)):
        bundle, within = _find(corpus, number)
        start, end = (int(offset) for offset in bundle.documents[within : within + 2])
        ids = bundle.read(start, min(end - start, tokens))
        targets = bundle.read_targets(start, len(ids))
        complete = len(ids) == end - start
        if ids[-1] == corpus.header.end_token:
            ids, targets = ids[:-1], targets[:-1]
        parts = tuple((bool(kind), tokenizer.decode(ids[run].tolist())) for kind, run in _runs(targets))
        shown.append(Preview(number, end - start, parts, complete))
    return shown


def _find(corpus: Corpus, document: int) -> tuple[Bundle, int]:
    """Return the bundle that a document lies in, and its number there."""
    for bundle in corpus.bundles:
        if document < bundle.document_count:
            return bundle, document
        document -= bundle.document_count
    raise IndexError(f"{corpus.path}: no document {document}")


def _runs(targets: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Runs of equal values."""
    start = 0
    for kind, run in groupby(targets.tolist()):
        end = start + len(list(run))
        yield kind, slice(start, end)
        start = end
