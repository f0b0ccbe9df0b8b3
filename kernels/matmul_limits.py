"""State the sizes from which oneDNN's fp32 matmul pays for its start and its copies. No torch here."""

from __future__ import annotations

FEWEST_ROWS = 16
FEWEST_TERMS = 16
"""Terms of each sum."""
FEWEST_MULTIPLICATIONS = 1 << 20
FEWEST_IN_A_BATCH = 1 << 21
"""Multiplications of each matmul of a batch, for which MKL takes one call."""

FEWEST_COPIED_TERMS = 64
"""Terms of each sum where the left matrix has to be copied, as for the gradients of weights."""
FEWEST_COPIED_TERMS_OF_LARGE = 256
"""The same for results of more than `LARGE` elements, which do not fit into a cache."""
LARGE = 1 << 20


def fewest_copied_terms(elements: int) -> int:
    """Return the fewest terms that pay where the left matrix is copied and the result has so many elements."""
    return FEWEST_COPIED_TERMS if elements <= LARGE else FEWEST_COPIED_TERMS_OF_LARGE
