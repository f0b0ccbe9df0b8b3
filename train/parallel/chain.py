"""Collectives that follow each other without the caller waiting in between: the second hop after the first.

On a GPU a stream does it: each hop is queued behind the one before, and the host waits for none. Two chains
overlap as far as they are of different groups, the second hop of one with the first hop of the next.

On a CPU a thread does it: it starts each hop when the one before is done, and hands back the last one while it
runs, so that two chains overlap likewise and backward is not held up. The thread is the only one that starts
collectives of these groups, in the order in which chains were given to it. That order is the callers', the same on
all ranks, so no two ranks can wait for each other. gloo itself gives nothing to chain with: it calls back in the
order in which collectives end, which differs from rank to rank.

A chain that fails raises in each wait for it; the chains behind it fail with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch

from zslurm.train.parallel.comm import DONE, Handle

Hop = Callable[[], Handle]
"""Starts a collective and returns its handle; or returns the handle of one that was started before."""


class Chain:
    """Runs chains of hops, one after the other, if they overlap and in one order."""

    def __init__(self, device: torch.device) -> None:
        """Run them with a stream of a GPU, or a thread, which starts with the first chain."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._links: SimpleQueue[_Link | None] | None = None

    def close(self) -> None:
        """End the thread; no chain is run after this."""
        if self._links is not None:
            self._links.put(None)

    def run(self, *hops: Hop) -> Handle:
        """Start `hops` in order, each when the one before is done; returns the last one's handle."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                return _start(hops)
        if self._links is None:
            self._links = SimpleQueue()
            threading.Thread(target=_serve, args=(self._links,), name="two-level", daemon=True).start()
        link = _Link(hops)
        self._links.put(link)
        return link


class _Link:
    """A chain that the thread works on; a handle."""

    def __init__(self, hops: Sequence[Hop]) -> None:
        self.hops = hops
        self.last: Handle = DONE
        self.error: BaseException | None = None
        self.started = threading.Event()  # the last hop; or a hop failed

    def wait(self) -> None:
        """Wait for all hops.

        Raises:
            Whatever went wrong in one of them, or in a chain before.
        """
        self.started.wait()
        if self.error is not None:
            raise self.error
        self.last.wait()


def _start(hops: Sequence[Hop]) -> Handle:
    """Start each hop when the one before is done: for a GPU's stream, which waits; on a CPU this thread does."""
    last = DONE
    for hop in hops:
        last.wait()
        last = hop()
    return last


def _serve(links: SimpleQueue[_Link | None]) -> None:
    """Start one chain after the other; after a failure none, for the ranks are not in step any more."""
    error: BaseException | None = None
    while (link := links.get()) is not None:
        if error is None:
            try:
                link.last = _start(link.hops)
            except BaseException as raised:  # raised again where the chain is waited for
                error = raised
        link.error, link.hops = error, ()  # hops may hold the chain before, which held the one before
        link.started.set()
        del link
