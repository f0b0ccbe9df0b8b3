"""Feeding a rank: its microbatches on its device, read ahead by a thread while the device computes.

    read       train/data/reader.py, whenever fewer than `prefetch` microbatches are ready, across steps and phases
    transfer   in the bundles' format (2 or 4 bytes a token) out of pinned memory, in the trainer's stream
    widen      to int64 on the device, as much as is read at a time; for a CPU in the thread, before it is needed

The thread leaves the trainer its GIL: numpy copies without it (but for sequences of less than 500 tokens). With
prefetch 0 the trainer's own thread reads when it asks; the bits are equal, whatever prefetch is.

Cost: memory for `prefetch` microbatches and one read as they are stored, and one thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zslurm.train.data.order import DataOrder
from zslurm.train.data.reader import MicrobatchPosition, Read, read_from
from zslurm.train.data.shares import SharePiece, share_of
from zslurm.train.model.head import IGNORED_TARGET
from zslurm.train.model.packing import document_bounds, documents_by_bounds, documents_of, valid_positions
from zslurm.train.schedule import Position

CLOSING_S = 10.0


class Microbatch(NamedTuple):
    """What one forward and backward pass works on: a microbatch, or the part of one that is this rank's.

    Attributes:
        step: the optimizer step that it belongs to, from 0.
        number: its location among the step's microbatches; parts of one microbatch have the same.
        tokens_BS: int64 inputs.
        targets_BS: int64, the token after each input; IGNORED_TARGET if it does not count.
        document_BS: numbers of the documents, if these are kept apart.
        bounds_N: the start of each among the B * S tokens, and the number of tokens, int32.
        targets: how many targets count.
        valid_BS: false for padding, of packs; None if there can be none.
    """

    step: int
    number: int
    tokens_BS: Tensor
    targets_BS: Tensor
    document_BS: Tensor | None
    bounds_N: Tensor | None
    targets: int
    valid_BS: Tensor | None = None


class _Held(NamedTuple):
    """What was read, as tensors on the host; see `train.data.reader.Read`.

    Of each microbatch, `targets` has how many count, `bounds` the documents' bounds or None, and `filled`, of
    packs only, how many inputs of each sequence are no padding.
    """

    locations: list[MicrobatchPosition]
    sizes: list[int]
    windows_NS: Tensor
    mask_NS: Tensor | None
    targets: list[int]
    bounds: list[Tensor | None]
    filled: list[Tensor] | None


class Loader:
    """One rank's microbatches. As a context manager it ends its thread."""

    def __init__(
        self,
        order: DataOrder,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        prefetch: int,
        isolate_documents: bool = False,
    ) -> None:
        """Make ready for rank `rank` of all; nothing is read before the first microbatch is asked for.

        The ranks of a context group (`phases[].context_parallel`) get the same sequences.
        `prefetch` microbatches are kept ready for `device`, by no thread if it is 0. With `isolate_documents`
        the documents of each sequence are numbered, and their bounds listed; of packs they always are.

        Raises:
            DataError: there are more bundles than this machine lets a process open.
        """
        order.data.allow_open_files()
        self._order, self._rank, self._world_size = order, rank, world_size
        self._device, self._prefetch = device, prefetch
        self._end_token = order.data.header.end_token if isolate_documents else None
        self._stream: Iterator[Microbatch] = iter(())
        self._ahead: _ReadAhead | None = None
        self._next_step: int | None = None

    def share(self, here: Position) -> tuple[SharePiece, ...]:
        """Return what this rank computes of a step, in the order in which `microbatches` yields it."""
        return share_of(here, self._rank, self._world_size)

    def microbatches(self, step: int) -> Iterator[Microbatch]:
        """Return this rank's microbatches of a step, in order; none if ranks outnumber them.

        Steps are usually asked for in order; any other is found as well, and what was read ahead is dropped.

        Raises:
            DataError, OSError: reading failed, here or in the thread.
        """
        if step != self._next_step:
            self._start(step)
        self._next_step = None  # until the whole step is taken
        for _ in self.share(self._order.plan.at(step)):
            yield next(self._stream)
        self._next_step = step + 1

    @property
    def reads_ahead(self) -> bool:
        """Whether a thread of this loader reads now."""
        return self._ahead is not None

    def close(self) -> None:
        """End the thread; what was read ahead is dropped."""
        self._next_step = None
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self, step: int) -> None:
        self.close()
        reads: Iterator[_Held] = map(self._hold, read_from(self._order, step, self._rank, self._world_size))
        if self._prefetch:
            self._ahead = _ReadAhead(reads, self._prefetch, self._device)
            reads = self._ahead.taken()
        self._stream = (microbatch for held in reads for microbatch in self._deliver(held))

    def _hold(self, read: Read) -> _Held:
        """Make a read ready for the device: for a GPU in pinned memory, for the CPU widened; count its targets.

        The allocator of pinned memory keeps a block until the copies out of it are done, however soon it is freed.
        """
        context = read.windows_NS.shape[1] - 1
        targets, mask_NS = [size * context for size in read.sizes], None
        firsts = np.cumsum([0, *read.sizes[:-1]])
        if read.mask_NS is not None:
            targets = np.add.reduceat(read.mask_NS.sum(axis=1, dtype=int), firsts).tolist()
            mask_NS = torch.from_numpy(read.mask_NS)
        filled: list[Tensor] | None = None
        bounds: list[Tensor | None]
        if read.packed is None:
            bounds = [self._bounds(windows_BS) for windows_BS in np.split(read.windows_NS, firsts[1:])]
        else:
            bounds = [torch.from_numpy(inputs.bounds_N) for inputs in read.packed]
            filled = [torch.from_numpy(inputs.filled_B) for inputs in read.packed]
        if self._device.type == "cpu":
            windows_NS = torch.from_numpy(read.windows_NS.astype(np.int64))
        else:
            windows_NS = torch.from_numpy(read.windows_NS).pin_memory()
            mask_NS = mask_NS.pin_memory() if mask_NS is not None else None
            bounds = [tensor.pin_memory() if tensor is not None else None for tensor in bounds]
            filled = [tensor.pin_memory() for tensor in filled] if filled is not None else None
        return _Held(read.locations, read.sizes, windows_NS, mask_NS, targets, bounds, filled)

    def _bounds(self, windows_BS: NDArray[np.unsignedinteger]) -> Tensor | None:
        """Return the bounds of the documents that a microbatch's inputs are of."""
        return None if self._end_token is None else document_bounds(windows_BS[:, :-1], self._end_token)

    def _deliver(self, held: _Held) -> Iterator[Microbatch]:
        """Move a read to the device, widen it there (on a CPU both are done), and take it apart."""
        windows_NS = held.windows_NS.to(self._device, non_blocking=True).to(torch.int64)
        targets_NS = windows_NS[:, 1:]
        if held.mask_NS is not None:
            mask_NS = held.mask_NS.to(self._device, non_blocking=True)
            targets_NS = targets_NS.masked_fill(mask_NS == 0, IGNORED_TARGET)
        filled: list[Tensor] | list[None] = held.filled or [None] * len(held.sizes)
        parts = (windows_NS[:, :-1].split(held.sizes), targets_NS.split(held.sizes), held.bounds, held.targets)
        for location, tokens_BS, targets_BS, bounds_N, targets, filled_B in zip(
            held.locations, *parts, filled, strict=True
        ):
            document_BS, valid_BS = None, None
            bounds_N = None if bounds_N is None else bounds_N.to(self._device, non_blocking=True)
            if filled_B is not None:
                assert bounds_N is not None
                document_BS = documents_by_bounds(bounds_N, tokens_BS)
                valid_BS = valid_positions(filled_B.to(self._device, non_blocking=True), tokens_BS)
            elif self._end_token is not None:
                document_BS = documents_of(tokens_BS, self._end_token)
            inputs = (tokens_BS, targets_BS, document_BS, bounds_N, targets, valid_BS)
            yield Microbatch(location.step, location.number, *inputs)


class _ReadAhead:
    """A thread that keeps microbatches ready."""

    def __init__(self, reads: Iterator[_Held], prefetch: int, device: torch.device) -> None:
        self._reads, self._prefetch, self._device = reads, prefetch, device
        self._ready: deque[_Held] = deque()
        self._microbatches = 0
        self._changed = threading.Condition()
        self._closing = self._finished = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="train-data", daemon=True)
        self._thread.start()

    def taken(self) -> Iterator[_Held]:
        """Yield what was read, in order; waits for it, and raises what the thread stumbled over."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._finished)
                if not self._ready:
                    break
                held = self._ready.popleft()
                self._microbatches -= len(held.targets)
                self._changed.notify_all()
            yield held
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread after the read that it is at. One that hangs in the file system is left behind."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(CLOSING_S)

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # each thread has its own; pinning would wake up GPU 0
            for held in self._reads:
                with self._changed:
                    self._ready.append(held)
                    self._microbatches += len(held.targets)
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._closing or self._microbatches < self._prefetch)
                    if self._closing:
                        return
        except BaseException as error:  # the trainer's to handle
            self._error = error
        finally:
            with self._changed:
                self._finished = True
                self._changed.notify_all()
