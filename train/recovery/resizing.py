"""Another number of ranks, in the processes that are left: a new trainer around the same model.

    hand over   the old trainer lets go of the model, of saves in progress and of its record of progress
    regroup     the members take their new ranks, and make the group of all of them
    make        the next trainer divides the model again, as at the start of a run, and the loader with it
    refill      its masters and its optimizer's state come from the copies of the former ranks (resplit.py)

The number shrinks if ranks are lost that nobody replaces, and grows at a step's boundary by processes that join
(`NEW` in Generation.former): these hold no copies, and learn from rank 0 what the former ranks owned.

The model stays as it is, and so does what was compiled of it. The copies of the former ranks are given up once
they were used; the first new ones are whole a step later. If members do not come, the next generation is tried
with the same copies; what goes wrong after they have met ends the recovery.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.config import ParallelConfig
from zslurm.train.errors import CannotRecover, TrainError
from zslurm.train.loop import Trainer
from zslurm.train.parallel.world import World, regroup
from zslurm.train.recovery.abort import leave_groups
from zslurm.train.recovery.copies.agreement import is_intact, shared_crc, shared_extras
from zslurm.train.recovery.copies.buddy_copies import ChangedInMemory
from zslurm.train.recovery.copying import StepCopies
from zslurm.train.recovery.generation import Generation, failed, recovered
from zslurm.train.recovery.membership import BROKEN, Membership
from zslurm.train.recovery.resplit import Arrays, Holding, Owned, exchange, givers, newest_whole, why_none
from zslurm.train.recovery.trainer_state import HandedOver, continue_from, owned_by

_LOG = logging.getLogger(__name__)
_NOTHING: dict[str, Any] = {"own": [], "ward": None, "held": [], "done": -1, "save": False}
"""What a process has that had no rank; see `StepCopies.exchange`."""


@dataclass
class Resizing:
    """One change of the number of ranks.

    Attributes:
        generation: in which it happens.
        membership: of this process.
        copying: the copies of the former ranks; None once they were used.
        started: when (monotonic seconds).
        save: whether a save was due on this rank, or in progress.
        step, rolled_back: where training continues, and how many steps had been done after it.
    """

    generation: Generation
    membership: Membership
    copying: StepCopies | None
    started: float
    save: bool = False
    step: int = -1
    rolled_back: int = 0

    @contextmanager
    def new_ranks(self, handed_over: HandedOver, config: ParallelConfig) -> Iterator[World]:
        """Meet the other members, and yield their world, in which the block makes a trainer and fills it.

        Raises:
            CannotRecover: that is not possible, or a rank was lost after the members had met.
        """
        self.save = handed_over.save or self.save
        with self._reporting():
            world = self._meet(handed_over.world, config)
            yield world
        self._report_recovered(world)

    @contextmanager
    def joining(self, world: World) -> Iterator[None]:
        """In a process that had no rank, which has met the others: make a trainer and fill it in the block.

        Raises:
            CannotRecover: that is not possible, or a rank was lost meanwhile.
        """
        world.joined, world.resized = False, True
        with self._reporting():
            yield
        self._report_recovered(world)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        membership = self.membership
        try:
            yield
            membership.groups_made()
        except (*BROKEN, TrainError) as error:
            reason = f"while the number of ranks changed: {str(error).splitlines()[0]}"
            newest = self.generation if membership.joins is not None else membership.newest or self.generation
            membership.report(failed(newest.number, membership.rank, reason))
            raise CannotRecover(f"recovery: {reason}") from None

    def _report_recovered(self, world: World) -> None:
        seconds = time.monotonic() - self.started
        if world.is_first:
            self.membership.report(recovered(self.generation.number, self.step, self.rolled_back, seconds))
        _LOG.info(
            "recovery: generation %d trains on from step %d (%s back) on %s after %.3f s",
            self.generation.number, self.step, counted(self.rolled_back, "step"), counted(world.size, "rank"),
            seconds,
        )  # fmt: skip

    def _meet(self, before: World, config: ParallelConfig) -> World:
        """Make the group of all members; if some do not come, that of the generation after it.

        Raises:
            CannotRecover: there is none, or it does not follow on the ranks whose copies are here.
        """
        membership = self.membership
        former = membership.rank, membership.size
        while True:
            generation = self.generation
            self._check(*former)
            leave_groups()
            try:
                membership.take_rank(generation)
                membership.check_in(generation)
                world = replace(before, rank=membership.rank, size=membership.size, joined=False, resized=True)
                regroup(
                    world,
                    config,
                    generation.number,
                    partial(membership.connecting, generation),
                    membership.making_groups,
                )
                return world
            except BROKEN as error:
                membership.wait_for_next(error, generation)
            newest = membership.newest
            assert newest is not None
            membership.adopt(newest)
            self.generation = newest

    def _check(self, rank: int, size: int) -> None:
        """Make sure that the generation follows on the one in which this process was a rank of so many.

        Raises:
            CannotRecover: it does not.
        """
        generation = self.generation
        now = generation.rank_of(self.membership.member)
        former = None if now is None or not generation.resizes else generation.former[now]
        if (former, generation.former_size) != (rank, size):
            raise CannotRecover(f"generation {generation.number} does not follow on that of rank {rank} of {size}")

    def refill(self, trainer: Trainer, handed_over: HandedOver | None) -> bool:
        """Fill a new trainer from the copies of the former ranks, and give these copies up.

        Args:
            trainer: the new one.
            handed_over: what the former trainer has left; None in a process that had no rank.

        Returns:
            Whether a save was due, or in progress, on some rank.

        Raises:
            CannotRecover: the copies are not whole.
            TrainError: the ranks do not hold the same weights.
        """
        copying, generation, world = self.copying, self.generation, trainer.world
        infos: list[Any] = [None] * world.size
        if copying is None:
            dist.all_gather_object(infos, _NOTHING, group=world.group)
        else:
            infos = copying.exchange(trainer, save=self.save)
        members = [
            Holding(before, info["own"], info["ward"], info["held"])
            for before, info in zip(generation.former, infos, strict=True)
        ]
        self.step = step = newest_whole(members, generation.former_size)
        if step < 0:
            raise CannotRecover(f"recovery: {why_none(members, generation.former_size)}")
        given_by = [giver for giver in givers(members, generation.former_size, step) if giver is not None]
        slot = None if copying is None else copying.staging.of_step(step)
        if slot is not None and not is_intact(slot):
            raise CannotRecover(f"recovery: a copy of step {step} has changed in memory: its CRC32 differs")
        owned_before: list[Owned] = []
        cursor: Mapping[str, Any] = {}
        extras: Mapping[str, Tensor] = {}
        if handed_over is not None and slot is not None:
            owned_before = [handed_over.owned(former) for former in range(generation.former_size)]
            cursor, extras = slot.cursor, slot.extras
        if generation.grows:  # those that had no rank have the last numbers now: rank 0 had one
            shared = [(owned_before, cursor, shared_extras(extras))]
            dist.broadcast_object_list(shared, src=0, group=world.group)
            owned_before, cursor, extras = shared[0] if slot is None else (owned_before, cursor, extras)
        own_arrays: dict[int, Arrays] = {}
        me = members[world.rank]
        if copying is not None and slot is not None:
            own_arrays[me.former] = slot.snapshot.arrays
            if me.ward is not None and given_by[me.ward] == world.rank:
                sizes = {name: stop - start for name, (start, stop) in owned_before[me.ward].spans.items()}
                try:
                    own_arrays[me.ward] = copying.state_of_ward(step, sizes)
                except ChangedInMemory as error:
                    raise CannotRecover(f"recovery: the copy of rank {me.ward}'s state: {error}") from error
        now = owned_by(trainer.shards, world)
        states = trainer.optimizer.states
        exchange(states, own_arrays, given_by, owned_before.__getitem__, now, world.group)
        self.rolled_back = max(info["done"] for info in infos) - step
        if copying is not None:
            copying.copies.close()
        self.copying = None
        continue_from(trainer, cursor, extras)
        trainer.checkpointer.gather_and_compare(shared_crc(step, cursor, extras))
        if handed_over is not None:
            trainer.checkpointer.wait_for(handed_over.writers)
        return any(info["save"] for info in infos)
