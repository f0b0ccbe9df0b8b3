"""Copies of each rank's state in host memory: its own, and one with a buddy on another node.

    take      after an optimizer step: the state goes to a slot of this rank, during the next forward and backward
    send      a thread sends the slot to the buddy, and computes the CRC32 of what it sends
    receive   a thread takes in the state of the rank whose buddy this one is, and compares the CRC32
    ack       the sender learns that the copy is whole

A copy has the number of its step. Its sender counts as busy until the copy is whole; busy ranks are added up in
the sums that every step makes, and the next copy begins only when there are none. So at any time one step is
whole on every rank and with every buddy, whatever else is on the way: the receiver has room for two steps, and the
sender for as many, and one more while a checkpoint is written, which is written from the same copy.

Rank r's buddy is r + ranks per node, in a ring: it is on the next node, at the same place (on its rail). On one
node it is the next rank, which survives a killed rank and not the node.

Host memory: 2 or 3 times a rank's own state, and twice another one's. Time: one copy and one CRC32 of the
state, and as many bytes each way over the network, during the step.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from zslurm.checkpoint_tools.checksum import crc32
from zslurm.train.recovery.copies.staging import Slot, Staging
from zslurm.train.recovery.copies.transport import COPY, RESTORE, Address, Frame, Link, listen, new_token

_LOG = logging.getLogger(__name__)
_RETRY_S = 0.5
_EXPECTS_S = 5.0


class ChangedInMemory(OSError):
    """A copy is not what was received: its CRC32 differs."""


@dataclass
class _Held:
    """A copy of another rank's state."""

    buffer: npt.NDArray[np.uint8]
    step: int = -1
    meta: bytes = b""
    crc: int = 0


