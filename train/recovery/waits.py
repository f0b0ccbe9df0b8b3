"""Waits for gloo's operations that an abort ends, whatever gloo does.

If a connection breaks, gloo wakes whoever waits for a message that has not begun. It does not wake one who
waits for a message that is under way, received or sent in part, nor one whose write has just failed: they wait for
the whole timeout of the group, minutes (`Pair::signalException` in gloo/transport/tcp/pair.cc passes over `rx_`
and over the unbound buffers in `tx_`). A large tensor is nearly always under way.

So a wait is made of short ones here, between which it looks whether its groups were aborted. The operation stays
behind in a thread of its group until the timeout. It touches no tensor any more: the connections are closed, and
it raises. The destructor of its group waits for that thread, in whichever thread drops the group last: so one of
ours holds the groups that were left until nothing else does.

Messages between two ranks are waited for as ever: a timeout of gloo's own wait for them closes all connections.

Cost: nothing for an operation that takes less than SLICE_S; longer ones raise and catch a timeout that often.
"""

from __future__ import annotations

import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import OpType  # type: ignore[attr-defined]
from torch.distributed import Work

SLICE_S = 0.05
_SHORTEST_S = 0.001
_HELD_S = 0.5
"""Seconds between two looks whether something else holds a group that was left."""
_NO_TIMEOUT = timedelta(0)
_TIMED_OUT = "Operation timed out!"
_BETWEEN_TWO = {int(OpType.SEND), int(OpType.RECV), int(OpType.RECVANYSOURCE)}
_ABORTED = "gloo: the operation was left, for its group was aborted"


class Waits:
    """The waits of this process for operations of its groups.

    Attributes:
        aborts: how many there were.
        aborted: whether the groups that there are were aborted, and there are no new ones yet.
    """

    def __init__(self) -> None:
        """Nothing was aborted."""
        self.aborts, self.aborted = 0, False
        self._original: Any = None
        self._ours = lambda work, timeout=_NO_TIMEOUT: self.wait(work, timeout)
        self._left: list[dist.ProcessGroup] = []

    def install(self) -> None:
        """Make every wait for an operation, inside of torch too, one that `abort` ends."""
        if Work.wait is not self._ours:
            self._original = Work.wait
            Work.wait = self._ours  # type: ignore[method-assign]

    def abort(self) -> None:
        """End all waits, and those that begin before there are new groups."""
        self.aborts, self.aborted = self.aborts + 1, True

    def resume(self) -> None:
        """Wait again: new groups are being made."""
        self.aborted = False

    def wait(self, work: Work, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait for an operation.

        Raises:
            RuntimeError: it failed, took longer than `timeout`, or its group was aborted.
        """
        if work._get_op_type() in _BETWEEN_TWO:  # type: ignore[attr-defined]
            return bool(self._original(work, timeout))
        began, slices = self.aborts, timeout.total_seconds() / SLICE_S
        while True:
            try:
                pause = _SHORTEST_S if self.aborted else SLICE_S
                return bool(self._original(work, timedelta(seconds=pause)))
            except RuntimeError as error:
                if _TIMED_OUT not in str(error):
                    raise
                slices -= 1
                if timeout and slices <= 0:
                    raise
            if self.aborted or self.aborts != began:
                raise RuntimeError(_ABORTED)

    def leave_groups(self) -> None:
        """Take all groups out of torch's hands; what waited in them has raised."""
        if dist.is_initialized():
            self._left += dist.distributed_c10d._world.pg_map
            dist.destroy_process_group()

    def drop_groups(self) -> None:
        """Drop the groups that were left, once nothing else holds them: without a wait for what hangs in them."""
        old_groups, self._left = self._left, []
        if old_groups:
            threading.Thread(target=_drop, args=(old_groups,), name="groups left", daemon=True).start()


def _drop(groups: list[dist.ProcessGroup]) -> None:
    """Empty a list of groups, each of them once nothing else holds it."""
    alone = [object()]
    while groups:
        for index in reversed(range(len(groups))):
            if sys.getrefcount(groups[index]) <= sys.getrefcount(alone[0]):
                del groups[index]
        if groups:
            time.sleep(_HELD_S)


WAITS = Waits()
"""Of this process, which is one rank."""
