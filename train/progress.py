"""The progress contract: how a rank tells a watcher on the same node that it is alive, and where it is.

In the directory named by ZSLURM_PROGRESS_DIR (node-local memory) each rank keeps one record of RECORD.size
bytes, `rank-00003`, rewritten whole by one pwrite: a reader never sees a torn one. Without the variable nothing
is written. The cost is one system call of 48 bytes per update.

A process that gets STACK_SIGNAL writes the stacks of all its threads to its standard error and goes on.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import struct
import sys
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

# Not SIGUSR1, which NCCL's proxy thread catches (facebookincubator/submitit#1697), nor SIGUSR2, which asks a
# rank to save and stop.
STACK_SIGNAL = signal.SIGRTMIN + 2

_MAGIC = b"ZPRG"
# magic, version, attempt, rank, pid, phase, checkpoint state, step, step of the last committed checkpoint,
# monotonic nanoseconds
RECORD = struct.Struct("<4sIIIIBB2xqqQ")
_VERSION = 1


class Phase(IntEnum):
    """What a rank is doing."""

    SETUP = 0
    STEP = 1
    SAVE = 2
    EVAL = 3
    DONE = 4


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
    step: int
    committed_step: int
    monotonic_ns: int


class ProgressWriter:
    """Keeps this rank's record up to date. Does nothing where ZSLURM_PROGRESS_DIR is unset."""

    def __init__(self, rank: int, attempt: int, directory: str | None = None) -> None:
        """Open the record.

        Args:
            rank: global rank.
            attempt: number of the attempt, from 1.
            directory: where the records lie; default: ZSLURM_PROGRESS_DIR.

        Raises:
            OSError: the directory is missing or full.
        """
        folder = directory or os.environ.get("ZSLURM_PROGRESS_DIR")
        self._rank, self._attempt = rank, attempt
        self._phase, self._checkpoint = Phase.SETUP, CheckpointState.NONE
        self._step, self._committed = -1, -1
        self._fd: int | None = None
        if folder:
            path = record_path(Path(folder), rank)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.update()

    def update(
        self,
        *,
        phase: Phase | None = None,
        step: int | None = None,
        checkpoint: CheckpointState | None = None,
        committed_step: int | None = None,
    ) -> None:
        """Change what is given and write the record; also a sign of life without arguments."""
        global _last_step
        self._phase = self._phase if phase is None else phase
        self._checkpoint = self._checkpoint if checkpoint is None else checkpoint
        self._committed = self._committed if committed_step is None else committed_step
        if step is not None:
            self._step = _last_step = step
        if self._fd is not None:
            record = RECORD.pack(
                _MAGIC, _VERSION, self._attempt, self._rank, os.getpid(), self._phase, self._checkpoint,
                self._step, self._committed, time.monotonic_ns(),
            )  # fmt: skip
            os.pwrite(self._fd, record, 0)

    def close(self) -> None:
        """Close the record; it stays for readers."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


_last_step = -1


def last_step() -> int:
    """The last optimizer step that this process finished; -1 before the first."""
    return _last_step


def record_path(directory: Path, rank: int) -> Path:
    """Where the record of `rank` lies."""
    return directory / f"rank-{rank:05d}"


def read_progress(directory: Path, rank: int) -> Progress | None:
    """The record of `rank`; None where there is none, or one of another version."""
    try:
        raw = record_path(directory, rank).read_bytes()
        magic, version, attempt, number, pid, phase, checkpoint, step, committed, when = RECORD.unpack(raw)
        if magic != _MAGIC or version != _VERSION:
            return None
        return Progress(attempt, number, pid, Phase(phase), CheckpointState(checkpoint), step, committed, when)
    except (OSError, struct.error, ValueError):
        return None


def dump_stacks_on_signal() -> None:
    """Make STACK_SIGNAL write the stacks of all threads to standard error."""
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, file=sys.stderr, all_threads=True)
