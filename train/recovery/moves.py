"""A planned move: all ranks hold at one step's boundary, and some of them continue on another node.

    a move is planned   the server sets a key (generation.py); each rank's watcher sees it sooner or later
    agree               how many have seen it is one of the sums of a step: once all have, they hold after it
    hold                every rank copies the state of the boundary, and waits until its buddy has it whole
    generation          once all have, the server publishes it; what follows is a recovery that goes back no step
    leave               the processes whose place was taken end in order, and with them those that waited there

No rank waits for another one before they have agreed. If the generation does not follow, as when a rank is
lost before that or the supervisor is gone, they train on after a while, and the server learns of it; if it follows
then, they come back to the boundary from their copies, as after a fault.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch.distributed as dist

from zslurm.train.errors import MovedOff
from zslurm.train.recovery.generation import Generation, boundary_key, held_key, unmoved_key
from zslurm.train.recovery.watcher import GenerationWatcher

_LOG = logging.getLogger(__name__)
_HOLD_S = 30.0
"""Seconds that ranks hold for a generation, before they train on."""
_POLL_S = 0.002


class PlannedMoves:
    """One rank's part in planned moves.

    Attributes:
        due: the ranks have agreed to hold before the next step.
    """

    def __init__(self, store: dist.Store, watcher: GenerationWatcher, member: str) -> None:
        """Take part as `member`."""
        self._store, self._watcher, self._member, self._size = store, watcher, member, 0
        self._given_up = 0
        self.due = False

    def signal(self) -> float:
        """Return this rank's number in the sums of a step: 1 if it knows of a planned move."""
        planned = self._watcher.planned
        return float(planned > max(self._watcher.number, self._given_up))

    def agree(self, knowing: float, size: int, *, may_copy: bool) -> None:
        """Take the sum of these numbers of `size` ranks; they hold if all know, and a copy may begin."""
        self._size = size
        self.due = may_copy and knowing == self._size

    def hold(self, step: int, number: int, is_whole: Callable[[], bool]) -> bool:
        """Wait at a boundary, whose copy was begun, for the next generation; returns whether it is there.

        Args:
            step: of the boundary.
            number: of the present generation. The next one may be there already, after a fault.
            is_whole: returns whether the copy is whole.

        Raises:
            MovedOff: this process is no member of it.
            RuntimeError: the store is gone.
        """
        self.due = False
        watcher = self._watcher
        deadline, reported = time.monotonic() + _HOLD_S, False
        while watcher.number == number and time.monotonic() < deadline:
            if not reported and is_whole():
                reported = True
                if self._store.add(held_key(number + 1), 1) == self._size:
                    self._store.set(boundary_key(number + 1), str(step))
            time.sleep(_POLL_S)
        newest = watcher.newest
        if newest is None or newest.number == number:
            _LOG.warning("recovery: no move after step %d: its generation did not follow", step)
            self._given_up = number + 1
            self._store.set(unmoved_key(number + 1), "")
            return False
        leave_if_moved(newest, self._member)
        return True


def leave_if_moved(generation: Generation, member: str) -> None:
    """Return only in a process that the generation does not move its rank away from.

    Raises:
        MovedOff: it does.
    """
    if generation.leaves(member):
        raise MovedOff(
            f"generation {generation.number}: this rank continues on another node, this process is done"
        )