class Copies:
    """Sends this rank's copies to its buddy, and keeps its ward's.

    Attributes:
        address: host and port at which copies are received, and the token without which none is.
        ward: the rank whose copies are kept here; None before `connect`.
    """

    def __init__(self, staging: Staging, host: str) -> None:
        """Listen for copies at an address of this node."""
        self._staging = staging
        self._listener = listen(host)
        self.address: Address = (host, self._listener.getsockname()[1], new_token())
        self.ward: int | None = None
        self._held: list[_Held] = []
        self._lock = threading.Lock()  # of what is held
        self._generation = 0
        self._buddy: Address | None = None
        self._to_send: SimpleQueue[tuple[int, Slot] | None] = SimpleQueue()
        self._link: Link | None = None
        self._links: list[Link] = []
        self._returning: Link | None = None
        self._last: Slot | None = None
        self._expects, self._restored = threading.Event(), threading.Event()
        self._into: Slot | None = None
        self._into_step = -1
        self._closed = False
        for name, run in (("copies out", self._send_all), ("copies in", self._accept)):
            threading.Thread(target=run, name=name, daemon=True).start()

    @property
    def port(self) -> int:
        """Port at which copies are received."""
        return self.address[1]

    @property
    def busy(self) -> bool:
        """Whether the last copy is not whole yet."""
        return self._last is not None and not self._last.whole

    @property
    def held_steps(self) -> list[int]:
        """Steps of the ward that are whole here."""
        with self._lock:
            return [held.step for held in self._held if held.step >= 0]

    def held_state(self, step: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of the ward's copy of a step, which is here.

        Raises:
            ChangedInMemory: the copy is damaged.
        """
        with self._lock:
            held = next(held for held in self._held if held.step == step)
        if crc32(held.buffer.data) != held.crc:
            raise ChangedInMemory("its CRC32 is not what it was")
        return held.buffer

    def connect(self, generation: int, buddy: Address | None, ward: int | None, ward_bytes: int) -> None:
        """Copy to the buddy at this address from now on, and make room for the ward's state.

        Raises:
            MemoryError: there is none.
        """
        with self._lock:
            self._generation, self._buddy = generation, buddy
            if self.ward != ward or not self._held or self._held[0].buffer.nbytes != ward_bytes:
                self.ward = ward
                copies = 0 if ward is None else 2
                self._held = [_Held(np.zeros(ward_bytes, dtype=np.uint8)) for _ in range(copies)]

    def disconnect(self) -> None:
        """Cut all connections: their other ends are in a generation that is over."""
        with self._lock:
            self._generation, self._buddy = -1, None
            links = [*self._links, *([self._link] if self._link is not None else [])]
            self._links, self._link = [], None
        for link in links:
            link.close()

    def forget_after(self, step: int) -> None:
        """Drop what is held of later steps."""
        with self._lock:
            for held in self._held:
                if held.step > step:
                    held.step = -1
        self._last = None

    def send(self, slot: Slot) -> None:
        """Copy a slot to the buddy, in the background."""
        slot.whole, self._last = False, slot
        self._to_send.put((self._generation, slot))

    def close(self) -> None:
        """End all threads."""
        self._closed = True
        self._to_send.put(None)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.disconnect()

    # ---------------------------------------------------------------------------------------- restoring a rank

    def expect(self, slot: Slot, step: int) -> None:
        """Receive this rank's own state of a step into a slot, when its buddy sends it in this generation."""
        slot.step, slot.whole = -1, False
        self._restored.clear()
        with self._lock:
            self._into, self._into_step = slot, step
        self._expects.set()

    def received(self, timeout_s: float) -> bool:
        """Wait for what `expect` asked for; returns whether it is there, and whole."""
        return self._restored.wait(timeout_s)

    def return_to(self, address: Address, step: int, over: Callable[[], bool]) -> None:
        """Send the ward's state of a step to the process that takes its place.

        `over` returns whether there is a later generation: true before `stop_returning` is called for it.

        Raises:
            OSError: it is not there, did not get it whole, or a later generation has cut the connection.
            ChangedInMemory: the copy is damaged.
        """
        with self._lock:
            held = next(held for held in self._held if held.step == step)
            generation = self._generation
        link = Link.to(address)
        with self._lock:
            self._returning = link
        try:
            if over():  # before there was a connection that could be cut
                raise OSError("a further rank was lost")
            crc = link.send(Frame(RESTORE, generation, step, held.meta), [held.buffer.data])
            if crc != held.crc:
                raise ChangedInMemory("the copy of its state has changed in memory: its CRC32 is not what it was")
            if link.answer() != step:
                raise OSError("its state did not arrive whole")
        finally:
            with self._lock:
                self._returning = None
            link.close()

    def stop_returning(self) -> None:
        """Cut the connection of `return_to`, whose other end may be gone; from another thread."""
        with self._lock:
            link = self._returning
        if link is not None:
            link.cut()

    # ---------------------------------------------------------------------------------------- in the threads

    def _send_all(self) -> None:
        while (request := self._to_send.get()) is not None:
            generation, slot = request
            step = slot.step
            while generation == self._generation and slot.step == step and not self._closed:
                try:
                    slot.snapshot.copied()
                    self._send(generation, slot)
                    break
                except OSError as error:
                    if generation == self._generation:
                        _LOG.warning("recovery: the copy of step %d did not reach its buddy: %s", step, error)
                        time.sleep(_RETRY_S)

    def _send(self, generation: int, slot: Slot) -> None:
        """Send a slot to the buddy of a generation; if that is over by then, nothing becomes of it."""
        step, parts, meta = slot.step, slot.parts(), slot.meta()
        with self._lock:
            if generation != self._generation:
                return
            buddy, link = self._buddy, self._link
        if buddy is None:
            crc = 0
            for part in parts:
                crc = crc32(part, crc)
            self._is_whole(generation, slot, step, crc)
            return
        if link is None:
            link = Link.to(buddy)
            with self._lock:
                if generation != self._generation:
                    link.close()
                    return
                self._link = link
        try:
            crc = link.send(Frame(COPY, generation, step, meta), parts)
            if link.answer() != step:
                raise OSError("it did not arrive whole")
        except OSError:
            link.close()
            with self._lock:
                if self._link is link:
                    self._link = None
            raise
        self._is_whole(generation, slot, step, crc)

    def _is_whole(self, generation: int, slot: Slot, step: int, crc: int) -> None:
        """Note that a copy is whole, unless its slot may be another copy's by now."""
        with self._lock:
            if generation == self._generation and slot.step == step:
                slot.crc, slot.whole = crc, True

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(_RETRY_S)
                continue
            link = Link(connection)
            with self._lock:
                self._links.append(link)
            threading.Thread(target=self._receive, args=(link,), name="copy in", daemon=True).start()

    def _receive(self, link: Link) -> None:
        with suppress(OSError, ValueError):
            admitted = link.admits(self.address[2])
            while admitted:
                frame = link.frame()
                if frame.kind == RESTORE:
                    self._receive_own(link, frame)
                else:
                    self._receive_copy(link, frame)
        link.close()
        with self._lock, suppress(ValueError):
            self._links.remove(link)

    def _receive_copy(self, link: Link, frame: Frame) -> None:
        with self._lock:
            if frame.generation != self._generation:
                raise ValueError("a copy of another generation")
            same = [held for held in self._held if held.step == frame.step]
            held = same[0] if same else min(self._held, key=lambda slot: slot.step)
            if held.buffer.nbytes != frame.size:
                raise ValueError("a copy of another size")
            held.step = -1
        right, crc = link.take([held.buffer.data], frame)
        with self._lock:
            if right and frame.generation == self._generation:
                held.meta, held.crc, held.step = frame.meta, crc, frame.step
        link.reply(frame.step if right else -1)

    def _receive_own(self, link: Link, frame: Frame) -> None:
        self._expects.wait(_EXPECTS_S)  # this rank may learn a moment later than its buddy what it needs
        with self._lock:
            slot, expected = self._into, (self._generation, self._into_step)
        if slot is None or (frame.generation, frame.step) != expected or frame.size != slot.snapshot.nbytes:
            raise ValueError("a state that nobody asked for")
        right, crc = link.take(slot.parts(), frame)
        if right:
            slot.fill(frame.step, frame.meta)
            slot.crc, self._into = crc, None
            self._expects.clear()
            self._restored.set()
        link.reply(frame.step if right else -1)
