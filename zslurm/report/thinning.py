"""Fewer points of a curve that show what all of them would: every peak and every dip stays.

A screen has about a thousand columns. Of the points that fall into one column the lowest and the highest are kept,
so a spike of one step in a hundred thousand is as high in the plot as it was (Jugel et al., M4, VLDB 2014, without
the first and last of each column, which only matter for lines that are drawn to the pixel).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

COLUMNS = 400
"""Columns of a plot; a curve has at most twice as many points, and its ends."""


def keep_extremes(
    x: NDArray[np.float64], y: NDArray[np.float64], columns: int = COLUMNS
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the ends, and the lowest and highest point of each column, in order; NaN is left out."""
    import numpy as np

    sound = np.isfinite(x) & np.isfinite(y)
    x, y = x[sound], y[sound]
    if len(x) <= 2 * columns + 2:
        return x, y
    column = _column_of(x, columns)
    order = np.lexsort((y, column))  # by column, and within it from the lowest to the highest
    starts = np.flatnonzero(np.diff(column[order], prepend=-1))
    ends = np.append(starts[1:], len(x)) - 1
    kept = np.unique(np.concatenate([[0, len(x) - 1], order[starts], order[ends]]))
    return x[kept], y[kept]


def column_means(
    x: NDArray[np.float64], y: NDArray[np.float64], columns: int = COLUMNS
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the mean point of each column; columns without points are left out."""
    import numpy as np

    sound = np.isfinite(x) & np.isfinite(y)
    x, y = x[sound], y[sound]
    if len(x) <= columns:
        return x, y
    column = _column_of(x, columns)
    counts = np.bincount(column, minlength=columns)
    used = counts > 0
    means = [np.bincount(column, values, minlength=columns)[used] / counts[used] for values in (x, y)]
    return means[0], means[1]


def _column_of(x: NDArray[np.float64], columns: int) -> NDArray[np.int64]:
    import numpy as np

    low, high = float(x.min()), float(x.max())
    if high == low:
        return np.zeros(len(x), np.int64)
    return np.minimum(((x - low) / (high - low) * columns).astype(np.int64), columns - 1)


def smooth(y: NDArray[np.float64], span: float) -> NDArray[np.float64]:
    """Return the exponential moving average of a curve, over about `span` points, without a bias at its begin."""
    import numpy as np

    decay = 1 - 2 / (span + 1)
    out, value, weight = np.empty_like(y), 0.0, 0.0
    for index, point in enumerate(y):
        if point == point:  # a step without a number changes nothing
            value, weight = decay * value + (1 - decay) * point, decay * weight + (1 - decay)
        out[index] = value / weight if weight else np.nan
    return out
