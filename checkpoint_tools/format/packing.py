"""Packing things of unequal size into equal bins, as evenly as whole things allow: longest processing time.

The rule is Graham's (SIAM J. Appl. Math. 17, 1969): the largest thing that is left goes to the bin with the least
load so far. Two sizes are kept even at once. Cost decides; elements (memory) are capped: a bin that would exceed
the cap is passed over. If no bin has room, the one with the fewest elements takes the thing, over the cap.

`lower_bound` is how even whole things can be at all. Count every thing in units of u, rounded down: the fullest
of N bins then holds at least ceil(sum / N) units, so u * ceil(sum / N) is a bound, whatever u is. A small unit
gives the mean, one as large as a thing the pigeonhole bound, and one that divides all sizes shows where things do
not fit together: 640 of size 2 and 640 of size 1 leave one of 768 bins with 3, though the mean is 2.5.

Cost: O(K log N) comparisons for K things and N bins, more if the cap bites; some milliseconds for 1,640 things
on 1,024 bins.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_SLACK = 128  # bins may exceed the bound on elements by 1/128
_FRACTIONS = 8  # units that `lower_bound` tries: each size, divided by 1 to 8


@dataclass(frozen=True, slots=True)
class Size:
    """How large a thing is: the time it takes, and the room."""

    cost: int
    elements: int


def pack(sizes: Sequence[Size], bins: int) -> list[int]:
    """Return the bin of each thing.

    `sizes` come largest cost first, and the same sizes always get the same bins.
    """
    bound = lower_bound((size.elements for size in sizes), bins)
    cap = bound + bound // _SLACK
    elements = [0] * bins
    loads = [(0, bin_) for bin_ in range(bins)]  # a heap: the least cost first, the lowest number among equals
    owners = []
    for size in sizes:
        full = []
        while loads and elements[loads[0][1]] + size.elements > cap:
            full.append(heapq.heappop(loads))
        if not loads:
            roomiest = min(full, key=lambda load: (elements[load[1]], load))
            full.remove(roomiest)
            loads.append(roomiest)
        cost, owner = loads[0]
        heapq.heapreplace(loads, (cost + size.cost, owner))
        elements[owner] += size.elements
        owners.append(owner)
        for load in full:
            heapq.heappush(loads, load)
    return owners


def lower_bound(sizes: Iterable[int], bins: int) -> int:
    """Return a load that the fullest of `bins` bins reaches however things of these sizes are packed.

    0 for none.
    """
    counts = Counter(sizes)
    bound = _ceil(sum(size * count for size, count in counts.items()), bins)
    for largest in counts:
        for fraction in range(1, _FRACTIONS + 1):
            # the unit is largest / fraction; sizes are whole, so the bound may be rounded up
            units = sum(count * (size * fraction // largest) for size, count in counts.items() if largest)
            bound = max(bound, _ceil(_ceil(units, bins) * largest, fraction))
    return bound


def _ceil(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
