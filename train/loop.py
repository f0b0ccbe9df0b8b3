"""Train: the loop, which reads like the algorithm.

    for each step:
        each rank runs its microbatches forward and backward, gradients summed in one flat buffer and reduced
            bucket by bucket during the last backward
        clip, update this rank's chunk, all-gather the weights under the next forward
        balance the experts, report to the observers, save when it is time or when asked to stop

setup.py builds what the loop works with, telemetry/ observes the steps, recovery/ continues after faults.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.checkpointing.chain import CHAIN, code_digest, digest_of, settings_of, software
from zslurm.train.checkpointing.checkpointer import Checkpointer
from zslurm.train.checkpointing.save_schedule import SaveSchedule
from zslurm.train.config import TrainConfig
from zslurm.train.context.context_parallel import ContextParallel
from zslurm.train.cursor import cursor_of
from zslurm.train.data.loader import Loader, Microbatch
from zslurm.train.data.order import DataOrder
from zslurm.train.errors import NumbersWrong
from zslurm.train.evaluation.evaluations import Evaluations
from zslurm.train.integrity.checks import Integrity
from zslurm.train.integrity.digest import digest_of_weights
from zslurm.train.model.zaya import Zaya
from zslurm.train.optim.balance import BalanceState, balance_over
from zslurm.train.optim.sharded import ShardedOptimizer
from zslurm.train.optim.stability import SkippedStep, StepGuard
from zslurm.train.parallel.facts import AgreedFacts
from zslurm.train.parallel.kernel_agreement import leave_out_together
from zslurm.train.parallel.world import World, read_back, to_device
from zslurm.train.parallel.zero import ZeroShards
from zslurm.train.progress import Phase, ProgressWriter
from zslurm.train.schedule import Plan, Position
from zslurm.train.step_signals import MicrobatchSums, StepCallback, StepSignals
from zslurm.train.stop import Ending, StopRequest
from zslurm.train.telemetry.observer import StepResult
from zslurm.train.telemetry.observers import Observers
from zslurm.train.telemetry.timing import StepClock, StepPart, work_time_ns

_LOG = logging.getLogger(__name__)


@dataclass
class Trainer:
    """Trains one rank of a run; see `setup.open_trainer`.

    Attributes:
        step: optimizer steps that are done.
        work_ns: nanoseconds of this rank's own work per microbatch, summed over the steps of this attempt.
        kernels_ran: a step has run, so that no kernel is compiled or left out any more.
    """

    run_dir: Path
    attempt: int
    config: TrainConfig
    world: World
    stop: StopRequest
    plan: Plan
    progress: ProgressWriter
    order: DataOrder
    loader: Loader
    evaluator: Evaluations
    contexts: dict[int, ContextParallel]
    model: Zaya
    shards: ZeroShards
    facts: AgreedFacts
    optimizer: ShardedOptimizer
    balance: BalanceState
    guard: StepGuard
    checkpointer: Checkpointer
    integrity: Integrity
    observers: Observers = field(init=False)
    saves: SaveSchedule = field(init=False)
    callbacks: list[StepCallback] = field(default_factory=list)
    clock: StepClock = field(init=False)
    step: int = 0
    work_ns: int = 0
    kernels_ran: bool = False

    def set_balance(self, balance: BalanceState) -> None:
        """Route by these biases from here on."""
        self.balance = balance
        self.model.balancing_bias.copy_(balance.bias)

    def run(self) -> Ending:
        """Train to the end of the plan, or until asked to stop."""
        with self.observers, self.loader:
            while (ending := self.advance()) is None:
                pass
        return ending

    def advance(self) -> Ending | None:
        """Take the next step with what is due after it; return how training ended, or None if steps follow.

        Raises:
            NumbersWrong: no restart will continue from a checkpoint after the last step whose numbers were right.
        """
        try:
            return self._advance()
        except NumbersWrong as error:
            self._go_back_to(error.verified)
            raise

    def _advance(self) -> Ending | None:
        if self.step >= self.plan.total_steps:
            return self._complete()
        position, result = self.take_step()
        last = self.step == self.plan.total_steps
        if self.evaluator.is_due(self.step, last=last, stop=result.stop):
            self._evaluate(position, last=last)
        due = self.saves.is_due(self.step, taken=result.taken, needed=self.observers.need_checkpoint())
        if last or result.stop:
            self._save(wait=True)
            self.integrity.check_at_rest(self.step)
        elif due and self.saves.may_start():
            self._save(wait=False)
        if last:
            return self._complete()
        if not result.stop:
            return None
        self.checkpointer.close()
        _LOG.info("stopped as asked after step %d; start again to continue", self.step)
        return Ending.INTERRUPTED

    def _go_back_to(self, verified: int) -> None:
        """Set the checkpoints after the last step aside whose numbers were right."""
        self.checkpointer.give_up_save()
        if self.world.is_first:
            kept = self.checkpointer.abandon_after(verified)
            repeated = counted(self.step - kept, "step")
            _LOG.warning("integrity: the run goes back to step %d, and trains %s again", kept, repeated)
        # If a rank exits, Slurm may kill the others: none does before rank 0 has renamed the checkpoints.
        self.shards.comm.all_reduce(torch.zeros(1, device=self.world.device))

    def _complete(self) -> Ending:
        self.checkpointer.close()
        self.checkpointer.forget_copies()
        self.progress.update(phase=Phase.DONE)
        _LOG.info("completed %s, saved at %d", counted(self.plan.total_steps, "step"), self.step)
        return Ending.COMPLETED

    def take_step(self) -> tuple[Position, StepResult]:
        """Take the next step and report it to the observers, which are open, as the loader is."""
        position = self.plan.at(self.step)
        result = self.train_step(position)
        if not self.kernels_ran or position.step_in_phase == 0:
            self.wait_for_weights()
            leave_out_together(self.world.group, self.world.device)
            self.kernels_ran = result.taken  # those of the update run in no step that is skipped
            self.integrity.start_over(self.step)
        self.stop.renew()
        self.step += 1
        self.progress.update(phase=Phase.STEP, step=self.step, work_ns=self.work_ns)
        split = self.clock.end_step()
        sequences = sum(piece.sequences for piece in self.loader.share(position))
        self.work_ns += work_time_ns(split, sequences / position.phase.micro_batch)
        self.observers.step_done(self.step, position, result, split)
        self.saves.report()
        return position, result

    def train_step(self, here: Position) -> StepResult:
        """Compute a step: forward and backward of this rank's microbatches, reduction, update."""
        optim = self.config.optim
        self._check_numbers(here)
        sums = self._forward_and_backward(here)
        self.progress.update(waiting=True)
        self.clock.enter(StepPart.REDUCE)
        self.shards.reduce_gradients()
        self.integrity.finish(self.observers.record)
        signals = StepSignals(float(sums.targets), float(self.stop.asked))
        for callback in self.callbacks:
            signals = callback.add_signals(signals)
        numbers = to_device(signals, self.world.device)
        if (changed := self.integrity.changed()) is not None:
            numbers[-1] = changed
        totals = torch.cat([sums.losses, numbers])
        self.shards.comm.all_reduce(totals)
        self.shards.comm.all_reduce(sums.counts_MLC)
        if self.order.masked(here.phase_index):
            # The losses were divided by as many targets as there might be; 1 if none or all of them are masked.
            counted_targets = totals[len(sums.losses)]
            share = here.step_tokens / counted_targets
            self.shards.scale_gradients(share.where(counted_targets > 0, 1).to(self.shards.master_gradient.dtype))
        norm = self.shards.clip_gradients(optim.clip_norm)
        self.clock.enter(StepPart.REDUCE)
        totals, norm, counts_LC = read_back(totals, norm, sums.counts_MLC.sum(dim=0))
        self.clock.settle()
        ce_sum, z_sum, *others = totals.tolist()
        signals = StepSignals(*others)
        if signals.changed:
            self.integrity.raise_changed(self.step, changed=changed is not None and bool(changed))
        for callback in self.callbacks:
            callback.agree(signals)
        loss, z_loss = ce_sum / max(1, signals.targets), z_sum / max(1, signals.targets)
        reason = self.guard.why_skip(loss, norm.item(), first_of_phase=here.step_in_phase == 0)
        if reason is not None:
            self._skip(reason, loss, norm.item())
        else:
            self.clock.enter(StepPart.CHECKPOINT)
            for callback in self.callbacks:
                callback.before_update()
            self.clock.enter(StepPart.OPTIMIZER)
            self.optimizer.step(here.lr)
            self.integrity.rest()
            self.shards.start_gathering(rounded=self.optimizer.rounds)
            self.clock.enter(StepPart.OTHER)
            self.set_balance(balance_over(self.balance, sums.counts_MLC, lr=optim.balance_lr))
        return StepResult(loss, z_loss, norm.item(), counts_LC.long(), signals.stop > 0, taken=reason is None)

    def _forward_and_backward(self, here: Position) -> MicrobatchSums:
        """Run this rank's microbatches, whose gradients are added to the shards'."""
        self.shards.begin_step(backwards=len(self.loader.share(here)))
        device, optim = self.world.device, self.config.optim
        losses_2 = torch.zeros(2, dtype=torch.float64, device=device)
        shares = here.microbatches if optim.balance_scope == "microbatch" else 1
        counts_MLC = torch.zeros((shares, *self.balance.bias.shape), dtype=torch.int64, device=device)
        targets, context = 0, self.contexts.get(here.phase.context_parallel)
        self.clock.enter(StepPart.DATA)
        for index, microbatch in enumerate(self.loader.microbatches(self.step)):
            losses, counts_LC = self._compute(microbatch, here)
            losses_2 += losses
            if index == 0 and self.integrity.wants_first:
                self.integrity.note(losses)
            counts_MLC[microbatch.number % shares] += counts_LC
            targets += microbatch.targets if context is None or context.rank == 0 else 0
            self.clock.enter(StepPart.DATA)
        return MicrobatchSums(losses_2, counts_MLC, targets)

    def _compute(self, microbatch: Microbatch, position: Position) -> tuple[Tensor, Tensor]:
        """Run a microbatch forward and backward; return cross-entropy and z-loss, [2], and routers' choices."""
        self.clock.enter(StepPart.FORWARD)
        losses, counts_LC = self.model.losses(
            microbatch.tokens_BS,
            microbatch.targets_BS,
            rope_base=position.phase.rope_base,
            z_weight=self.config.optim.z_loss,
            valid_BS=microbatch.valid_BS,
            document_BS=microbatch.document_BS,
            bounds_N=microbatch.bounds_N,
            context=self.contexts.get(position.phase.context_parallel),
        )
        self.clock.enter(StepPart.BACKWARD)
        (losses.objective / position.step_tokens).backward()
        return torch.stack([losses.cross_entropy, losses.z_loss]), counts_LC

    def _check_numbers(self, position: Position) -> None:
        """Begin a check of this step, if one is due."""
        if self.integrity.is_due(self.step) and self.kernels_ran:
            self.wait_for_weights()
            with self.clock.within(StepPart.OTHER):
                self.integrity.begin(
                    self.step, position, lambda microbatch: self._compute(microbatch, position)[0]
                )

    def _made_by(self, weights: str) -> dict[str, Any]:
        """Return what the next checkpoint's link records of this run and its weights, except its path."""
        data, device = self.order.record(self.step), self.world.device
        on_gpu = device.type == "cuda"
        return {
            "weights": weights,
            "data": digest_of(data),
            "corpus": data["data_fingerprint"],
            "config": settings_of(self.config),
            "code": code_digest(),
            "software": software(torch.__version__),
            "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
            "kernels": digest_of([dict(self.facts.tables), dict(self.facts.missing)]),
            "ranks": self.world.size,
            "local": self.facts.local,
            "threads": 0 if on_gpu else torch.get_num_threads(),
        }

    def wait_for_weights(self, module: str | None = None) -> None:
        """Wait for a module's weights, all by default; waiting for peers is no work of this rank's."""
        if self.shards.is_gathering(module):
            self.progress.update(waiting=True)
            with self.clock.within(StepPart.GATHER):
                self.shards.wait_for_weights(module)
            self.progress.update()

    def _skip(self, reason: str, loss: float, grad_norm: float) -> None:
        """Report a step that is skipped, and which gradient was the first that is not finite."""
        first = None if math.isfinite(loss) and math.isfinite(grad_norm) else self.shards.first_nonfinite()
        skipped = SkippedStep(self.step + 1, reason, loss, grad_norm, *(first or (None, None)))
        self.guard.skip(skipped, self.observers.record)

    def _evaluate(self, here: Position, *, last: bool) -> None:
        self.wait_for_weights()
        self.progress.update(phase=Phase.EVAL)
        ranks = self.world, self.progress.update, self.contexts.get(here.phase.context_parallel)
        with self.clock.within(None):
            for record in self.evaluator.evaluate(self.step, self.model, here.phase, *ranks, last=last):
                self.observers.record(record.kind, step=self.step, phase=here.phase.name, **record.fields)
                if record.line:
                    _LOG.info("%s", record.line)
        self.progress.update(phase=Phase.STEP)

    def _save(self, *, wait: bool) -> None:
        self.wait_for_weights()
        best, keep = self.evaluator.will_save(self.step), self.observers.checkpoints_in_use()
        if best is not None:
            keep.add(best.step)
        keep |= self.integrity.to_keep(self.checkpointer.saved_steps)
        cursor = cursor_of(self.step, self.order, self.guard, best, self.config)
        weights = digest_of_weights(self.model, self.shards.comm)
        if self.world.is_first:
            cursor[CHAIN] = self._made_by(weights)
        self.observers.checkpoint_requested(self.step)
        with self.clock.within(StepPart.CHECKPOINT):
            tokens = self.plan.tokens_after(self.step)
            self.saves.start(self.checkpointer.request(self.step, tokens, cursor, self.balance, keep), wait=wait)
