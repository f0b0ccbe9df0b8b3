"""Train: the loop, which reads like the algorithm.

    for each step:
        each rank runs its microbatches forward and backward, gradients summed in one flat buffer and reduced
            bucket by bucket during the last backward
        clip, update this rank's chunk, all-gather the weights
        balance the experts, report to the observers, save when it is time or when asked to stop

`train(run_dir)` is the whole program of one rank; `python -m zslurm.train RUN_DIR` and zslurm's ranks call it.
What a rank trains with is built in setup.py; what watches it is in telemetry/.
"""

from __future__ import annotations

import logging
import math
import sys
from enum import IntEnum
from pathlib import Path

import torch
import torch.distributed as dist

from zslurm.checkpoint_tools import CheckpointError
from zslurm.checkpoint_tools.quantities import counted
from zslurm.train import log
from zslurm.train.checkpointing.checkpointer import SaveRequest
from zslurm.train.checkpointing.schedule import SaveSchedule
from zslurm.train.config import RESUMED_FROM, TrainConfig, load_train_config
from zslurm.train.data.sampler import rank_microbatches
from zslurm.train.errors import TrainError
from zslurm.train.optim.balance import balance_over
from zslurm.train.parallel.world import World, open_world
from zslurm.train.progress import Phase, dump_stacks_on_signal
from zslurm.train.schedule import Position
from zslurm.train.setup import set_up
from zslurm.train.stability import SkippedStep
from zslurm.train.stop import StopRequest
from zslurm.train.telemetry.observer import StepResult
from zslurm.train.telemetry.observers import Observers
from zslurm.train.telemetry.timing import Part, StepClock, work_time_ns

_LOG = logging.getLogger(__name__)


class Ending(IntEnum):
    """Exit code of a rank that ends in order."""

    COMPLETED = 0
    INTERRUPTED = 75  # saved and stopped because it was asked to: start again to continue


