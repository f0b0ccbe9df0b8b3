"""Keeps the newest checkpoint in the page cache of a spare node, for a restart in which it takes another's place.

A replacement reads what the ranks of the lost node would have read. Which node that will be is not known, so a
spare reads every shard of the newest committed checkpoint, and starts anew when a newer one is committed. What it
reads is bounded: at most half of what the page cache has room for; shards beyond that are left out. A checkpoint
that was read is read again every 15 minutes; what is still in memory then costs the storage nothing, and what the
file system has given up (Lustre drops pages with their locks) comes back.

The idle class of disk schedulers reaches no server of a shared file system, where ranks read data and write
checkpoints meanwhile. So all spares of the job together read at most `aegis.warm_spares_gb_s`, in equal shares.

The thread has the lowest priority of processor and disk. It stops, in the middle of a file, when the supervisor
has the node checked before its use, when an attempt begins that uses the node, when a rank runs on it (which takes
the place of another one in the same attempt), and when the agent ends. Only nodes of a Slurm job can be spares.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zslurm.aegis.agent.sensor import NodeContext
from zslurm.checkpoint_tools.format import layout
from zslurm.checkpoint_tools.listing import newest_committed
from zslurm.core.files import read_json
from zslurm.hardware import page_cache
from zslurm.run.events import Readmitted
from zslurm.run.events.event import select
from zslurm.run.exclusions import active_exclusions, exclusions_in
from zslurm.run.state.state_events import read_state_events
from zslurm.slurm.hostlist import expand
from zslurm.train.jsonl import read_jsonl
from zslurm.train.niceness import lower_thread

SHARE_OF_ROOM = 0.5
"""Of the page cache's room, how much a checkpoint may take."""

AGAIN_S = 900.0
"""Seconds after which a checkpoint that was read is read again."""

_LOWEST = 19
_BLOCK = 4 << 20  # bytes that are read between two looks at whether to stop


@dataclass(frozen=True)
class Warmed:
    """A checkpoint that was read into the page cache of this node.

    Attributes:
        step: of the checkpoint.
        bytes: that were read.
        of: bytes that its files have; more than `bytes` where they would not fit.
        seconds: that it took.
    """

    step: int
    bytes: int
    of: int
    seconds: float


