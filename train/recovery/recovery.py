"""One rank's part in a recovery in memory: from the copies of its state to the first step of a new generation.

    while training     after each step (or every k-th) the state is copied, see copies/
    a rank is lost     the supervisor publishes a generation with another process in its place (generation.py);
                       the watcher aborts this process's collectives (abort.py), and the trainer's thread raises
    regroup            leave the old groups; wait until every member has left; make new ones
    agree              the newest step that all can have again; a rank without it gets it from its buddy
    go back            every rank restores that step from host memory, the weights are gathered from the masters
    compare            a CRC32 of weights and shared state over all ranks, before the first new step
    answer             rank 0 reports the step to the supervisor, and training continues from there

The process that takes a rank's place (zslurm/job/in_memory/warm_rank.py) has made its model before, and enters at
`agree`. What goes wrong on the way is reported with its reason; the rank then ends as it would have without a
recovery, and the supervisor restarts the run. A further rank that is lost during it makes a further generation,
and everything begins again with it: the copies are not touched before the next step.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from zslurm.checkpoint_tools.quantities import counted
from zslurm.train import setup
from zslurm.train.config import TrainConfig
from zslurm.train.errors import CannotRecover, ConfigError, TrainError
from zslurm.train.loop import Trainer
from zslurm.train.model.zaya import Zaya
from zslurm.train.parallel.facts import AgreedFacts
from zslurm.train.parallel.world import World, choose_device, open_world, regroup
from zslurm.train.recovery.abort import NCCL_VARIABLES, leave_groups, why_not
from zslurm.train.recovery.copies.agreement import is_intact, shared_crc, whole_step, why_none
from zslurm.train.recovery.copying import StepCopies
from zslurm.train.recovery.durations import Parts
from zslurm.train.recovery.generation import (
    FACTS,
    RECOVERING,
    RECOVERY_VARIABLE,
    Generation,
    buddy_of,
    failed,
    recovered,
    ward_of,
)
from zslurm.train.recovery.membership import BROKEN, Membership, report_off
from zslurm.train.recovery.moves import leave_if_moved
from zslurm.train.recovery.resizing import Resizing
from zslurm.train.recovery.trainer_state import go_back, hand_over, leave, rejoin
from zslurm.train.step_signals import StepSignals
from zslurm.train.stop import Ending, StopRequest

_LOG = logging.getLogger(__name__)
_LOST_PEER = ("gloo", "NCCL", "Connection", "Broken pipe")
"""Words by which an error of a collective is known."""


def open_recovery(config: TrainConfig, generation: Generation | None = None) -> Recovery | None:
    """Return the recovery of this process; None unless a store server was started for it.

    `generation` is the one that this process joins if it takes a rank's place.

    Raises:
        ConfigError: the device does not exist.
    """
    wanted = os.environ.get(RECOVERY_VARIABLE)
    if wanted not in RECOVERING or "MASTER_ADDR" not in os.environ:
        return None
    device = choose_device(config.parallel.device, int(os.environ.get("LOCAL_RANK", "0")))
    if why := why_not(device, untried=wanted == "memory"):
        if os.environ.get("RANK") == "0":
            _LOG.warning("recovery: off, faults restart the ranks: %s", why)
            report_off(why)
        return None
    return Recovery(config, device, generation)


_AUTO_SHARE = 0.7
"""Share of a node's free memory that copies take if nobody asked for them: loaders and page cache need some."""


