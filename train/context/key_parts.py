"""The parts of the keys that a rank's queries see, and how an exchange hands them out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from torch import Tensor


class KeyPart(NamedTuple):
    """Keys and values that some of a rank's queries see, all of them, or causally if they are its own tokens.

    Attributes:
        kv_2BJSP: keys and values, of several ranks one after the other.
        ranks: whose tokens they are.
        early_keys: only the keys of each rank's early chunk, else of both.
        late_queries: seen by the rank's late chunk only, else by both.
        causal: its own tokens.
    """

    kv_2BJSP: Tensor
    ranks: slice
    early_keys: bool
    late_queries: bool
    causal: bool


class KeyExchange(Protocol):
    """Brings a rank the keys and values of all ranks, and them their gradients."""

    def parts(self) -> Iterator[KeyPart]:
        """Hand out each part once, a rank's own first; the next ones are on their way while it is used."""

    def add(self, part: KeyPart, grad_2BJSP: Tensor) -> None:
        """Take the gradient of the part that was handed out last."""

    def gradient(self) -> Tensor:
        """Return the gradient of this rank's keys and values [2, B, J, S, P], once all parts are through."""


def own_part(kv_2BJSP: Tensor, rank: int) -> KeyPart:
    """Return the part that needs no exchange."""
    return KeyPart(kv_2BJSP, slice(rank, rank + 1), early_keys=False, late_queries=False, causal=True)


def early(x: Tensor, dim: int) -> Tensor:
    """Return the first of two chunks."""
    return x.narrow(dim, 0, x.shape[dim] // 2)
