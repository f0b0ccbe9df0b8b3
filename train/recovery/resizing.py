"""Another number of ranks, in the processes that are left: a new trainer around the same model.

    hand over   the old trainer lets go of the model, of saves in progress and of its record of progress
    regroup     the members take their new ranks, and make the group of all of them
    make        the next trainer divides the model again, as at the start of a run, and the loader with it
    refill      its masters and its optimizer's state come from the copies of the former ranks (resplit.py)

The model stays as it is, and so does what was compiled of it. The copies of the former ranks are given up once
they were used; the first new ones are whole a step later. What goes wrong in between ends the recovery.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.config import ParallelConfig
from zslurm.train.errors import CannotRecover, TrainError
from zslurm.train.loop import Trainer
from zslurm.train.parallel.world import World, regroup
from zslurm.train.recovery.abort import leave_groups
from zslurm.train.recovery.copies.agreement import is_intact, shared_crc
from zslurm.train.recovery.copies.buddy_copies import ChangedInMemory
from zslurm.train.recovery.copying import StepCopies
from zslurm.train.recovery.generation import Generation, failed, recovered
from zslurm.train.recovery.membership import BROKEN, Membership
from zslurm.train.recovery.resplit import Arrays, Holding, exchange, givers, newest_whole, why_none
from zslurm.train.recovery.trainer_state import HandedOver, continue_from, owned_by

_LOG = logging.getLogger(__name__)


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
        """Meet the members that are left, and yield their world, in which the block makes a trainer and fills it.

        Raises:
            CannotRecover: that is not possible, or a further rank was lost: its copies are of the former ranks.
        """
        generation, membership = self.generation, self.membership
        self.save = handed_over.save or self.save
        try:
            self._check()
            leave_groups()
            membership.take_rank(generation)
            membership.check_in(generation)
            world = replace(
                handed_over.world, rank=membership.rank, size=membership.size, joined=False, resized=True
            )
            regroup(
                world,
                config,
                generation.number,
                lambda: membership.connecting(generation),
                membership.making_groups,
            )
            yield world
            membership.groups_made()
        except (*BROKEN, TrainError) as error:
            reason = f"while the number of ranks changed: {str(error).splitlines()[0]}"
            newest = membership.newest or generation
            membership.report(failed(newest.number, membership.rank, reason))
            raise CannotRecover(f"recovery: {reason}") from None
        seconds = time.monotonic() - self.started
        if world.is_first:
            membership.report(recovered(generation.number, self.step, self.rolled_back, seconds))
        _LOG.info(
            "recovery: generation %d trains on from step %d (%s back) on %s after %.3f s",
            generation.number, self.step, counted(self.rolled_back, "step"), counted(world.size, "rank"), seconds,
        )  # fmt: skip

    def _check(self) -> None:
        """Make sure that the generation follows on the one that this process is in.

        Raises:
            CannotRecover: it does not.
        """
        generation, membership = self.generation, self.membership
        rank = generation.rank_of(membership.member)
        former = None if rank is None else generation.former[rank]
        if (former, generation.former_size) != (membership.rank, membership.size):
            raise CannotRecover(
                f"generation {generation.number} does not follow on that of rank {membership.rank} of "
                f"{membership.size}"
            )

    def refill(self, trainer: Trainer, handed_over: HandedOver) -> bool:
        """Fill a new trainer from the copies of the former ranks, and give these copies up.

        Returns:
            Whether a save was due, or in progress, on some rank.

        Raises:
            CannotRecover: the copies are not whole.
            TrainError: the ranks do not hold the same weights.
        """
        copying, generation, rank = self.copying, self.generation, trainer.world.rank
        assert copying is not None
        infos = copying.exchange(trainer, save=self.save)
        members = [
            Holding(before, info["own"], info["ward"], info["held"])
            for before, info in zip(generation.former, infos, strict=True)
        ]
        self.step = step = newest_whole(members, generation.former_size)
        if step < 0:
            raise CannotRecover(f"recovery: {why_none(members, generation.former_size)}")
        slot, me = copying.staging.of_step(step), members[rank]
        assert slot is not None
        if not is_intact(slot):
            raise CannotRecover(f"recovery: a copy of step {step} has changed in memory: its CRC32 differs")
        given_by = [giver for giver in givers(members, generation.former_size, step) if giver is not None]
        own_arrays: dict[int, Arrays] = {me.former: slot.snapshot.arrays}
        if me.ward is not None and given_by[me.ward] == rank:
            sizes = {name: stop - start for name, (start, stop) in handed_over.owned(me.ward).spans.items()}
            try:
                own_arrays[me.ward] = copying.state_of_ward(step, sizes)
            except ChangedInMemory as error:
                raise CannotRecover(f"recovery: the copy of rank {me.ward}'s state: {error}") from error
        now = owned_by(trainer.shards, trainer.world)
        exchange(trainer.optimizer.states, own_arrays, given_by, handed_over.owned, now, trainer.world.group)
        self.rolled_back = max(info["done"] for info in infos) - step
        copying.copies.close()
        self.copying = None
        continue_from(trainer, slot.cursor, slot.extras)
        trainer.checkpointer.gather_and_compare(shared_crc(slot))
        trainer.checkpointer.wait_for(handed_over.writers)
        return any(info["save"] for info in infos)