class Recovery:
    """Trains one rank and continues after other ranks are lost; takes part in each step (`StepCallback`)."""

    def __init__(self, config: TrainConfig, device: torch.device, generation: Generation | None) -> None:
        """Begin to watch for generations after this one, by default after the start."""
        if device.type == "cuda":
            for name, value in NCCL_VARIABLES.items():
                os.environ.setdefault(name, value)
        self._config = config
        self._trainer: Trainer | None = None
        self._copying: StepCopies | None = None
        self._save = False  # one was due, or in progress, when a rank was lost
        self._resizing: Resizing | None = None
        self._membership = Membership(device, generation, config.recovery.wait_s, self._end_waits)
        self._facts: AgreedFacts | None = None
        if generation is not None:
            self._facts = AgreedFacts.of_json(self._membership.store.get(FACTS))
            self._facts.adopt()

    def fence(self) -> None:
        """Return only in a process that has not been replaced."""
        self._membership.fence()

    def train(
        self, run_dir: Path, stop: StopRequest, model: Zaya | None, becomes: Callable[[int], None]
    ) -> tuple[Trainer, Ending]:
        """Train a rank of the run to its end, in one generation after the other.

        A process that takes a rank's place may have made its `model` before. `becomes` is called with the new rank
        of this process if the number of ranks changes.

        Returns:
            The last trainer, and how training ended.

        Raises:
            CannotRecover: the ranks cannot continue in memory.
        """
        config, making_groups = self._config, self._membership.making_groups
        with open_world(config.parallel, making_groups, self._enter(), self.fence) as world:
            joins = self._membership.joins
            if joins is not None and joins.resizes:
                trainer = self._join_more(run_dir, stop, model, world, joins)
            else:
                trainer = setup.build(run_dir, config, world, stop, model=model, facts=self._facts)
                if not world.joined:
                    setup.load(trainer)
                self._begin(trainer)
            while (ending := self._run(trainer)) is None:
                resizing, handed_over = self._resizing, hand_over(trainer)
                assert resizing is not None
                # The next trainer makes its own buffers: nothing may hold this one's any more.
                self._trainer = self._copying = None
                del trainer
                with resizing.new_ranks(handed_over, config.parallel) as resized:
                    becomes(resized.rank)
                    trainer = setup.build(run_dir, config, resized, stop, model=handed_over.model)
                    save = resizing.refill(trainer, handed_over)
                    self._begin(trainer)
                    trainer.saves.regroup(pending=save)
                self._resizing, self._save = None, False
            self._close()
        return trainer, ending

    def _join_more(
        self, run_dir: Path, stop: StopRequest, model: Zaya | None, world: World, joins: Generation
    ) -> Trainer:
        """Return the trainer of a rank by which their number grows, filled from the copies of the others.

        Raises:
            CannotRecover: that is not possible.
        """
        resizing = Resizing(joins, self._membership, None, time.monotonic())
        with resizing.joining(world):
            trainer = setup.build(run_dir, self._config, world, stop, model=model)
            save = resizing.refill(trainer, None)
            self._begin(trainer)
            trainer.saves.regroup(pending=save)
        self._membership.joins = None
        return trainer

    def _begin(self, trainer: Trainer) -> None:
        """Get ready to copy masters and optimizer state, and to save; all ranks together, but for one that joins.

        Without memory for the copies nothing is recovered in memory.

        Raises:
            ConfigError: the copies do not fit, and they were asked for (`aegis.recovery: memory`).
        """
        world, membership = trainer.world, self._membership
        live = {state.name: state.values for state in trainer.optimizer.states}
        copying = StepCopies(self._config.recovery, live, world, saves=self._config.checkpoint.background)
        is_optional = os.environ.get(RECOVERY_VARIABLE) == "auto" and not world.joined
        try:
            copying.check_fits(world, share=_AUTO_SHARE if is_optional else 1.0)
        except ConfigError as error:
            if not is_optional:
                raise
            self._turn_off(trainer, str(error))
            return
        copying.allocate(membership.listen_at)
        membership.leave_alone(copying.copies.port)
        if world.is_first and not world.joined:
            membership.store.set(FACTS, trainer.facts.to_json())
        if not world.joined:
            copying.connect(world, copying.exchange(trainer, save=False))
            _LOG.info("recovery: %s", copying.described(world))
        self._copying = copying
        setup.begin(trainer, copying.source_of_saves(trainer.checkpointer))
        trainer.callbacks.append(self)
        self._trainer = trainer

    def _turn_off(self, trainer: Trainer, why: str) -> None:
        """Train without copies: faults restart the ranks."""
        if trainer.world.is_first:
            _LOG.warning("recovery: off, faults restart the ranks: %s", why)
            report_off(why)
        setup.begin(trainer)

    def _run(self, trainer: Trainer) -> Ending | None:
        """Train to the end of the plan, or until asked to stop; None if the number of ranks changes."""
        with trainer.observers, trainer.loader:
            self._join(trainer)
            while True:
                try:
                    ending = None
                    while ending is None:
                        self._copy(trainer)
                        ending = trainer.advance()
                    return ending
                except Exception as error:
                    trainer.progress.update(waiting=True)
                    if not self._may_recover(error):
                        raise
                    _LOG.info("recovery: %s", str(error).partition("\n")[0])
                # Outside of the handler: the error holds frames, and these hold what is dropped now.
                if not self._recover(trainer):
                    return None

    # -------------------------------------------------------------------------------------------- in each step

    def add_signals(self, signals: StepSignals) -> StepSignals:
        """Return this rank's signals with what it knows of its last copy and of planned moves."""
        return signals._replace(copying=float(self._prepared.copies.busy), moving=self._membership.moves.signal())

    def agree(self, sums: StepSignals) -> None:
        """Take the sums: if no rank is copying, the last copy is complete everywhere, and the next may begin."""
        self._prepared.agree(sums.copying)
        self._membership.moves.agree(sums.moving, self._membership.size, may_copy=sums.copying == 0)

    def before_update(self) -> None:
        """Wait, before the optimizer changes the state, until the copy has it."""
        self._prepared.staging.wait()

    def _copy(self, trainer: Trainer) -> None:
        """Begin a copy at a step's boundary if one is due, and the last one is complete everywhere.

        Raises:
            RuntimeError: ranks move to other nodes at this boundary.
            MovedOff: this one does.
        """
        if self._copying is None or trainer.step >= trainer.plan.total_steps:
            return
        moves = self._membership.moves
        taken = self._prepared.copy(trainer, at_once=moves.due)
        if taken is None or not moves.due:
            return
        if moves.hold(trainer.step, self._membership.number, lambda: taken.whole):
            raise RuntimeError(f"ranks move to other nodes after step {trainer.step}")

    def _close(self) -> None:
        """Watch no longer."""
        self._membership.close()
        if self._copying is not None:
            self._copying.copies.close()

    @property
    def _prepared(self) -> StepCopies:
        assert self._copying is not None
        return self._copying

    # ------------------------------------------------------------------------------------------------ a fault

    def _end_waits(self) -> None:
        trainer, copying = self._trainer, self._copying
        if trainer is not None:
            trainer.checkpointer.give_up_save()
        if copying is not None:
            copying.copies.stop_returning()

    def _join(self, trainer: Trainer) -> None:
        """Be ready to recover from faults. A process that joins goes back with the others first."""
        membership = self._membership
        membership.trains = True
        if membership.joins is None:
            return
        joins, membership.joins = membership.joins, None
        if membership.is_over(joins):
            self._recover_joining(trainer)
            return
        try:
            self._restore(trainer, joins, Parts())
        except BROKEN as error:
            membership.wait_for_next(error, joins)
        except TrainError as error:
            membership.report(failed(joins.number, membership.rank, str(error)))
            raise
        else:
            return
        self._recover_joining(trainer)

    def _recover_joining(self, trainer: Trainer) -> None:
        if not self._recover(trainer):
            raise CannotRecover("recovery: the number of ranks changed before this process was one of them")

    def _may_recover(self, error: BaseException) -> bool:
        """Return whether a new generation follows on an error; waits for it if peers may be gone."""
        if (
            self._copying is None
            or isinstance(error, torch.OutOfMemoryError)
            or (not isinstance(error, BROKEN) and type(error) is not TrainError)
        ):
            return False
        if self._membership.superseded:
            return True
        if not _is_lost_peer(error):
            return False
        return self._membership.wait_after(self._membership.number, self._config.recovery.wait_s)

    def _recover(self, trainer: Trainer) -> bool:
        """Regroup and go back, as often as further ranks are lost.

        Returns:
            False if the number of ranks changes: this trainer ends, and `train` makes the next one.

        Raises:
            CannotRecover: that is not possible.
        """
        parts, membership = Parts(), self._membership
        while True:
            generation = membership.newest
            assert generation is not None
            leave_if_moved(generation, membership.member)
            membership.adopt(generation)
            if generation.resizes:
                self._prepared.stop(trainer)
                self._resizing = Resizing(generation, membership, self._prepared, parts.began, self._save)
                return False
            try:
                self._regroup(trainer, generation, parts)
                self._restore(trainer, generation, parts)
                return True
            except BROKEN as error:
                membership.wait_for_next(error, generation)
            except TrainError as error:
                membership.report(failed(generation.number, membership.rank, str(error)))
                raise

    def _regroup(self, trainer: Trainer, generation: Generation, parts: Parts) -> None:
        """Leave the old groups, and make a new one of all ranks once every member has left."""
        membership = self._membership
        if generation.rank_of(membership.member) != membership.rank or len(generation.members) != membership.size:
            raise CannotRecover(
                f"generation {generation.number} has {counted(len(generation.members), 'rank')} and this process "
                f"at {generation.rank_of(membership.member)}; in memory a rank stays what it is, rank "
                f"{membership.rank} of {membership.size}"
            )
        self._prepared.stop(trainer)
        self._save = leave(trainer) or self._save
        leave_groups()
        parts.end("leave")
        membership.check_in(generation)
        parts.end("meet")
        regroup(
            trainer.world,
            self._config.parallel,
            generation.number,
            lambda: membership.connecting(generation),
            membership.making_groups,
        )
        parts.end("connect")
        rejoin(trainer)
        membership.groups_made()
        parts.end("regroup")

    def _enter(self) -> int:
        """In a process that joins: meet the other members, and return the number of their generation.

        Raises:
            CannotRecover: they do not come.
        """
        membership = self._membership
        while True:
            if membership.joins is None:
                return 0
            try:
                membership.check_in(membership.joins)
                return membership.joins.number
            except RuntimeError as error:
                membership.wait_for_next(error, membership.joins)
            membership.joins = membership.newest
            assert membership.joins is not None
            membership.adopt(membership.joins)

    def _restore(self, trainer: Trainer, generation: Generation, parts: Parts) -> None:
        """Agree on a step, and go back to it."""
        world, copying, membership = trainer.world, self._prepared, self._membership
        infos = copying.exchange(trainer, save=self._save)
        buddies = [buddy_of(rank, world.size, world.local_size) for rank in range(world.size)]
        own_steps = [info["own"] for info in infos]
        # What a process holds is of the ward that it had: none yet, where it has just come.
        held = [
            info["held"] if info["ward"] == ward_of(rank, world.size, world.local_size) else []
            for rank, info in enumerate(infos)
        ]
        step = whole_step(own_steps, held, buddies)
        if step < 0:
            raise CannotRecover(f"recovery: {why_none(own_steps, held, buddies)}")
        copying.connect(world, infos)
        parts.end("agree")
        slot = copying.slot_of(
            step, infos, membership.rank, generation.deadline_s, lambda: membership.is_over(generation)
        )
        if not is_intact(slot):
            raise CannotRecover(
                f"recovery: rank {membership.rank}'s copy of step {step} has changed in memory: its CRC32 differs"
            )
        parts.end("return")
        go_back(trainer, slot, save=any(info["save"] for info in infos))
        parts.end("restore")
        trainer.checkpointer.gather_and_compare(shared_crc(slot.step, slot.cursor, slot.extras))
        parts.end("compare")
        self._save = False
        buddy = buddies[world.rank]
        copying.went_back(slot, to_send=buddy is not None and step not in held[buddy])
        rolled_back = max(info["done"] for info in infos) - step
        seconds = parts.seconds
        if world.is_first:
            membership.report(recovered(generation.number, step, rolled_back, seconds))
        _LOG.info(
            "recovery: generation %d trains on from step %d (%s back) after %.3f s; %s replaced",
            generation.number, step, counted(rolled_back, "step"), seconds,
            "ranks " + ", ".join(map(str, generation.lost)) if generation.lost else "no rank",
        )  # fmt: skip
        _LOG.info("recovery: seconds (of the processor): %s", parts)


def _is_lost_peer(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or any(word in str(error) for word in _LOST_PEER)
