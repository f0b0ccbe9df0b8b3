"""The data order: which sequence is trained on when, as a pure function of (seed, counter).

The sequences that a run trains on out of one corpus have counters: 0, 1, 2, ... over the whole run, for each
context (train/data/order.py). One epoch is `n` counters, n the number of sequences in the corpus, and within
an epoch counter i trains on sequence bijection(i); the bijection of [0, n) is keyed by (seed, epoch).
Nothing is stored or shuffled: a resumed run needs its counter only, and any rank computes any part of the
order by itself.

The bijection is a Feistel network on the smallest power of two that holds n, followed by cycle walking: while
the result is not below n, it is encrypted again (Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
CT-RSA 2002). The domain is less than 2n, so that fewer than two passes are needed on average. The round keys
are SHAKE-256 of (seed, epoch); the round function is SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA
2014). It is a shuffle, not a cipher: nothing here is meant to keep a secret.

Ranks do not appear: microbatch j of a step holds the same counters whatever their number is, and
train/data/shares.py divides the microbatches among them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

# Four rounds suffice on large domains (Luby and Rackoff 1988). Sixteen make the permutations of a handful of
# sequences uniform too (chi-square over epochs), for 0.1 microseconds a counter where thousands are asked for.
ROUNDS = 16


@dataclass(frozen=True)
class Sampler:
    """The order in which `n` sequences are visited, epoch after epoch.

    Attributes:
        n: sequences in the corpus.
        seed: of the run.
        source: name of the corpus among others, each of which has another order; empty if it is the only one.
    """

    n: int
    seed: int
    source: str = ""

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"a sampler needs at least one sequence, got n={self.n}")

    def indices(self, counters: ArrayLike) -> NDArray[np.int64]:
        """Return the sequence, int64 [k], each in [0, n), that each counter trains on.

        Counters, int64 [k], are at least 0; they may span epochs.
        """
        wanted_counters = np.asarray(counters, dtype=np.int64)
        if wanted_counters.size and wanted_counters.min() < 0:
            raise ValueError(f"counters start at 0, got {wanted_counters.min()}")
        epochs, positions = np.divmod(wanted_counters, self.n)
        result = np.empty_like(wanted_counters)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            result[chosen] = permute(positions[chosen], self.n, round_keys(self._purpose(int(epoch))))
        return result

    def _purpose(self, epoch: int) -> str:
        named = f" {self.source}" if self.source else ""
        return f"zslurm data order {self.seed} {epoch}{named}"


def round_keys(purpose: str) -> NDArray[np.uint64]:
    """Feistel round keys for a purpose, uint64 [ROUNDS]; the same on every machine."""
    digest = hashlib.shake_256(purpose.encode()).digest(8 * ROUNDS)
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def permute(positions: NDArray[np.int64], n: int, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Map positions, int64 [...], in [0, n) through a bijection of [0, n).

    Keys are uint64 [ROUNDS]; or, if n is a power of two, [ROUNDS, ...], broadcast against the positions: then
    each has its own bijection.
    """
    bits = (n - 1).bit_length()
    values = _feistel(positions.astype(np.uint64), bits, keys)
    while (outside := values >= n).any():
        values[outside] = _feistel(values[outside], bits, keys)
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], bits: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a bijection of [0, 2**bits): the halves take turns in being masked by a function of the other half.

    With an odd number of bits the upper half has one more, and only its own turns change it.
    """
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    high, low = values >> low_bits, values & low_mask
    for turn, key in enumerate(keys):
        if turn % 2 == 0:
            high = high ^ (_mix(low + key) & high_mask)
        else:
            low = low ^ (_mix(high + key) & low_mask)
    return (high << low_bits) | low


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser: every input bit reaches every output bit (arithmetic modulo 2**64 is meant)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