class SpareWarmer:
    """Reads checkpoints while this node is a spare."""

    def __init__(
        self,
        context: NodeContext,
        attempt: Callable[[], int],
        stop: threading.Event,
        done: Callable[[Warmed], None],
    ) -> None:
        """Prepare; `start` begins.

        Args:
            context: the node, and the run.
            attempt: number of the present attempt; 0 before the first.
            stop: ends the thread.
            done: gets each checkpoint that was read, once.
        """
        self._context, self._attempt, self._stop, self._done = context, attempt, stop, done
        self._halted_in = -1
        self._known = ((0, 0), 0)
        self._last, self._last_at = ("", 0), 0.0  # the checkpoint that was read, and when

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._work, name="warm-spare", daemon=True).start()

    def halt(self) -> None:
        """Stop reading until another attempt begins: this node is about to be used."""
        self._halted_in = self._attempt()

    def _work(self) -> None:
        _lower_priority()
        while not self._stop.wait(self._context.settings.period_s):
            if (warmed := self.look()) is not None:
                self._done(warmed)

    def _may_read(self) -> bool:
        """Return whether this node is a spare, and not about to be used."""
        attempt = self._attempt()
        if self._stop.is_set() or attempt == self._halted_in:
            return False
        return self._spares(attempt) > 0 and not self._has_ranks(attempt)

    def _has_ranks(self, attempt: int) -> bool:
        """Return whether ranks have records of progress here: one may be replaced by a spare in mid-attempt."""
        try:
            return any(self._context.run.attempt(attempt).progress(self._context.environ).iterdir())
        except OSError:
            return False

    def _spares(self, attempt: int) -> int:
        """Return how many spares the attempt has; 0 if this node is used or excluded, or no attempt began."""
        if not attempt or self._context.cluster.launcher != "slurm":
            return 0
        if self._known[0] != (attempt, self._events_size()):
            described = read_json(self._context.run.attempt(attempt).description)
            if described is None or not isinstance(described.get("nodes"), str):
                return 0
            used, job = expand(described["nodes"]), self._context.environ.get("SLURM_JOB_NODELIST", "")
            spares = set(expand(job) or [self._context.node]).difference(used, self._excluded())
            key = attempt, self._events_size()  # a node may be excluded in mid-attempt
            self._known = key, len(spares) if self._context.node in spares else 0
        return self._known[1]

    def _events_size(self) -> int:
        try:
            return self._context.run.events.stat().st_size
        except OSError:
            return 0

    def _excluded(self) -> set[str]:
        """Return the nodes that the run does not use now."""
        run = self._context.run
        events = [*read_state_events(run.events).events, *select(read_jsonl(run.submissions), Readmitted)]
        return set(active_exclusions(exclusions_in(events), time.time()))

    def _rate(self) -> float:
        """Return the bytes a second of this spare."""
        return self._context.aegis.warm_spares_gb_s * 1e9 / max(1, self._spares(self._attempt()))

    def look(self) -> Warmed | None:
        """Read the newest checkpoint where this node is a spare; return it, unless it was read before.

        A file system that fails, a checkpoint that is pruned meanwhile, and a stop are None: the next look starts
        again.
        """
        if not self._may_read():
            return None
        try:
            return self._read_newest()
        except OSError:
            return None

    def _read_newest(self) -> Warmed | None:
        root, room = self._context.run.checkpoints, page_cache.room(self._context.root)
        newest = newest_committed(root)
        if newest is None or room is None:
            return None
        name = newest.name, (newest / layout.MANIFEST).stat().st_mtime_ns  # a step may be saved a second time
        if name == self._last and time.monotonic() - self._last_at < AGAIN_S:
            return None
        began, size = time.monotonic(), 0
        files = [(path, path.stat().st_size) for path in files_of(newest)]
        pace = Pace(self._rate(), self._stop)
        for path, expected in files:
            if size + expected > SHARE_OF_ROOM * room:
                continue
            if not read_through(path, self._may_read, pace) or newest_committed(root) != newest:
                return None
            size += expected
        known, self._last, self._last_at = name == self._last, name, time.monotonic()
        if known:
            return None
        seconds = round(time.monotonic() - began, 3)
        return Warmed(layout.step_of(newest.name) or 0, size, sum(expected for _, expected in files), seconds)


class Pace:
    """Keeps the mean rate of reads at or below a limit."""

    def __init__(self, rate: float, stop: threading.Event) -> None:
        """Allow `rate` bytes a second from now on; `stop` ends a wait."""
        self._rate, self._stop = rate, stop
        self._began, self._bytes = time.monotonic(), 0

    def wait_after(self, count: int) -> None:
        """Count bytes that were read, and wait as long as they may take."""
        self._bytes += count
        ahead = self._began + self._bytes / self._rate - time.monotonic()
        if ahead > 0:
            self._stop.wait(min(ahead, threading.TIMEOUT_MAX))


def files_of(checkpoint: Path) -> list[Path]:
    """Return the files of a checkpoint, its manifest first, then the shards by rank.

    Raises:
        OSError: it cannot be listed.
    """
    return sorted(checkpoint.iterdir(), key=lambda path: (path.name != layout.MANIFEST, path.name))


def read_through(path: Path, proceed: Callable[[], bool], pace: Pace) -> bool:
    """Read a file from its start to its end, in blocks.

    Returns:
        False where `proceed`, which is asked before every block, stopped that.

    Raises:
        OSError: the file system refused.
    """
    block, offset = bytearray(_BLOCK), 0
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while proceed():
            if not (count := os.preadv(descriptor, [block], offset)):
                return True
            offset += count
            pace.wait_after(count)
    finally:
        os.close(descriptor)
    return False


def _lower_priority() -> None:
    """Give way to everything else on this node and on its disks."""
    lower_thread(_LOWEST)
    with suppress(ImportError, OSError, AttributeError):
        import psutil  # only on spares

        psutil.Process(threading.get_native_id()).ionice(psutil.IOPRIO_CLASS_IDLE)
