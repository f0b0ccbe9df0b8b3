"""What can be said about a corpus by counting: the loss a model must beat."""

from __future__ import annotations

import numpy as np

from zslurm.train.data.bundle import Corpus

STRIDE = 1 << 20  # tokens


def unigram_entropy(corpus: Corpus, at_most: int | None = None) -> float:
    """Entropy of the corpus's token frequencies, in nats per token.

    It is the least loss of any model that looks at no context: H = -sum p ln p, p the share of each token id.
    Reads the whole corpus once, in blocks; memory is one count per vocabulary entry.

    Args:
        corpus: the tokens.
        at_most: read only so many tokens, in blocks that are evenly spread: an estimate, a little too low.
    """
    counts = np.zeros(corpus.header.vocab_size, dtype=np.int64)
    blocks = [(bundle, start) for bundle in corpus.bundles for start in range(0, bundle.token_count, STRIDE)]
    every = 1 if at_most is None else max(1, -(-corpus.token_count // at_most))
    for bundle, start in blocks[::every]:
        counts += np.bincount(bundle.read(start, STRIDE), minlength=len(counts))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
