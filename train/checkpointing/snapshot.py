"""Copy the state that a save writes into host memory: allocated once, touched once, used again and again.

Fresh memory costs several times the copy itself (page faults), and a save that finds no memory must be refused
before training, not at step 500: so all of it is there from the start, page-locked if the tensors are on a GPU.

    begin()    take the values that the tensors have now; returns at once
    wait()     before they change: wait until the copy has them. The only wait of a save
    copied()   in the writer: wait until the copy is in host memory
    restore()  give the tensors these values again (train/recovery)

On a GPU the copy runs on a second stream, and `wait` makes the compute stream wait for it, not the host. On a CPU
a thread copies. Either way it runs during the next forward and backward, which do not change the tensors.

Cost: one copy of the tensors in host memory for the whole run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import psutil
import torch
from torch import Tensor

_PIECE = 16 << 20  # bytes that the thread copies at once; numpy releases the GIL while it copies


class Snapshot(Protocol):
    """What a checkpoint is written from."""

    @property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The values at the last `begin`, by name, once `copied` has returned."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        ...

    def begin(self) -> None:
        """Take the values that the tensors have now."""
        ...

    def wait(self) -> float:
        """Let the tensors change; returns the seconds waited."""
        ...

    def copied(self) -> None:
        """Wait until the values are in host memory."""
        ...


class HostSnapshot:
    """Keeps one host copy of some flat, contiguous tensors."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocate and touch the memory.

        Raises:
            MemoryError, RuntimeError: there is none.
        """
        self._live = dict(tensors)
        self._on_gpu = any(tensor.device.type == "cuda" for tensor in self._live.values())
        self._host = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._on_gpu).zero_()
            for name, tensor in self._live.items()
        }
        self._arrays: dict[str, npt.NDArray[Any]] = {name: host.numpy() for name, host in self._host.items()}
        self._copied = threading.Event()
        self._copied.set()
        self._error: BaseException | None = None
        if self._on_gpu:
            self._stream = torch.cuda.Stream()
            self._done = torch.cuda.Event()

    @property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the copies, by name: what the tensors held at the last `begin`, once `copied` returned."""
        return self._arrays

    @property
    def nbytes(self) -> int:
        """Return the bytes of host memory."""
        return sum(array.nbytes for array in self.arrays.values())

    def begin(self) -> None:
        """Start to copy. The copy before must be done with."""
        self._copied.clear()
        if self._on_gpu:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for name, live in self._live.items():
                    self._host[name].copy_(live, non_blocking=True)
                self._done.record(self._stream)
            self._copied.set()
        else:
            threading.Thread(target=self._copy, name="snapshot", daemon=True).start()

    def wait(self) -> float:
        """Let the tensors change only after the copy has their values; returns the seconds that took the host.

        Raises:
            Whatever went wrong in the copy.
        """
        started = time.monotonic()
        if self._on_gpu:
            torch.cuda.current_stream().wait_event(self._done)
        else:
            self.copied()
        return time.monotonic() - started

    def copied(self) -> None:
        """Wait until the values are in host memory; for the writer's thread.

        Raises:
            Whatever went wrong in the copy.
        """
        self._copied.wait()
        if self._error is not None:
            raise self._error
        if self._on_gpu:
            self._done.synchronize()

    def restore(self) -> None:
        """Give the tensors the values of the copy back, which is in host memory."""
        for name, live in self._live.items():
            live.copy_(self._host[name], non_blocking=True)
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()

    def _copy(self) -> None:
        try:
            for name, live in self._live.items():
                source, target = live.detach().numpy(), self.arrays[name]
                length = _PIECE // source.itemsize
                for start in range(0, source.size, length):
                    np.copyto(target[start : start + length], source[start : start + length])
        except BaseException as error:  # raised where the snapshot is waited for
            self._error = error
        finally:
            self._copied.set()


class DirectSnapshot:
    """Serves as a `HostSnapshot` that keeps no memory: for saves that training waits for.

    On a CPU the arrays are the tensors themselves; from a GPU each save makes copies, and frees them.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the tensors; nothing is allocated."""
        self._live = dict(tensors)
        self._arrays: dict[str, npt.NDArray[Any]] = {}

    @property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the values, by name, between `begin` and `wait`."""
        return self._arrays

    @property
    def nbytes(self) -> int:
        """Return 0: it keeps no memory."""
        return 0

    def begin(self) -> None:
        """Take the values; they must not change until the save is done."""
        self._arrays = {name: live.detach().cpu().numpy() for name, live in self._live.items()}

    def wait(self) -> float:
        """Return at once: training waits for the whole save anyway."""
        self._arrays = {}
        return 0.0

    def copied(self) -> None:
        """Return at once: the values are there."""


def available_memory() -> int:
    """Return the bytes of host memory left to this process: the machine's, or its control group's if less."""
    free: int = psutil.virtual_memory().available
    with suppress(OSError, ValueError, IndexError):
        cgroup = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip()
        group = Path("/sys/fs/cgroup") / cgroup.lstrip("/")
        while group != group.parent and group != Path("/sys/fs"):
            limit = group / "memory.max"
            if limit.is_file() and (text := limit.read_text().strip()) != "max":
                free = min(free, int(text) - int((group / "memory.current").read_text()))
            group = group.parent
    return max(0, free)


def snapshot_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes that a snapshot of them takes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
