"""Train: the loop, which reads like the algorithm.

    for each step:
        each rank runs its microbatches forward and backward, gradients summed in one flat buffer and reduced
            bucket by bucket during the last backward
        clip, update this rank's chunk, all-gather the weights under the next forward
        balance the experts, report to the observers, save when it is time or when asked to stop

`train(run_dir)` in main.py is the whole program of one rank. What watches the loop is in telemetry/.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zslurm.checkpoint_tools.format.partition import Partition
from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.assembly import assemble, make_contexts, make_or_choose_levels
from zslurm.train.checkpointing.checkpointer import Checkpointer, Restored, SaveRequest
from zslurm.train.checkpointing.save_schedule import SaveSchedule, SaveSignals
from zslurm.train.config import RESUMED_FROM, TrainConfig
from zslurm.train.context.layout import check_phases
from zslurm.train.data.loader import Loader
from zslurm.train.data.order import DataOrder
from zslurm.train.data.training_data import TrainingData
from zslurm.train.evaluation.evaluate import Best
from zslurm.train.evaluation.evaluations import Evaluations
from zslurm.train.model.zaya import Zaya
from zslurm.train.optim.balance import BALANCE_TENSORS, BalanceState, balance_over
from zslurm.train.optim.sharded import ShardedOptimizer, spans_of
from zslurm.train.optim.stability import Recent, SkippedStep, StepGuard
from zslurm.train.parallel.kernel_agreement import leave_out_together
from zslurm.train.parallel.world import (
    World,
    common_local_size,
    read_back,
    to_device,
)
from zslurm.train.progress import Phase, ProgressWriter
from zslurm.train.recovery.copies.staging import Slot
from zslurm.train.recovery.no_recovery import HandedOver, NoRecovery
from zslurm.train.recovery.resplit import Owned
from zslurm.train.schedule import Plan, Position, check_ranks, compare
from zslurm.train.stop import StopRequest
from zslurm.train.telemetry.metrics_file import last_attempt
from zslurm.train.telemetry.observer import StepResult
from zslurm.train.telemetry.observers import Observers, check_observers
from zslurm.train.telemetry.timing import Part, StepClock, work_time_ns

_LOG = logging.getLogger(__name__)


class Ending(IntEnum):
    """Exit code of a rank that ends in order."""

    COMPLETED = 0
    INTERRUPTED = 75  # saved and stopped because it was asked to: start again to continue


class StepSignals(NamedTuple):
    """What the ranks sum in each step besides losses and gradients: counts, or on how many ranks something holds.

    Attributes:
        targets: tokens whose losses count.
        stop: ranks that were asked to stop.
        copying: ranks whose last copy for recovery in memory is not whole.
        moving: ranks that know of a planned move.
        saving, overdue, failed_saves: see `SaveSignals`.
    """

    targets: float
    stop: float
    copying: float
    moving: float
    saving: float
    overdue: float
    failed_saves: float


class Trainer:
    """Trains one rank of a run.

    Attributes:
        step: optimizer steps that are done.
        work_ns: nanoseconds of this rank's own work per microbatch, summed over the steps of this attempt.
    """

    def __init__(
        self,
        run_dir: Path,
        config: TrainConfig,
        world: World,
        stop: StopRequest,
        recovery: NoRecovery | None = None,
        model: Zaya | None = None,
        left: HandedOver | None = None,
    ) -> None:
        """Build everything, and load the newest checkpoint if there is one.

        The order matters: what is wrong with the run is found before memory is taken, the random state is set
        before the model is made, and everything is there before a checkpoint fills it.

        A process that takes the place of a rank (`world.joined`) makes no collectives but those of its groups,
        which the other ranks make with it, loads nothing, and may have made its `model` before. Where the number
        of ranks has changed (`world.resized`), all ranks continue from what their trainers have `left`.

        Raises:
            ConfigError, DataError: the run cannot be trained as configured.
            TrainError: no checkpoint can be read.
        """
        self.config, self.world, self.stop = config, world, stop
        self.plan, self.step, self.work_ns = Plan(config.phases), 0, 0
        self._kernels_ran = False
        # All ranks connect before one may refuse the run: if one exits earlier, the others fail to connect.
        local = world.local_size if world.joined else common_local_size(world)
        check_observers(config)
        check_phases(config.model, config.phases)
        notes = check_ranks(config.phases, world.size, local)
        attempt = int(os.environ.get("ZSLURM_ATTEMPT", "0")) or 1 + last_attempt(run_dir)
        self.recovery = recovery or NoRecovery()
        self.progress = ProgressWriter(world.rank, attempt, fence=self.recovery.fence)
        data = TrainingData.open(config.data)
        data.check_fits(config.model.vocab_size)
        tokenizer = data.header.tokenizer_sha256
        self.order = DataOrder(data, self.plan, config.run.seed, config.data.packing)
        self.order.check_epochs(config.data.max_epochs)
        self.loader = Loader(
            self.order,
            rank=world.rank,
            world_size=world.size,
            device=world.device,
            prefetch=config.data.prefetch,
            isolate_documents=config.data.isolate_documents,
        )
        self.evaluator = Evaluations.open(run_dir, config, tokenizer, world)
        with self.recovery.making_groups():
            self.contexts = make_contexts(config)
        torch.manual_seed(config.run.seed * 1_000_003 + world.rank)
        self.model, self.shards, self.facts = assemble(config, world, self.recovery, model)
        self.optimizer = ShardedOptimizer(self.shards, config.optim)
        self.balance, self.guard = BalanceState.initial(config.model, world.device), StepGuard(config.optim)
        self.checkpointer = Checkpointer(
            run_dir / "checkpoints", world, config, self.shards, self.optimizer, attempt=attempt
        )
        save_pending = left is not None and self._refill(left)
        if not world.joined and left is None:
            restored = self.checkpointer.load_newest(starts_elsewhere=config.init is not None)
            if restored is None:
                self._start(tokenizer)
            else:
                self._resume(restored)
        for note in notes:
            _LOG.info("note: %s", note)
        total_steps = self.plan.total_steps
        self.observers = Observers(
            run_dir,
            config,
            world,
            attempt=attempt,
            done=self.step,
            total_steps=total_steps,
            sources=self.order.progress,
        )
        self.clock = StepClock(world.device)
        self.model.call_before(self._wait_for_weights)
        live = {state.name: state.values for state in self.optimizer.states}
        source = self.recovery.prepare(self, live, self.facts, saves=config.checkpoint.background)
        staging = None if source is None else partial(source, lambda: self.checkpointer.saving)
        _LOG.info(self.checkpointer.prepare(staging, self.recovery.fence))
        self.recovery.save_with(lambda: self.checkpointer.give_up_save())
        self.saves = SaveSchedule(
            self.checkpointer,
            config.checkpoint,
            self.progress,
            first=world.is_first,
            record=self.observers.record,
            committed=self.observers.checkpoint_committed,
        )
        if left is not None:
            self.saves.regroup(pending=save_pending)
        self._kernels_ran = False

    def _start(self, tokenizer_sha256: str) -> None:
        """Begin at step 0, from fresh weights or from those that `init` names."""
        init, weights = self.config.init, ""
        if init is not None:
            self._set_balance(self.checkpointer.start_from(init, tokenizer_sha256))
            weights = f" from the weights of {init}"
        ranks, device = counted(self.world.size, "rank"), self.world.device.type
        _LOG.info("starting %s on %s (%s)%s", self.config.run.name, ranks, device, weights)

    def _resume(self, restored: Restored) -> None:
        """Continue after a checkpoint, whose tensors are loaded already."""
        cursor, self.step = restored.cursor, restored.step
        changes = compare(cursor.get("plan"), self.plan, self.step)
        for change in changes + self.order.changes(cursor, self.step):
            _LOG.info("note: %s", change)
        if "recent" in cursor:
            self.guard.recent = Recent.of(cursor["recent"])
        if cursor.get("best"):
            self.evaluator.best = Best(**cursor["best"])
        self._set_balance(restored.balance)
        ranks = counted(self.world.size, "rank")
        _LOG.info("resuming %s from %s on %s", self.config.run.name, restored.path.name, ranks)

    def _set_balance(self, balance: BalanceState) -> None:
        self.balance = balance
        self.model.balancing_bias.copy_(balance.bias)

    def run(self) -> Ending | None:
        """Train to the end of the plan, or until asked to stop; None where the number of ranks changes."""
        with self.observers, self.loader:
            self.recovery.begin(self)
            while True:
                try:
                    return self._run()
                except Exception as error:
                    if self.recovery.enabled:
                        self.progress.update(waiting=True)
                    if not self.recovery.may_recover(error):
                        raise
                    _LOG.info("recovery: %s", str(error).partition("\n")[0])
                # Outside of the handler: the error holds frames, and these hold what is dropped now.
                if not self.recovery.recover(self):
                    return None

    def take_step(self) -> tuple[Position, StepResult]:
        """Take the next step and report it to the observers, which are open, as the loader is."""
        here = self.plan.at(self.step)
        result = self.train_step(here)
        if not self._kernels_ran or here.step_in_phase == 0:
            self._wait_for_weights()
            leave_out_together(self.world.group, self.world.device)
            self._kernels_ran = result.taken  # those of the update run in no step that is skipped
        self.recovery.fence()
        self.stop.renew()
        self.step += 1
        self.progress.update(phase=Phase.STEP, step=self.step, work_ns=self.work_ns)
        split = self.clock.end_step()
        sequences = sum(piece.sequences for piece in self.loader.share(here))
        self.work_ns += work_time_ns(split, sequences / here.phase.micro_batch)
        self.observers.step_done(self.step, here, result, split)
        self.saves.report()
        return here, result

    def _run(self) -> Ending:
        while self.step < self.plan.total_steps:
            self.recovery.copy(self)
            here, result = self.take_step()
            last = self.step == self.plan.total_steps
            if self.evaluator.is_due(self.step, last=last, stop=result.stop):
                self._evaluate(here, last=last)
            due = self.saves.is_due(self.step, taken=result.taken, needed=self.observers.need_checkpoint())
            if last or result.stop:
                self._save(wait=True)
            elif due and self.saves.may_start():
                self._save(wait=False)
            if result.stop and not last:
                self.checkpointer.close()
                _LOG.info("stopped as asked after step %d; start again to continue", self.step)
                return Ending.INTERRUPTED
        self.checkpointer.close()
        self.checkpointer.forget_copies()
        self.progress.update(phase=Phase.DONE)
        _LOG.info("completed %s, saved at %d", counted(self.plan.total_steps, "step"), self.step)
        return Ending.COMPLETED

    def train_step(self, here: Position) -> StepResult:
        """Compute a step: forward and backward of this rank's microbatches, reduction, update."""
        self.shards.begin_step(backwards=len(self.loader.share(here)))
        loss_sums = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        optim = self.config.optim
        shares = here.microbatches if optim.balance_scope == "microbatch" else 1
        counts_MLC = torch.zeros((shares, *self.balance.bias.shape), dtype=torch.int64, device=self.world.device)
        targets, context = 0, self.contexts.get(here.phase.context_parallel)
        counts_targets = context is None or context.rank == 0
        self.clock.enter(Part.DATA)
        for microbatch in self.loader.microbatches(self.step):
            self.clock.enter(Part.FORWARD)
            losses, counts_LC = self.model.losses(
                microbatch.tokens_BS,
                microbatch.targets_BS,
                rope_base=here.phase.rope_base,
                z_weight=optim.z_loss,
                valid_BS=microbatch.valid_BS,
                document_BS=microbatch.document_BS,
                bounds_N=microbatch.bounds_N,
                context=context,
            )
            self.clock.enter(Part.BACKWARD)
            (losses.objective / here.step_tokens).backward()
            loss_sums += torch.stack([losses.cross_entropy, losses.z_loss])
            counts_MLC[microbatch.number % shares] += counts_LC
            targets += microbatch.targets if counts_targets else 0
            self.clock.enter(Part.DATA)
        self.progress.update(waiting=True)
        self.clock.enter(Part.REDUCE)
        self.shards.reduce_gradients()
        signals = StepSignals(
            targets=float(targets),
            stop=float(self.stop.asked),
            copying=self.recovery.busy(),
            moving=self.recovery.moving(),
            **self.saves.signals()._asdict(),
        )
        totals = torch.cat([loss_sums, to_device(signals, self.world.device)])
        self.shards.comm.all_reduce(totals)
        self.shards.comm.all_reduce(counts_MLC)
        if self.order.masked(here.phase_index):
            # The losses were divided by as many targets as there might be; 1 where none or all of them are masked.
            counted_targets = totals[len(loss_sums)]
            share = here.step_tokens / counted_targets
            self.shards.scale_gradients(share.where(counted_targets > 0, 1).to(self.shards.master_gradient.dtype))
        norm = self.shards.clip_gradients(optim.clip_norm)
        self.clock.enter(Part.REDUCE)
        sums, norm, counts_LC = read_back(totals, norm, counts_MLC.sum(dim=0))
        self.clock.settle()
        ce_sum, z_sum, *others = sums.tolist()
        signals = StepSignals(*others)
        stop, grad_norm, counts_LC = signals.stop > 0, norm.item(), counts_LC.long()
        self.recovery.agree(signals.copying, signals.moving)
        self.saves.agree(SaveSignals(signals.saving, signals.overdue, signals.failed_saves))
        loss_mean, z_loss = ce_sum / max(1, signals.targets), z_sum / max(1, signals.targets)
        reason = self.guard.why_skip(loss_mean, grad_norm, first_of_phase=here.step_in_phase == 0)
        if reason is not None:
            self._skip(reason, loss_mean, grad_norm)
            return StepResult(loss_mean, z_loss, grad_norm, counts_LC, stop, taken=False)
        self.clock.enter(Part.CHECKPOINT)
        self.saves.wait_for_snapshot()
        self.recovery.wait_for_copy()
        self.clock.enter(Part.OPTIMIZER)
        self.optimizer.step(here.lr)
        self.shards.start_gathering(rounded=self.optimizer.rounds)
        self.clock.enter(Part.OTHER)
        self._set_balance(balance_over(self.balance, counts_MLC, lr=optim.balance_lr, betas=optim.balance_betas))
        return StepResult(loss_mean, z_loss, grad_norm, counts_LC, stop, taken=True)

    def _wait_for_weights(self, module: str | None = None) -> None:
        """Wait for a module's weights, all by default; waiting for peers is no work of this rank's."""
        if self.shards.is_gathering(module):
            self.progress.update(waiting=True)
            with self.clock.within(Part.GATHER):
                self.shards.wait_for_weights(module)
            self.progress.update()

    def _skip(self, reason: str, loss: float, grad_norm: float) -> None:
        """Leave a step out, and report what went wrong first and where.

        Raises:
            Diverged: too many were skipped in a row.
        """
        first = None if math.isfinite(loss) and math.isfinite(grad_norm) else self.shards.first_nonfinite()
        skipped = SkippedStep(self.step + 1, reason, loss, grad_norm, *(first or (None, None)))
        self.guard.skip(skipped)
        in_a_row = self.guard.recent.skipped
        self.observers.record(
            "skipped",
            step=skipped.step,
            reason=reason,
            loss=loss if math.isfinite(loss) else None,
            grad_norm=grad_norm if math.isfinite(grad_norm) else None,
            tensor=skipped.tensor,
            rank=skipped.rank,
            in_a_row=in_a_row,
        )
        self.guard.check_limit(skipped)
        where, limit = skipped.where, self.config.optim.skip_limit
        _LOG.info("step %d is skipped: %s%s (%d in a row, of %d)", skipped.step, reason, where, in_a_row, limit)

    def _evaluate(self, here: Position, *, last: bool) -> None:
        self._wait_for_weights()
        self.progress.update(phase=Phase.EVAL)
        context = self.contexts.get(here.phase.context_parallel)
        ranks = self.world, self.progress.update, context
        with self.clock.within(None):
            for each in self.evaluator.evaluate(self.step, self.model, here.phase, *ranks, last=last):
                self.observers.record(each.kind, step=self.step, phase=here.phase.name, **each.fields)
                if each.line:
                    _LOG.info("%s", each.line)
        self.progress.update(phase=Phase.STEP)

    def _save(self, *, wait: bool) -> None:
        self._wait_for_weights()
        best, keep = self.evaluator.will_save(self.step), self.observers.checkpoints_in_use()
        if best is not None and self.config.checkpoint.keep_best:
            keep.add(best.step)
        cursor = {
            "step": self.step,
            **self.order.record(self.step),
            "plan": self.plan.record(),
            "recent": self.guard.recent.record(),
            "best": asdict(best) if best is not None else None,
            RESUMED_FROM: self.config.checkpoint.resume_from,
        }
        tokens = self.plan.tokens_after(self.step)
        self.observers.checkpoint_requested(self.step)
        with self.clock.within(Part.CHECKPOINT):
            self.saves.start(SaveRequest(self.step, tokens, cursor, self.balance, keep), wait=wait)

    # --- A recovery: see train/recovery/recovery.py -----------------------------------------------------------

    def capture(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return what a copy of this step needs beside masters and optimizer state."""
        best = self.evaluator.best
        cursor = {
            "step": self.step,
            "optimizer_steps": self.optimizer.steps,
            "balance_steps": self.balance.step,
            "recent": self.guard.recent.record(),
            "best": asdict(best) if best is not None else None,
        }
        tensors = {f"balance/{name}": getattr(self.balance, name) for name in BALANCE_TENSORS}
        tensors["rng"] = torch.get_rng_state()
        if self.world.device.type == "cuda":
            tensors["rng_device"] = torch.cuda.get_rng_state(self.world.device)
        return cursor, tensors

    def leave(self) -> bool:
        """Let go of the old groups; return whether a save was due or in progress."""
        pending = self.saves.pending
        self.shards.abandon()
        self.contexts = {}
        return pending

    def rejoin(self) -> None:
        """Make the groups of this generation beside that of all ranks, and continue over them."""
        with self.recovery.making_groups():
            self.contexts = make_contexts(self.config)
            levels = make_or_choose_levels(self.config, self.world, self.facts)
        self.shards.regroup(self.world.group, levels)

    def go_back(self, slot: Slot, *, save: bool) -> None:
        """Restore a step, after which a save is due with `save`."""
        slot.snapshot.restore()
        self._continue_from(slot.cursor, slot.extras)
        self.checkpointer.regroup()
        self.saves.regroup(pending=save)
        self.clock, self._kernels_ran = StepClock(self.world.device), False
        self.progress.update(phase=Phase.STEP, step=self.step)

    def _continue_from(self, cursor: dict[str, Any], extras: Mapping[str, Tensor]) -> None:
        """Take what `capture` returned at a step, beside which masters and optimizer state are restored."""
        device = self.world.device
        self.step, self.optimizer.steps = cursor["step"], cursor["optimizer_steps"]
        self.guard.recent = Recent.of(cursor["recent"])
        self.evaluator.best = Best(**cursor["best"]) if cursor["best"] else None
        parts = {name: extras[f"balance/{name}"].to(device) for name in BALANCE_TENSORS}
        self._set_balance(BalanceState(**parts, step=cursor["balance_steps"]))
        if "rng" in extras:
            torch.set_rng_state(extras["rng"])
        if "rng_device" in extras:
            torch.cuda.set_rng_state(extras["rng_device"], device)

    def hand_over(self) -> HandedOver:
        """Let go of everything but what the next trainer of this process takes; nothing holds this one then."""
        save, shards = self.leave(), self.shards
        shards.release()
        self.model.add_head_gradient = None
        self.model.call_before(lambda _: None)
        self.recovery.save_with(lambda: None)
        writers = self.checkpointer.hand_over()
        self.progress.remove()
        positions = [shards.position_of(rank) for rank in range(self.world.size)]
        return HandedOver(self.model, self.world, partial(_owned, shards.layout, positions), writers, save)

    def _refill(self, left: HandedOver) -> bool:
        """Continue from the copies of the ranks that there were before; returns whether a save is due."""
        positions = [self.shards.position_of(rank) for rank in range(self.world.size)]
        now = partial(_owned, self.shards.layout, positions)
        refilled = self.recovery.refill(self, self.optimizer.states, left.owned, now)
        self._continue_from(refilled.cursor, refilled.extras)
        self.compare(refilled.crc)
        self.checkpointer.wait_for(left.writers)
        return refilled.save

    def compare(self, crc: int) -> None:
        """Gather the weights, and make sure that all ranks hold the same ones, and have the same `crc`."""
        self.checkpointer.gather_and_compare(crc)


def _owned(layout: Partition, positions: Sequence[int], rank: int) -> Owned:
    """Return what a rank owns in a layout."""
    return Owned(layout.extents(positions[rank]), spans_of(layout, positions[rank]))
