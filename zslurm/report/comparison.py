"""How two runs differ: configuration, curves, throughput and faults.

Curves are compared at the steps that both runs kept, and by tokens if their batches differ. "The same" is bit
for bit: two runs of one configuration on the same kind of machine have the same losses to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from zslurm.report.efficiency import median
from zslurm.report.run_facts import RunFacts, flat
from zslurm.report.thinning import smooth

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MISSING = None
_PLACES = ("run.name", "run.runs_dir")
"""Keys that differ between any two runs."""

_CURVES = ("loss", "grad_norm", "lr")


@dataclass(frozen=True)
class KeyDifference:
    """A key of the configuration with its values in both runs; None if a run does not have it."""

    key: str
    first: Any
    second: Any


@dataclass(frozen=True)
class CurveDifference:
    """A curve of both runs over the steps, or the tokens, that both reached.

    Attributes:
        name: a column of the metrics.
        by: `step` or `tokens`.
        points: how many both have.
        same_until: both are the same bit for bit up to here; None if they differ at once.
        at: the last point that both have.
        first, second: smoothed values there.
        largest: the largest difference of the smoothed values, second minus first.
        largest_at: its place.
    """

    name: str
    by: str
    points: int
    same_until: int | None
    at: int
    first: float
    second: float
    largest: float
    largest_at: int

    @property
    def is_same(self) -> bool:
        """Whether both are the same bit for bit."""
        return self.same_until == self.at


@dataclass(frozen=True)
class FigureDifference:
    """A figure of both runs; `ratio` is the second over the first."""

    name: str
    first: float | None
    second: float | None

    @property
    def ratio(self) -> float | None:
        """The second over the first, if both are known."""
        return self.second / self.first if self.first and self.second is not None else None


@dataclass(frozen=True)
class RunComparison:
    """How the second run differs from the first."""

    names: tuple[str, str]
    config: Sequence[KeyDifference]
    curves: Sequence[CurveDifference]
    figures: Sequence[FigureDifference]
    faults: tuple[Sequence[str], Sequence[str]]

    def to_json(self) -> dict[str, Any]:
        """Return everything as values of JSON."""
        return {
            "runs": list(self.names),
            "configuration": [asdict(row) for row in self.config],
            "curves": [asdict(row) | {"same": row.is_same} for row in self.curves],
            "figures": [asdict(row) | {"ratio": row.ratio} for row in self.figures],
            "faults": [list(fault_row) for fault_row in self.faults],
        }


def compare(first: RunFacts, second: RunFacts) -> RunComparison:
    """Return how `second` differs from `first`."""
    return RunComparison(
        (first.run.name, second.run.name),
        list(_configuration(first, second)),
        [curve for name in _CURVES if (curve := _curve(name, first, second)) is not None],
        list(_figures(first, second)),
        (_faults(first), _faults(second)),
    )


def _configuration(first: RunFacts, second: RunFacts) -> Iterator[KeyDifference]:
    first_values, second_values = dict(flat(dict(first.config))), dict(flat(dict(second.config)))
    for key in dict.fromkeys([*first_values, *second_values]):
        if key not in _PLACES and first_values.get(key, _MISSING) != second_values.get(key, _MISSING):
            yield KeyDifference(key, first_values.get(key, _MISSING), second_values.get(key, _MISSING))


def _curve(name: str, first: RunFacts, second: RunFacts) -> CurveDifference | None:
    import numpy as np

    first_rows, second_rows = first.metrics.steps, second.metrics.steps
    if name not in first_rows or name not in second_rows:
        return None
    by = "step" if _same_tokens(first_rows, second_rows) else "tokens"
    if by == "tokens" and not ("tokens" in first_rows and "tokens" in second_rows):
        by = "step"
    common, at_one, at_other = np.intersect1d(first_rows[by], second_rows[by], return_indices=True)
    if by == "tokens" and len(common) < 2:
        return _interpolated(name, first_rows, second_rows)
    if not len(common):
        return None
    first_curve, right = first_rows[name][at_one], second_rows[name][at_other]
    differ = np.flatnonzero((first_curve != right) & ~(np.isnan(first_curve) & np.isnan(right)))
    same = int(common[differ[0] - 1]) if len(differ) and differ[0] else None if len(differ) else int(common[-1])
    return _difference(name, by, common, first_curve, right, same)


def _same_tokens(one: dict[str, NDArray[np.float64]], other: dict[str, NDArray[np.float64]]) -> bool:
    """Return whether the same step means the same number of tokens in both runs."""
    import numpy as np

    if "tokens" not in one or "tokens" not in other:
        return True
    _, at_one, at_other = np.intersect1d(one["step"], other["step"], return_indices=True)
    return bool(np.array_equal(one["tokens"][at_one], other["tokens"][at_other]))


def _interpolated(
    name: str, one: dict[str, NDArray[np.float64]], other: dict[str, NDArray[np.float64]]
) -> CurveDifference | None:
    """Compare curves at the tokens of the first, interpolated in the second."""
    import numpy as np

    inside = (one["tokens"] >= other["tokens"][0]) & (one["tokens"] <= other["tokens"][-1])
    if not inside.any():
        return None
    common, first_curve = one["tokens"][inside], one[name][inside]
    right = np.interp(common, other["tokens"], other[name])
    return _difference(name, "tokens", common, first_curve, right, None)


def _difference(
    name: str,
    by: str,
    common: NDArray[np.float64],
    left: NDArray[np.float64],
    right: NDArray[np.float64],
    same: int | None,
) -> CurveDifference:
    import numpy as np

    span = max(5.0, min(200.0, len(common) / 50))
    first_smooth, second_smooth = smooth(left, span), smooth(right, span)
    gap = np.nan_to_num(second_smooth - first_smooth)
    largest = int(np.abs(gap).argmax())
    return CurveDifference(
        name, by, len(common), same, int(common[-1]), float(first_smooth[-1]), float(second_smooth[-1]),
        float(gap[largest]), int(common[largest]),
    )  # fmt: skip


def _figures(first: RunFacts, second: RunFacts) -> Iterator[FigureDifference]:
    figures: dict[str, Callable[[RunFacts], float | None]] = {
        "steps": lambda facts: facts.state.step,
        "loss, smoothed": _last_loss,
        "validation loss": lambda facts: facts.state.evaluation_loss,
        "tokens/s, median": lambda facts: median(facts.metrics, "tokens_per_s"),
        "step time, median (s)": lambda facts: median(facts.metrics, "step_time_s"),
        "MFU, median": lambda facts: median(facts.metrics, "mfu"),
        "goodput": lambda facts: facts.timeline.goodput,
        "wall time (s)": lambda facts: facts.timeline.wall_s or None,
        "attempts": lambda facts: len(facts.timeline.attempts),
        "failures": lambda facts: facts.timeline.failures,
        "steps lost": lambda facts: sum(attempt.lost for attempt in facts.timeline.attempts),
        "checkpoint stall (s)": lambda facts: sum(saved.stall_s for saved in facts.checkpoints),
    }
    for name, of in figures.items():
        first_figure, second_figure = of(first), of(second)
        if first_figure is not None or second_figure is not None:
            yield FigureDifference(name, first_figure, second_figure)


def _last_loss(facts: RunFacts) -> float | None:
    loss = facts.metrics.steps.get("loss")
    return (
        float(smooth(loss, max(5.0, min(200.0, len(loss) / 50)))[-1]) if loss is not None and len(loss) else None
    )


def _faults(facts: RunFacts) -> list[str]:
    return [happening.text for happening in facts.happenings if happening.sort == "fault"]
