"""Write checkpoints in the background: what one rank does for a save while it trains.

    REQUESTED   at a step boundary: the copy into staging begins, training continues
    STAGED      the values are in host memory; from here on the tensors may change
    WRITTEN     this rank's shard is written, checksummed and synced, and reported through the store
    COMMITTED   on rank 0: all ranks have reported, the manifest is written, and the checkpoint is visible;
                elsewhere: rank 0 reported so
    FAILED      a rank could not write, or rank 0 not commit; nothing half-written is taken for a checkpoint

One thread per rank does all of it, at low CPU and I/O priority, over a second connection to the store. There are
no collectives, and no rank looks at another's files. What a rank reports goes through keys:

    directory     the one to write to                 rank 0
    shard/R       size, checksums and extents         each rank, or why it could not write
    committed     the checkpoint's path and bytes     rank 0, or the first reason why there is none

A save is in progress until its rank has read `committed`. The next one waits for that: whether any rank is still
busy is for the ranks to agree upon, see `SaveSchedule`. Waiting has a limit, after which a rank that does not
answer is an error.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil
import torch.distributed as dist

from zslurm.checkpoint_tools import (
    BufferEntry,
    CheckpointError,
    Entry,
    Manifest,
    NoSpace,
    ShardReport,
    WriteFailed,
    begin,
    commit,
    discard,
    write_shard,
)
from zslurm.checkpoint_tools.plain import reason_of
from zslurm.checkpoint_tools.quantities import show_bytes
from zslurm.train.checkpointing.snapshot import Snapshot
from zslurm.train.niceness import lower_thread

_LOWEST_IO = 7  # of the best-effort class: last in the queue, but never starved as the idle class may be
_GIVEN_UP = "it was given up, for the ranks regroup"
NEEDS = "a checkpoint needs about"
"""In messages of a full disk, before the size."""
_POLL_S = (0.005, 0.25)  # seconds between two looks at a key: first, and at most


class SaveState(StrEnum):
    """How far a save is."""

    REQUESTED = "REQUESTED"
    STAGED = "STAGED"
    WRITTEN = "WRITTEN"
    COMMITTED = "COMMITTED"
    FAILED = "FAILED"


@dataclass(frozen=True)
class Reached:
    """A save came to a state, `seconds` after the request."""

    step: int
    state: SaveState
    seconds: float
    bytes: int = 0  # of this rank's state or shard; of all shards when COMMITTED
    path: Path | None = None  # the checkpoint, when COMMITTED
    reason: str = ""  # why, when FAILED
    full: bool = False  # it FAILED because the disk or the quota is full


@dataclass(frozen=True)
class SaveRequest:
    """One save, from the training loop to the commit; the same on all ranks but for the buffers."""

    step: int  # steps that are done
    tokens: int  # tokens that they trained on
    # what a resumed run needs besides tensors, as plain JSON; "best" is the best checkpoint so far
    cursor: Mapping[str, Any]
    state: Mapping[str, int]  # steps that the optimizer and the balancing of experts count
    buffers: Sequence[BufferEntry]  # small arrays of this rank, already copied
    keep: Collection[int] = ()  # steps whose checkpoints stay; for `Hooks.retain`


class Hooks:
    """Do more in the thread; here nothing. A hook handles its own errors."""

    def written(self, request: SaveRequest, report: ShardReport) -> None:
        """Follow up on this rank's shard, which is written and reported."""

    def retain(self, request: SaveRequest) -> None:
        """Remove older checkpoints, on rank 0: the new one is committed."""

    def committed(self, request: SaveRequest) -> None:
        """Follow up on the checkpoint, on every rank: it is committed."""


