"""The progress contract: how a rank shows a watcher on the same node that it is alive, and where it is.

In the directory named by ZSLURM_PROGRESS_DIR (node-local memory) each rank keeps one record of RECORD.size
bytes, `rank-00003`, rewritten whole by one pwrite: a reader never sees a torn one. Without the variable nothing
is written. The cost is one system call of 56 bytes per update, and a step makes two: when it is done, and when
this rank has done its own part of it and waits for its peers. That second fact separates the one rank that
hangs from all those that wait for it; the step work time (`Progress.work_ns`) shows the one that is slow.

A process that gets STACK_SIGNAL writes the stacks of all its threads to its standard error and continues.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

# Not SIGUSR1, which NCCL's proxy thread catches (facebookincubator/submitit#1697), nor SIGUSR2, which asks a
# rank to save and stop.
STACK_SIGNAL = signal.SIGRTMIN + 2

_MAGIC = b"ZPRG"
# magic, version, attempt, rank, pid, phase, checkpoint state, waiting, step, step of the last committed
# checkpoint, monotonic nanoseconds, nanoseconds of own work per microbatch
RECORD = struct.Struct("<4sIIIIBBBxqqQQ")
_VERSION = 2


class Phase(IntEnum):
    """What a rank is doing."""

    SETUP = 0
    STEP = 1
    SAVE = 2
    EVAL = 3
    DONE = 4
    UNOBSERVED = 5
    """It runs a program that does not show its progress: it may take any time."""
    ALIVE = 6
    """It runs a program that shows signs of life, and no steps."""


class CheckpointState(IntEnum):
    """How far the newest checkpoint is."""

    NONE = 0
    REQUESTED = 1
    STAGED = 2
    WRITTEN = 3
    COMMITTED = 4


@dataclass(frozen=True)
class Progress:
    """One rank's record."""

    attempt: int
    rank: int
    pid: int
    phase: Phase
    checkpoint: CheckpointState
    step: int  # the optimizer step that it finished last; -1 before the first
    committed_step: int  # of the newest checkpoint that it knows to be complete; -1 before the first
    monotonic_ns: int  # when it wrote this, by the clock of its node
    waiting: bool = False  # it has done its own part of the step after `step`, and waits for its peers
    # nanoseconds of its own work (data, forward, backward) per microbatch, summed over the steps of this
    # attempt. In synchronous training every rank takes as long for a step as the slowest; this sum grows faster
    # where a rank or its GPU is slower than its peers
    work_ns: int = 0


class ProgressWriter:
    """Keeps this rank's record up to date. Does nothing if ZSLURM_PROGRESS_DIR is unset."""

    def __init__(
        self,
        rank: int,
        attempt: int,
        directory: str | None = None,
        pid: int | None = None,
        fence: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the record of global rank `rank` in `directory`, by default ZSLURM_PROGRESS_DIR.

        Args:
            rank: global rank.
            attempt: number of the attempt.
            directory: where the records are.
            pid: of the process that trains; default: this one.
            fence: called before each change; it does not return in a process that was replaced.

        Raises:
            OSError: the directory is missing or full.
        """
        folder = directory or os.environ.get("ZSLURM_PROGRESS_DIR")
        self._rank, self._attempt, self._pid, self._fence = rank, attempt, pid, fence
        self._phase, self._checkpoint = Phase.SETUP, CheckpointState.NONE
        self._step, self._committed, self._work_ns = -1, -1, 0
        self._fd: int | None = None
        self._path = record_path(Path(folder), rank) if folder else None
        if self._path is not None:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.update()

    def update(
        self,
        *,
        phase: Phase | None = None,
        step: int | None = None,
        checkpoint: CheckpointState | None = None,
        committed_step: int | None = None,
        work_ns: int | None = None,
        waiting: bool = False,
    ) -> None:
        """Change what is given and write the record; also a sign of life without arguments.

        `waiting` is not kept: any other sign of life means that the rank is at work again.
        """
        global _last_step
        self._phase = self._phase if phase is None else phase
        self._checkpoint = self._checkpoint if checkpoint is None else checkpoint
        self._committed = self._committed if committed_step is None else committed_step
        self._work_ns = self._work_ns if work_ns is None else work_ns
        if step is not None:
            self._step = _last_step = step
        if self._fd is not None:
            self._fence()
            record = RECORD.pack(
                _MAGIC, _VERSION, self._attempt, self._rank, self._pid or os.getpid(), self._phase,
                self._checkpoint, waiting, self._step, self._committed, time.monotonic_ns(), self._work_ns,
            )  # fmt: skip
            os.pwrite(self._fd, record, 0)

    def remove(self) -> None:
        """Remove the record: this process is another rank from now on."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Close the record; it stays for readers."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


_last_step = -1


def last_step() -> int:
    """Return the last optimizer step that this process finished; -1 before the first."""
    return _last_step


def record_path(directory: Path, rank: int) -> Path:
    """Return the path of the record of `rank`."""
    return directory / f"rank-{rank:05d}"


def read_progress(directory: Path, rank: int) -> Progress | None:
    """Return the record of `rank`; None if there is none, or one of another version."""
    try:
        raw = record_path(directory, rank).read_bytes()
        magic, version, attempt, number, pid, phase, checkpoint, waiting, *numbers = RECORD.unpack(raw)
        if magic != _MAGIC or version != _VERSION:
            return None
        step, committed, when, work = numbers
        state = CheckpointState(checkpoint)
        return Progress(attempt, number, pid, Phase(phase), state, step, committed, when, bool(waiting), work)
    except (OSError, struct.error, ValueError):
        return None


def dump_stacks_on_signal() -> None:
    """Make STACK_SIGNAL write the stacks of all threads to standard error."""
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, file=sys.stderr, all_threads=True)
