"""Which ranks are killed alone if ranks hang, so that the others continue with other processes in their place.

A rank that is over the limit of its phase shows that something hangs, not who. Who that is, witnesses show: the
ranks' progress (detection/hangs.py), the dumps of flight recorders (detection/flight_records.py), and the RAS
service of the collective library. A rank is killed alone only if those that know something agree, and the
others wait for it. A hang inside a device call goes down a rung: nothing interrupts it, and its process holds what
its neighbours need.

Pure: what the witnesses found comes from the caller.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from zslurm.checkpoint_tools.quantities import counted

IN_DEVICE = "stuck"
"""How flight recorders find a rank that did not finish what another rank has finished: its device hangs."""


@dataclass(frozen=True)
class Witnesses:
    """Who hangs, by what.

    Attributes:
        progress: ranks that lag by their progress.
        unnamed: ranks stand still, and none lags by their progress.
        recorded: ranks that the flight recorders name, and how.
        behind: ranks that the RAS service shows behind the others.
    """

    progress: frozenset[int] = frozenset()
    unnamed: bool = False
    recorded: Mapping[int, str] = field(default_factory=dict)
    behind: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Hanging:
    """What to do about ranks that hang.

    Attributes:
        ranks: to kill alone; none if every rank must be started again.
        reason: why no rank is killed alone; empty if some are.
    """

    ranks: frozenset[int] = frozenset()
    reason: str = ""


def who_hangs(found: Witnesses) -> Hanging:
    """Return which ranks are to be killed alone, or why none is."""
    if stuck := sorted(rank for rank, how in found.recorded.items() if how == IN_DEVICE):
        return Hanging(
            reason=f"{_ranks(stuck)} did not finish an operation that another rank has finished: it hangs inside "
            "a device call, which nothing can interrupt"
        )
    named = {
        what: ranks
        for what, ranks in (
            ("their progress", found.progress),
            ("the flight recorders", frozenset(found.recorded)),
            ("the RAS service", found.behind),
        )
        if ranks
    }
    if not named:
        return Hanging(reason="no rank lags behind the others, so none can be replaced alone")
    if found.unnamed and len(named) == 1 and found.behind:
        return Hanging(reason="only the RAS service names a rank, and one witness is not enough where none lags")
    agreed = frozenset.intersection(*named.values())
    if not agreed:
        said = "; ".join(f"{_ranks(ranks)} by {what}" for what, ranks in named.items())
        return Hanging(reason=f"the witnesses do not agree who hangs: {said}")
    return Hanging(agreed)


def _ranks(ranks: Collection[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:8]))
    return f"rank {shown}" if len(ranks) == 1 else f"{counted(len(ranks), 'rank')} ({shown})"
