"""Describe groups of consecutive rows: the end of each, on the device, and, if anything asks, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor


class Groups:
    """Groups of consecutive rows, the first from row 0 on.

    Attributes:
        ends_E: end of each group, int32, on the device of the rows.
    """

    def __init__(self, ends_E: Tensor, rows_E: Sequence[int] | None = None) -> None:
        """Describe groups by their ends and, if the host knows it, how many rows each has."""
        self.ends_E = ends_E
        self._rows_E = None if rows_E is None else list(rows_E)

    @property
    def operands(self) -> tuple[Tensor]:
        """Return the tensors in it, for the choice of an implementation."""
        return (self.ends_E,)

    @property
    def on_host(self) -> bool:
        """Return whether the host knows the numbers of rows."""
        return self._rows_E is not None

    def rows(self) -> list[int]:
        """Return how many rows each group has: the first time, the host waits for the device to learn it."""
        if self._rows_E is None:
            self._rows_E = [end - start for start, end in pairwise([0, *self.ends_E.tolist()])]
        return self._rows_E
