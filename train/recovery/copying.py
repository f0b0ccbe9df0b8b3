"""When a rank's state is copied, and what all ranks know of their copies: the steps' side of copies/."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy.typing as npt
import torch.distributed as dist
from torch import Tensor

from zslurm.checkpoint_tools.quantities import counted, show_bytes
from zslurm.train.checkpointing.checkpointer import Checkpointer
from zslurm.train.checkpointing.snapshot import Snapshot, available_memory, snapshot_bytes
from zslurm.train.config import RecoveryConfig
from zslurm.train.errors import CannotRecover, ConfigError
from zslurm.train.loop import Trainer
from zslurm.train.parallel.world import World
from zslurm.train.plan.memory import copies_bytes
from zslurm.train.recovery.copies.agreement import PAUSE_S
from zslurm.train.recovery.copies.buddy_copies import ChangedInMemory, Copies
from zslurm.train.recovery.copies.staging import Slot, Staging
from zslurm.train.recovery.generation import buddy_of, ward_of
from zslurm.train.recovery.trainer_state import capture


class StepCopies:
    """The copies of one rank's state while it trains.

    Attributes:
        staging: its own copies.
        copies: sends them, and keeps another rank's.
        need: bytes of host memory that copies take on this node.
        whole: a step that is whole everywhere; -1: none yet.
    """

    def __init__(self, config: RecoveryConfig, live: Mapping[str, Tensor], world: World, *, saves: bool) -> None:
        """Measure what copies of the tensors `live` take; `allocate` takes it."""
        self._config, self._live, self._saves = config, live, saves
        own_bytes = snapshot_bytes(live)
        self.need = (copies_bytes(own_bytes, world.size) + (own_bytes if saves else 0)) * world.local_size
        self.whole = -1
        self._taken: Slot | None = None
        self._may_copy = True
        self._done = 0

    def check_fits(self, world: World, *, share: float = 1.0) -> None:
        """Make sure that copies fit into a share of the free memory of every node.

        Raises:
            ConfigError: they do not fit into this node's memory, or into recovery.memory_gb.
        """
        problem, limit = "", self._config.memory_gb
        if limit is not None and self.need > limit * 2**30:
            problem = f"recovery.memory_gb: {limit:g} GiB"
        elif self.need > share * (free := available_memory()):
            problem = f"aegis.recovery: {show_bytes(free)} are free"
        if problem := _first(problem, world):
            raise ConfigError(
                f"{problem}, but copies of the state for recovery in memory take {show_bytes(self.need)} on a "
                "node; use more nodes, raise the limit, or set aegis.recovery: restart"
            )

    def allocate(self, host: str) -> None:
        """Take the memory, and listen for copies at an address of this node."""
        self.staging = Staging(self._live, 3 if self._saves else 2)
        self.copies = Copies(self.staging, host)

    def source_of_saves(self, checkpointer: Checkpointer) -> Callable[[], Snapshot] | None:
        """Return what gives saves a source out of the copies; None if saves are not written from them."""
        if not self._saves:
            return None
        return lambda: self.staging.for_saves(lambda: checkpointer.saving, lambda: self.whole)

    def described(self, world: World) -> str:
        """Describe how often copies are made, which memory holds them, and what they take."""
        every = self._config.every_steps
        often = "every step" if every == 1 else f"every {counted(every, 'step')}"
        size = f"{show_bytes(self.need)} of host memory on each node"
        if world.size == 1:
            return f"one rank has no buddy: a copy of the state {often} ({size}) helps nothing if it is lost"
        if world.local_size >= world.size:
            return (
                f"one node, so no rank has a buddy on another: copies {often} ({size}) are with the next rank, "
                "and survive a killed rank, not a dead node"
            )
        return f"a copy of each rank's state {often}, with the rank {world.local_size} after it as well ({size})"

    # --------------------------------------------------------------------------------------------- step by step

    def agree(self, busy: float) -> None:
        """Take the number of copies that are under way: at 0 the last one is whole, and the next may begin."""
        self._may_copy = busy == 0
        if self._may_copy and self._taken is not None:
            self.whole, self._taken = self._taken.step, None

    def copy(self, trainer: Trainer, *, at_once: bool = False) -> Slot | None:
        """Begin a copy at a step's boundary, if one is due, or wanted at once, and the last one is whole.

        Returns:
            The copy that was begun; None if none was.
        """
        self._done = trainer.step
        due = at_once or trainer.step % self._config.every_steps == 0 or self.whole < 0
        if not self._may_copy or not due or self.whole == trainer.step:
            return None
        cursor, extras = capture(trainer)
        self._taken = self.staging.take(trainer.step, cursor, extras, self.whole)
        self._may_copy = False
        self.copies.send(self._taken)
        return self._taken

    def stop(self, trainer: Trainer) -> None:
        """Break off what is under way: the other ends are in a generation that is over."""
        self.copies.disconnect()
        self.staging.settle()
        self._done = max(self._done, trainer.step)

    def went_back(self, slot: Slot, *, to_send: bool) -> None:
        """Continue from a step that all ranks went back to; its copy goes to a buddy that does not have it."""
        self.staging.forget_after(slot.step)
        self.copies.forget_after(slot.step)
        self.whole, self._taken, self._may_copy = slot.step, None, False
        slot.whole = True
        if to_send:
            self.copies.send(slot)

    # ------------------------------------------------------------------------------------- what all ranks know

    def exchange(self, trainer: Trainer, *, save: bool) -> list[dict[str, Any]]:
        """Give all ranks what this one has, and return what each of them has; `save` is whether a save is due."""
        own_info = {
            "own": sorted(slot.step for slot in self.staging.slots if slot.step >= 0),
            "ward": self.copies.ward,
            "held": self.copies.held_steps,
            "address": self.copies.address,
            "bytes": self.staging.slots[0].snapshot.nbytes,
            "done": self._done,
            "save": save,
        }
        infos: list[Any] = [None] * trainer.world.size
        dist.all_gather_object(infos, own_info, group=trainer.world.group)
        return infos

    def state_of_ward(self, step: int, sizes: Mapping[str, int]) -> dict[str, npt.NDArray[Any]]:
        """Return the ward's copies of a step by the name of the state, with the number of elements of each.

        Raises:
            ChangedInMemory: the copy is damaged.
        """
        held, arrays, start = self.copies.held_state(step), {}, 0
        for name, array in self.staging.slots[0].snapshot.arrays.items():
            stop = start + sizes[name] * array.dtype.itemsize
            arrays[name] = held[start:stop].view(array.dtype)
            start = stop
        return arrays

    def connect(self, world: World, infos: list[dict[str, Any]]) -> None:
        """Copy to this rank's buddy from now on, and make room for the ward's state."""
        buddy = buddy_of(world.rank, world.size, world.local_size)
        ward = ward_of(world.rank, world.size, world.local_size)
        address = None if buddy is None else tuple(infos[buddy]["address"])
        ward_bytes = 0 if ward is None else int(infos[ward]["bytes"])
        self.copies.connect(world.generation, address, ward, ward_bytes)

    def slot_of(
        self, step: int, infos: list[dict[str, Any]], rank: int, deadline_s: float, over: Callable[[], bool]
    ) -> Slot:
        """Return this rank's copy of a step, which its buddy sends if it has none; send the ward's likewise.

        Raises:
            RuntimeError: `over` returned true, or the ward was lost as well.
            CannotRecover: a copy is damaged, or did not come.
        """
        slot = self.staging.of_step(step)
        if slot is None:
            slot = self.staging.to_fill()
            self.copies.expect(slot, step)
        ward = self.copies.ward
        if ward is not None and step not in infos[ward]["own"]:
            try:
                self.copies.return_to(tuple(infos[ward]["address"]), step, over)
            except ChangedInMemory as error:
                raise CannotRecover(f"recovery: rank {ward} did not get its state back: {error}") from error
            except OSError as error:  # it may be lost as well, and replaced by a further generation
                raise RuntimeError(f"rank {ward} did not get its state back: {error}") from error
        if slot.step != step:
            deadline = time.monotonic() + deadline_s
            while not self.copies.received(PAUSE_S[1]):
                if over():
                    raise RuntimeError("a further rank was lost")
                if time.monotonic() > deadline:
                    raise CannotRecover(f"recovery: rank {rank}'s buddy did not send its state")
        return slot


def _first(problem: str, world: World) -> str:
    if world.joined:
        return problem
    problems: list[Any] = [None] * world.size
    dist.all_gather_object(problems, problem, group=world.group)
    return next((text for text in problems if text), "")
