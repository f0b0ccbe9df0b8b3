"""Best-fit decreasing: which bin each item goes into, for items of whole sizes.

Items are taken from the largest to the smallest; each goes into the bin with the least room that still takes it,
or into a new one (Johnson, "Near-optimal bin packing algorithms", 1973: at most 11/9 of the fewest bins, and a
few).

Equal items are placed together: the best bin for the first of them, with room r, is the best one for the next as
well until r // size of them are in it, because no other bin has room between size and r. So the work grows with
the number of different sizes and rooms, and items cost no more than an entry in a list. Finding the least
sufficient room is a look into one bit for each room, in words of 512 with one summary word above them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_WORD = 9  # bits of a room's number inside its word
_INSIDE = (1 << _WORD) - 1


class _Rooms:
    """The open bins by their room, and the least room of at least some size, in constant time."""

    def __init__(self) -> None:
        self._bins: dict[int, list[int]] = {}
        self._words: dict[int, int] = {}
        self._summary = 0

    def add(self, room: int, bins: list[int]) -> None:
        """Add bins that all have `room`."""
        if same_room := self._bins.get(room):
            same_room += bins
            return
        self._bins[room] = bins
        word = room >> _WORD
        self._words[word] = self._words.get(word, 0) | 1 << (room & _INSIDE)
        self._summary |= 1 << word

    def least(self, size: int) -> int | None:
        """Return the least room of at least `size`; None if no bin has it."""
        word = size >> _WORD
        bits = self._words.get(word, 0) >> (size & _INSIDE)
        if bits:
            return size + _lowest(bits)
        words = self._summary >> (word + 1)
        if not words:
            return None
        word += 1 + _lowest(words)
        return (word << _WORD) + _lowest(self._words[word])

    def take(self, room: int, most: int) -> list[int]:
        """Take away up to `most` of the bins with `room`, of which there is one."""
        bins = self._bins[room]
        taken = bins[-most:]
        del bins[-most:]
        if not bins:
            del self._bins[room]
            word = room >> _WORD
            self._words[word] &= ~(1 << (room & _INSIDE))
            if not self._words[word]:
                self._summary &= ~(1 << word)
        return taken


def best_fit_decreasing(sizes: NDArray[np.int64], capacity: int) -> tuple[NDArray[np.int64], int]:
    """Put items of `sizes`, int64 [k], each of 1 to `capacity`, into bins of `capacity`.

    Returns:
        The bin of each item, int64 [k], and how many bins there are. Equal arguments give equal results.

    Raises:
        ValueError: an item is larger than a bin, or has no size.
    """
    if sizes.size and (sizes.min() < 1 or sizes.max() > capacity):
        raise ValueError(f"items of {sizes.min()} to {sizes.max()} for bins of {capacity}")
    capacity = min(capacity, int(sizes.sum()))  # a larger bin is never filled, but needs a larger bitmap of rooms
    order = stable_order(capacity - sizes, capacity)
    ordered = sizes[order]
    first = np.flatnonzero(np.diff(ordered, prepend=0))  # of each size
    counts = np.diff(first, append=len(ordered))
    rooms, opened = _Rooms(), 0
    bins: list[int] = []  # of the items in `order`
    for size, remaining in zip(ordered[first].tolist(), counts.tolist(), strict=True):
        while remaining:
            room = rooms.least(size)
            if room is None:
                room = capacity
                new = -(-remaining // (capacity // size))
                chosen = list(range(opened, opened + new))
                opened += new
            else:
                chosen = rooms.take(room, -(-remaining // (room // size)))
            per_bin = room // size
            last = min(
                remaining - per_bin * (len(chosen) - 1), per_bin
            )  # of the last bin, which may not be filled
            full = chosen if last == per_bin else chosen[:-1]
            bins += full if per_bin == 1 else [index for index in full for _ in range(per_bin)]
            if full and room - per_bin * size:
                rooms.add(room - per_bin * size, list(full))
            if last < per_bin:
                bins += [chosen[-1]] * last
                rooms.add(room - last * size, [chosen[-1]])
            remaining -= len(full) * per_bin + (last if last < per_bin else 0)
    result = np.empty(len(order), np.int64)
    result[order] = bins
    return result, opened


def stable_order(keys: NDArray[np.int64], largest: int) -> NDArray[np.int64]:
    """Return the indices that sort keys of 0 to `largest`, equal ones in their order."""
    small = largest <= np.iinfo(np.uint16).max  # numpy sorts 16 bits by radix, several times as fast
    return np.argsort(keys.astype(np.uint16) if small else keys, kind="stable")


def _lowest(bits: int) -> int:
    """Return the number of the lowest bit that is set."""
    return (bits & -bits).bit_length() - 1
