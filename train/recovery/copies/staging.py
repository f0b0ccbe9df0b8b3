"""A rank's own copies of its state, in host memory that is there from the start: for its buddy and checkpoints.

A slot holds masters and optimizer state of one step, and what a run needs besides. Recovery alternates between two
slots; if checkpoints are written in the background they are written from the same copies, and a third slot
takes the place of the one that a save is reading. Cost: two or three times the state in host memory.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zslurm.train.checkpointing.snapshot import HostSnapshot


@dataclass
class Slot:
    """One copy of this rank's state.

    Attributes:
        step: optimizer steps done in it; -1: nothing.
        cursor: what else is needed, as plain JSON, the same on all ranks.
        extras: small arrays, most of them the same on all ranks.
        crc: of the arrays, once they were read.
        whole: the buddy has it as well.
    """

    snapshot: HostSnapshot
    step: int = -1
    cursor: dict[str, Any] = field(default_factory=dict)
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    crc: int | None = None
    whole: bool = False

    def has(self, step: int) -> bool:
        """Return whether this is the copy of a step; never for -1."""
        return 0 <= step == self.step

    def parts(self) -> list[memoryview]:
        """Return the bytes of the arrays, in order."""
        return [array.data.cast("B") for array in self.snapshot.arrays.values() if array.nbytes]

    def meta(self) -> bytes:
        """Return all but the arrays, as JSON."""
        extras = {
            name: [str(array.dtype), list(array.shape), base64.b64encode(array.tobytes()).decode()]
            for name, array in ((name, value.numpy()) for name, value in self.extras.items())
        }
        return json.dumps({"cursor": self.cursor, "extras": extras}).encode()

    def fill(self, step: int, meta: bytes) -> None:
        """Take everything but the arrays, which were received already."""
        fields = json.loads(meta)
        self.step, self.cursor = step, fields["cursor"]
        self.extras = {
            name: torch.from_numpy(
                np.frombuffer(base64.b64decode(data), dtype=np.dtype(dtype)).reshape(shape).copy()
            )
            for name, (dtype, shape, data) in fields["extras"].items()
        }


class Staging:
    """This rank's own copies."""

    def __init__(self, live: Mapping[str, Tensor], slots: int) -> None:
        """Allocate and touch the memory of `slots` copies of flat tensors.

        Raises:
            MemoryError, RuntimeError: there is none.
        """
        self.slots = [Slot(HostSnapshot(live)) for _ in range(slots)]
        self._on_gpu = any(tensor.device.type == "cuda" for tensor in live.values())
        self._begun: Slot | None = None  # of the values that the tensors have now
        self._saved: Slot | None = None  # a save writes from it
        self._saving: Callable[[], bool] = lambda: False

    def take(self, step: int, cursor: dict[str, Any], extras: Mapping[str, Tensor], keep: int) -> Slot:
        """Begin a copy, in a slot other than step `keep`'s, and other than one that is saved from.

        If the values that the tensors have now are being copied already, for a save, it is the same slot. But
        after a step that was skipped these values belong to step `keep` as well, which must stay whole.
        """
        begun = self._begun if self._begun is not None and not self._begun.has(keep) else None
        slot = begun or self._free(keep)
        slot.step, slot.cursor, slot.crc, slot.whole = step, cursor, None, False
        slot.extras = {
            name: value.detach().to("cpu", non_blocking=True, copy=True) for name, value in extras.items()
        }
        if begun is None or self._on_gpu:
            # Again on a GPU: the extras were queued just now, and what waits for the snapshot has them as well.
            slot.snapshot.begin()
        self._begun = slot
        return slot

    def wait(self) -> float:
        """Wait, before the tensors change, until the copy has them; returns the seconds waited."""
        begun, self._begun = self._begun, None
        return begun.snapshot.wait() if begun is not None else 0.0

    def settle(self) -> None:
        """Wait for copies under way, on the host."""
        self._begun = None
        for slot in self.slots:
            slot.snapshot.copied()

    def to_fill(self) -> Slot:
        """Return a slot for a copy that comes from elsewhere: none that a save, even one given up, reads."""
        return self._free(-1)

    def of_step(self, step: int) -> Slot | None:
        """Return the slot with a step; None if there is none."""
        return next((slot for slot in self.slots if slot.step == step), None)

    def forget_after(self, step: int) -> None:
        """Drop the copies of later steps."""
        for slot in self.slots:
            if slot.step > step:
                slot.step = -1

    def _free(self, keep: int) -> Slot:
        saved = self._saved if self._saving() else None
        free = [slot for slot in self.slots if slot is not saved and not slot.has(keep)]
        return min(free, key=lambda slot: slot.step)

    # ------------------------------------------------------------------- what a checkpoint is written from

    def for_saves(self, saving: Callable[[], bool], keep: Callable[[], int]) -> SaveSource:
        """Return a snapshot for a writer of checkpoints, of which `saving` returns whether it still reads."""
        self._saving = saving
        return SaveSource(self, keep)

    def pin(self, keep: int) -> Slot:
        """Return a slot with the values that the tensors have now, which stays until the save is over."""
        self._saved = None  # the save before is over
        self._saved = self._begun or self.take(-1, {}, {}, keep)
        return self._saved


class SaveSource:
    """Serves as the `HostSnapshot` of a writer of checkpoints, from slots that are there anyway."""

    def __init__(self, staging: Staging, keep: Callable[[], int]) -> None:
        """Save from `staging`; `keep` returns the step whose slot is not to be touched."""
        self._staging, self._keep = staging, keep
        self._slot = staging.slots[0]

    @property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the copies, by name."""
        return self._slot.snapshot.arrays

    @property
    def nbytes(self) -> int:
        """Return the bytes of one copy."""
        return self._slot.snapshot.nbytes

    def begin(self) -> None:
        """Take the values that the tensors have now."""
        self._slot = self._staging.pin(self._keep())

    def wait(self) -> float:
        """Let the tensors change only after the copy has their values."""
        return self._slot.snapshot.wait()

    def copied(self) -> None:
        """Wait until the values are in host memory."""
        self._slot.snapshot.copied()