class Trainer:
    """Trains one rank of a run."""

    def __init__(self, run_dir: Path, config: TrainConfig, world: World, stop: StopRequest) -> None:
        """Build everything, and load the newest checkpoint if there is one.

        Raises:
            ConfigError, DataError: the run cannot be trained as configured.
            TrainError: no checkpoint can be read.
        """
        self.config, self.world, self.stop = config, world, stop
        parts = set_up(run_dir, config, world)
        self.plan, self.order, self.loader, self.evaluator = parts.plan, parts.order, parts.loader, parts.evaluator
        self.model, self.shards, self.optimizer = parts.model, parts.shards, parts.optimizer
        self.balance, self.guard, self.checkpointer = parts.balance, parts.guard, parts.checkpointer
        self.progress, self.step = parts.progress, parts.step
        self.observers = Observers(
            run_dir,
            config,
            world,
            attempt=parts.attempt,
            done=self.step,
            total_steps=self.plan.total_steps,
        )
        self.clock, self.work_ns = StepClock(world.device), 0
        _LOG.info(self.checkpointer.prepare())
        self.saves = SaveSchedule(
            self.checkpointer,
            config.checkpoint,
            self.progress,
            first=world.is_first,
            record=self.observers.record,
            committed=self.observers.checkpoint_committed,
        )

    def run(self) -> Ending:
        """Train to the end of the plan, or until asked to stop."""
        with self.observers, self.loader:
            return self._run()

    def _run(self) -> Ending:
        while self.step < self.plan.total_steps:
            here = self.plan.at(self.step)
            result = self._train_step(here)
            self.stop.renew()
            self.step += 1
            self.progress.update(phase=Phase.STEP, step=self.step, work_ns=self.work_ns)
            self._end_step(here, result)
            self.saves.report()
            last = self.step == self.plan.total_steps
            if self.evaluator.is_due(self.step, last=last, stop=result.stop):
                self._evaluate(here)
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

    def _train_step(self, here: Position) -> StepResult:
        mine = rank_microbatches(here.microbatches, self.world.rank, self.world.size)
        self.shards.begin_step(backwards=len(mine))
        loss_sums = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        optim = self.config.optim
        shares = here.microbatches if optim.balance_scope == "microbatch" else 1
        counts_MLC = torch.zeros((shares, *self.balance.bias.shape), dtype=torch.int64, device=self.world.device)
        targets = 0
        self.clock.enter(Part.DATA)
        for microbatch in self.loader.microbatches(self.step):
            self.clock.enter(Part.FORWARD)
            losses, counts_LC = self.model.losses(
                microbatch.tokens_BS,
                microbatch.targets_BS,
                rope_base=here.phase.rope_base,
                z_weight=optim.z_loss,
                document_BS=microbatch.document_BS,
            )
            self.clock.enter(Part.BACKWARD)
            (losses.objective / here.step_tokens).backward()
            loss_sums += torch.stack([losses.cross_entropy, losses.z_loss])
            counts_MLC[microbatch.number % shares] += counts_LC
            targets += microbatch.targets
            self.clock.enter(Part.DATA)
        self.progress.update(waiting=True)
        self.clock.enter(Part.REDUCE)
        self.shards.reduce_gradients()
        signals = [float(targets), float(self.stop.asked), *self.saves.signals()]
        totals = torch.cat([loss_sums, loss_sums.new_tensor(signals)])
        dist.all_reduce(totals, group=self.world.dp_group)
        dist.all_reduce(counts_MLC, group=self.world.dp_group)
        targets, stop = int(totals[2].item()), bool(totals[3].item() > 0)
        self.saves.agree(totals[4:].tolist())
        if 0 < targets < here.step_tokens:
            # Some targets are masked: the losses were divided by as many as there might be.
            self.shards.scale_gradients(here.step_tokens / targets)
        grad_norm = self.shards.clip_gradients(optim.clip_norm).item()
        loss_mean, z_loss = (totals[:2] / max(1, targets)).tolist()
        reason = self.guard.why_skip(loss_mean, grad_norm, first_of_phase=here.step_in_phase == 0)
        if reason is not None:
            self._skip(reason, loss_mean, grad_norm)
            return StepResult(loss_mean, z_loss, grad_norm, counts_MLC.sum(dim=0), stop, taken=False)
        self.clock.enter(Part.CHECKPOINT)
        self.saves.wait_for_snapshot()
        self.clock.enter(Part.OPTIMIZER)
        self.optimizer.step(here.lr)
        self.shards.gather_weights()
        self.clock.enter(Part.OTHER)
        self.balance = balance_over(self.balance, counts_MLC, lr=optim.balance_lr, betas=optim.balance_betas)
        self.model.balancing_bias.copy_(self.balance.bias)
        return StepResult(loss_mean, z_loss, grad_norm, counts_MLC.sum(dim=0), stop, taken=True)

    def _end_step(self, here: Position, result: StepResult) -> None:
        split = self.clock.end_step()
        mine = rank_microbatches(here.microbatches, self.world.rank, self.world.size)
        self.work_ns += work_time_ns(split, len(mine))
        self.observers.step_done(self.step, here, result, split)

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

    def _evaluate(self, here: Position) -> None:
        self.progress.update(phase=Phase.EVAL)
        with self.clock.within(None):
            found = self.evaluator.evaluate(self.step, self.model, here.phase, self.world, self.progress.update)
        self.progress.update(phase=Phase.STEP)
        self.observers.record("evaluation", step=self.step, phase=here.phase.name, **found.fields())
        _LOG.info("step %d validation loss %.4f (%.2f s)", self.step, found.loss, found.seconds)

    def _save(self, *, wait: bool) -> None:
        best, keep = self.evaluator.will_save(self.step), self.observers.checkpoints_in_use()
        if best is not None and self.config.checkpoint.keep_best:
            keep.add(best.step)
        cursor = {
            "step": self.step,
            **self.order.record(self.step),
            "plan": self.plan.record(),
            "recent": self.guard.recent.record(),
            "best": best.record() if best is not None else None,
            RESUMED_FROM: self.config.checkpoint.resume_from,
        }
        tokens = self.plan.tokens_after(self.step)
        self.observers.checkpoint_requested(self.step)
        with self.clock.within(Part.CHECKPOINT):
            self.saves.start(SaveRequest(self.step, tokens, cursor, self.balance, keep), wait=wait)


def train(run_dir: Path, stop: StopRequest | None = None) -> Ending:
    """Train one rank of the run in `run_dir`, which holds config.json; the environment is torchrun's.

    Args:
        run_dir: the run.
        stop: a request that listens already; default: one that listens from now on.

    Raises:
        ConfigError, DataError: the user can correct the configuration or the data.
        TrainError: training cannot continue.
    """
    if stop is None:
        stop = StopRequest()
        stop.install()
    dump_stacks_on_signal()
    config = load_train_config(run_dir / "config.json")
    try:
        with open_world(config.parallel) as world:
            log.set_up(world.rank)
            trainer = Trainer(run_dir, config, world, stop)
            ending = trainer.run()
        # The other ranks have left, or may leave: rank 0 alone waits for what evaluates the last weights.
        trainer.observers.finish(give_up=lambda: stop.asked or ending is Ending.INTERRUPTED)
        return ending
    except CheckpointError as error:
        raise TrainError(f"checkpoint: {error}") from error
    finally:
        stop.close()


def main(argv: list[str]) -> int:
    """Run `python -m zslurm.train RUN_DIR`; returns the exit code."""
    if len(argv) != 1 or argv[0].startswith("-"):
        print(
            "usage: python -m zslurm.train RUN_DIR   (also: torchrun --nproc-per-node N -m zslurm.train RUN_DIR)",
            file=sys.stderr,
        )
        return 2
    try:
        return train(Path(argv[0]))
    except TrainError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
