"""Ranks that hang.

A rank that is over the limit of its phase shows that something hangs, not which rank: the others wait for it in a
collective. Named are those whose process is stopped; else those that lag: the lowest step, and there those that
have not done their own part of it (`RankProgress.waiting`); among several at work, those whose progress is clearly
the oldest. While they are within the limit of their phase, as a rank that writes a checkpoint, the others may
wait. If all are at the same point, none is singled out: one fault without a rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from zslurm.aegis.core.detection.attempt_progress import AttemptProgress
from zslurm.aegis.fault_kinds import RANK_HANG
from zslurm.aegis.protocol import RankProgress
from zslurm.aegis.types import Fault
from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.progress import Phase

# Ages nearer to each other than this do not show who lags.
_DISTINCT_S, _TOGETHER_S = 2.0, 1.0
# More ranks than this are not named one by one.
_MOST_NAMED = 64


def _is_unobserved(row: RankProgress | None) -> bool:
    """Return whether a rank runs a program that shows nothing: one that shows its progress may wait for it."""
    return row is not None and row.phase is Phase.UNOBSERVED and not row.halted


class Hangs:
    """Finds ranks that hang in the progress of an attempt."""

    def __init__(self, progress: AttemptProgress) -> None:
        """Know of no hang at the start of an attempt."""
        self._progress = progress
        self._named: set[int | None] = set()

    def forget(self) -> None:
        """Know of no hang any more: the ranks have regrouped."""
        self._named.clear()

    def is_suspected(self, now: float) -> bool:
        """Return whether a rank has passed its limit, or should have begun by now and has left no sign of it."""
        progress = self._progress
        if progress.over_limit:
            return True
        if progress.front >= 0 or now - progress.began <= progress.settings.hang.setup_s:
            return False
        return any(progress.is_missing(rank) for rank in progress.ranks)

    def check(self, now: float, wall: float) -> list[Fault]:
        """Return the ranks that hang and were not named before; `wall` (UNIX seconds) is written into them."""
        progress = self._progress
        unheard = progress.unheard(now)
        alive = [
            number
            for number, rank in enumerate(progress.ranks)
            if not rank.ended and rank.node not in unheard and (rank.row is not None or progress.is_missing(rank))
        ]
        unobserved = [number for number in alive if _is_unobserved(progress.ranks[number].row)]
        alive = [number for number in alive if number not in unobserved]
        lag = self._lagging(alive, now)
        late = [number for number in lag if self._age(number, now) > self._limit_of(number)]
        if not late:
            return []
        together = len(lag) == len(alive) and (len(alive) > 1 or unobserved)
        if together or len(late) > _MOST_NAMED:
            return self._hang_of_all(late, len(alive), now, wall)
        fresh = [number for number in late if number not in self._named]
        self._named.update(fresh)
        return [self._hang_of(number, len(alive) - len(lag), len(alive), now, wall) for number in fresh]

    def _hang_of_all(self, late: Sequence[int], alive: int, now: float, wall: float) -> list[Fault]:
        """Return one fault without a rank, once."""
        if None in self._named:
            return []
        self._named.add(None)
        age = min(self._age(number, now) for number in late)
        which = f"{len(late)} of {counted(alive, 'rank')}"
        line = f"{which} stand still {self._where(late[0])} for {age:.0f} s, and none is behind"
        return [Fault.of_kind(RANK_HANG, wall, "progress", line, step=self._step_of(late[0]))]

    def _hang_of(self, number: int, further: int, alive: int, now: float, wall: float) -> Fault:
        node = self._progress.ranks[number].node
        line = (
            f"rank {number} on {node} made no progress for {self._age(number, now):.0f} s "
            f"{self._where(number)} (limit {self._limit_of(number):.0f} s); "
            f"{further} of {counted(alive, 'rank')} are further"
        )
        return Fault.of_kind(
            RANK_HANG, wall, "progress", line,
            node=node, rank=number, step=self._step_of(number),
        )  # fmt: skip

    def _lagging(self, alive: Sequence[int], now: float) -> list[int]:
        """Return the ranks that the others wait for, the one without progress for longest first."""
        if not alive:
            return []
        ranks, ages = self._progress.ranks, {number: self._age(number, now) for number in alive}
        lag = [number for number in alive if (row := ranks[number].row) is not None and row.halted]
        if not lag:
            lowest = min(ranks[number].position for number in alive)
            lag = [number for number in alive if ranks[number].position == lowest]
            oldest = max(ages[number] for number in lag)
            _, waiting = lowest
            if not waiting and oldest - min(ages[number] for number in lag) >= _DISTINCT_S:
                lag = [number for number in lag if ages[number] >= oldest - _TOGETHER_S]
        return sorted(lag, key=lambda number: -ages[number])

    def _age(self, number: int, now: float) -> float:
        row = self._progress.ranks[number].row
        return now - self._progress.began if row is None else self._progress.age(row, now)

    def _limit_of(self, number: int) -> float:
        row = self._progress.ranks[number].row
        return self._progress.limit(Phase.SETUP if row is None else row.phase)

    def _step_of(self, number: int) -> int | None:
        row = self._progress.ranks[number].row
        return row.step if row is not None and row.step >= 0 else None

    def _where(self, number: int) -> str:
        row = self._progress.ranks[number].row
        if row is None:
            return "before it could say that it had started"
        if row.phase is Phase.STEP:
            how = ", its process stopped" if row.halted else ", waiting for others" if row.waiting else ""
            return f"in step {row.step + 1}{how}"
        return {
            Phase.SETUP: "in its setup",
            Phase.SAVE: f"saving after step {row.step}",
            Phase.EVAL: f"in the evaluation after step {row.step}",
            Phase.ALIVE: "without a sign of life",
        }.get(row.phase, "at its end")