class CheckpointWriter:
    """Writes this rank's part of each checkpoint, one save at a time.

    Attributes:
        gave_up: a save was in progress when it was cancelled.
    """

    def __init__(
        self,
        root: Path,
        store: dist.Store,
        rank: int,
        ranks: int,
        snapshot: Snapshot,
        entries: Callable[[], list[Entry]],
        manifest: Callable[[SaveRequest, list[ShardReport]], Manifest],
        *,
        nonce: str,
        timeout_s: float,
        hooks: Hooks | None = None,
        rescue: Path | None = None,
        fence: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the thread, which is the only user of this connection to the store.

        `entries` are what of the copied arrays goes into the shard. `manifest` makes the manifest from the reports
        of all ranks, on rank 0. `nonce` makes temporary names unique among attempts. `rescue` is a directory of
        checkpoints to save in if `root`, the run's own, is gone. `fence` is called before anything becomes
        visible, and does not return in a process that was replaced.
        """
        self._rescue, self._fence = rescue, fence
        self._run_inode: int | None = None
        with suppress(OSError):
            self._run_inode = root.parent.stat().st_ino
        self._root, self._store, self._rank, self._ranks = root, store, rank, ranks
        self._snapshot, self._entries, self._manifest, self._nonce = snapshot, entries, manifest, nonce
        self._timeout_s, self._hooks = timeout_s, hooks or Hooks()
        self._requests: SimpleQueue[SaveRequest | None] = SimpleQueue()
        self._reached: SimpleQueue[Reached] = SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._cancelled, self._cancelling = False, threading.Lock()
        self.gave_up = False
        self._staged = True
        self._saves = 0
        self._full = False  # the last save found no space
        self._requested = 0.0
        self._thread = threading.Thread(target=self._run, name="checkpoint writer", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Return whether a save is in progress."""
        return not self._idle.is_set()

    @property
    def busy_s(self) -> float:
        """Return the seconds since the request of the save in progress; 0 if there is none."""
        return time.monotonic() - self._requested if self.busy else 0.0

    def request(self, request: SaveRequest) -> None:
        """Begin a save of the values that the tensors have now; there is none in progress.

        After `cancel` it fails at once.
        """
        assert not self.busy, "one save at a time"
        self._requested = time.monotonic()
        self._reached.put(Reached(request.step, SaveState.REQUESTED, 0.0, self._snapshot.nbytes))
        with self._cancelling:
            if self._cancelled:
                self.gave_up = True
                self._report(request, SaveState.FAILED, reason=_GIVEN_UP)
                return
            self._idle.clear()
            self._snapshot.begin()
            self._staged = False
            self._requests.put(request)

    def wait_for_snapshot(self) -> float:
        """Wait before the tensors change; returns the seconds waited, nearly always 0."""
        if self._staged:
            return 0.0
        self._staged = True
        return self._snapshot.wait()

    def poll(self) -> list[Reached]:
        """Return the states that were reached since the last call; never waits."""
        return [self._reached.get() for _ in range(self._reached.qsize())]

    def finish(self) -> float:
        """Wait until no save is in progress; returns the seconds waited. The thread's own limits end it."""
        started = time.monotonic()
        self._idle.wait()
        return time.monotonic() - started

    def cancel(self) -> None:
        """Give up the save in progress, which fails as soon as the thread would wait for another rank.

        May be called from any thread. The thread ends then; its staging may be read until it is not `busy`.
        """
        with self._cancelling:
            self.gave_up = self.gave_up or self.busy
            self._cancelled = True
            self._requests.put(None)

    def close(self) -> None:
        """End the thread after the save in progress."""
        self._requests.put(None)
        self._thread.join()

    # ---------------------------------------------------------- in the thread

    def _run(self) -> None:
        lower_thread()
        with suppress(OSError, AttributeError, psutil.Error):  # Linux takes a thread's id for a process's
            psutil.Process(threading.get_native_id()).ionice(psutil.IOPRIO_CLASS_BE, _LOWEST_IO)
        while (request := self._requests.get()) is not None:
            self._saves += 1
            try:
                self._save(request)
            except Exception as error:  # whatever it is: training continues, and reads it
                self._full, reason = isinstance(error, NoSpace), reason_of(error)
                if self._full and NEEDS not in reason:
                    reason += f"; {NEEDS} {show_bytes(self._needed_bytes())}"
                self._report(request, SaveState.FAILED, reason=reason, full=self._full)
            finally:
                self._idle.set()

    def _save(self, request: SaveRequest) -> None:
        self._fence()
        store = dist.PrefixStore(f"save/{self._saves}", self._store)
        first = self._rank == 0
        if first:
            nonce = f"{self._nonce}-{self._saves}"
            store.set("directory", attempt(lambda: str(begin(self._root_with_space(), request.step, nonce))))
        directory = Path(self._wait(store, "directory", "rank 0"))
        reports: list[ShardReport] = []

        def write() -> str:
            self._snapshot.copied()
            self._report(request, SaveState.STAGED, self._snapshot.nbytes)
            report = write_shard(directory, self._rank, self._ranks, self._entries(), request.buffers)
            reports.append(report)
            return report.to_json()

        store.set(f"shard/{self._rank}", attempt(write))
        if reports:
            self._report(request, SaveState.WRITTEN, reports[0].size)
            self._hooks.written(request, reports[0])
        if first:
            store.set("committed", attempt(lambda: self._commit(store, directory, request)))
        path, _, size = self._wait(store, "committed", "rank 0").rpartition(" ")
        self._hooks.committed(request)
        self._full = False
        self._report(request, SaveState.COMMITTED, int(size), Path(path))

    def _root_with_space(self) -> Path:
        """Return the directory to save to now; after a save that found the disk full only if a whole one fits.

        Raises:
            NoSpace: it does not: nothing is written, so that what is left stays for logs and records.
            WriteFailed: see `_present_root`.
        """
        root = self._present_root()
        needed = self._needed_bytes()
        if self._full and (free := free_bytes(root)) < needed:
            raise NoSpace(
                f"{root}: {show_bytes(free)} free, and {NEEDS} {show_bytes(needed)}: saves are "
                "paused until there is space; No space left on device"
            )
        return root

    def _needed_bytes(self) -> int:
        """Return about how many bytes a checkpoint has."""
        return self._ranks * sum(array.nbytes for array in self._snapshot.arrays.values())

    def _present_root(self) -> Path:
        """Return the directory to save to now: the run's own, or `rescue` if that is gone.

        Rank 0 decides, and the others learn the directory from it. Another directory under the run's name may be
        another run's by now, whose checkpoints must not be touched.

        Raises:
            WriteFailed: the run directory is gone, and there is no other.
        """
        why = self._why_lost()
        if why is None:
            return self._root
        if self._rescue is None:
            raise WriteFailed(f"{self._root.parent} {why}: the run was moved or removed")
        self._rescue.mkdir(parents=True, exist_ok=True)
        return self._rescue

    def _why_lost(self) -> str | None:
        """Return what became of the run's directory; None if it exists, or its file system does not answer."""
        try:
            inode = self._root.parent.stat().st_ino
        except (FileNotFoundError, NotADirectoryError):
            return "is gone"
        except OSError:
            return None
        return "is another directory now" if self._run_inode not in (None, inode) else None

    def _commit(self, store: dist.Store, directory: Path, request: SaveRequest) -> str:
        try:
            texts = [self._wait(store, f"shard/{rank}", f"rank {rank}") for rank in range(self._ranks)]
            reports = [ShardReport.from_json(text) for text in texts]
            self._fence()
            path = commit(directory.parent, directory, self._manifest(request, reports))
        except CheckpointError:
            discard(directory)
            raise
        if directory.parent == self._root:
            self._hooks.retain(request)
        return f"{path} {sum(report.size for report in reports)}"

    def _wait(self, store: dist.Store, key: str, whose: str) -> str:
        """Return the answer under `key`, once it is there; polls, because a dead peer must not block the thread.

        Raises:
            CheckpointError: it is a failure, or does not come.
        """
        pause, deadline = _POLL_S[0], time.monotonic() + self._timeout_s
        while not store.check([key]):
            if self._cancelled:
                raise WriteFailed(_GIVEN_UP)
            if time.monotonic() > deadline:
                raise WriteFailed(f"{whose} did not report how its part of the save went in {self._timeout_s:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _POLL_S[1])
        kind, _, answer = store.get(key).decode().partition(" ")
        if kind != "ok":
            raise NoSpace(answer) if kind == "full" else CheckpointError(answer)
        return answer

    def _report(
        self, request: SaveRequest, state: SaveState, size: int = 0, path: Path | None = None, *,
        reason: str = "", full: bool = False,
    ) -> None:  # fmt: skip
        seconds = time.monotonic() - self._requested
        self._reached.put(Reached(request.step, state, seconds, size, path, reason, full))


def attempt(action: Callable[[], str]) -> str:
    """Run `action`; return its answer or its failure as text for the store."""
    try:
        return "ok " + action()
    except Exception as error:  # the others must not wait for an answer that does not come
        return f"{'full' if isinstance(error, NoSpace) else 'failed'} {reason_of(error)}"


def free_bytes(path: Path) -> int:
    """Return the bytes that this user may still write to a file system."""
    space = os.statvfs(path)
    return space.f_bavail * space.f_frsize
