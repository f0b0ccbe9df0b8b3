"""A look into a corpus: the beginnings of a few documents as text, and the loss that a model must beat."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from zslurm.train.data.build.tokenizer import load_tokenizer
from zslurm.train.data.bundle import Bundle, Corpus

PREVIEW_TOKENS = 200
STRIDE = 1 << 20  # tokens


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
    """Return up to `count` documents, evenly spread over the corpus, each decoded up to `tokens` tokens.

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
    """Return the bundle that holds a document, and its number there."""
    for bundle in corpus.bundles:
        if document < bundle.document_count:
            return bundle, document
        document -= bundle.document_count
    raise IndexError(f"{corpus.path}: no document {document}")


def _runs(targets: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Yield the runs of equal values."""
    start = 0
    for kind, run in groupby(targets.tolist()):
        end = start + len(list(run))
        yield kind, slice(start, end)
        start = end


def unigram_entropy(corpus: Corpus, at_most: int | None = None) -> float:
    """Return the entropy of the corpus's token frequencies, in nats per token.

    It is the least loss of any model that looks at no context: H = -sum p ln p, p the share of each token id.
    Reads the whole corpus once, in blocks; memory is one count per vocabulary entry.

    With `at_most`, only that number of tokens is read, in blocks that are evenly spread: an estimate, a little
    too low.
    """
    counts = np.zeros(corpus.header.vocab_size, dtype=np.int64)
    blocks = [(bundle, start) for bundle in corpus.bundles for start in range(0, bundle.token_count, STRIDE)]
    every = 1 if at_most is None else max(1, -(-corpus.token_count // at_most))
    for bundle, start in blocks[::every]:
        counts += np.bincount(bundle.read(start, STRIDE), minlength=len(counts))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
