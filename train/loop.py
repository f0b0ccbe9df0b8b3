"""The training loop: reads like the algorithm.

    for each step:
        each rank runs its microbatches forward and backward, gradients summed in one flat buffer and reduced
            bucket by bucket during the last backward
        clip, update this rank's chunk, all-gather the weights
        balance the experts, write metrics, save when it is time or when asked to stop

`train(run_dir)` is the whole program of one rank; `python -m zslurm.train RUN_DIR` and zslurm's ranks call it.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
from enum import IntEnum
from pathlib import Path

import torch
import torch.distributed as dist

from zslurm.checkpoint_tools import CheckpointError
from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.checkpointing.checkpointer import Checkpointer, Restored
from zslurm.train.checkpointing.schedule import Saves
from zslurm.train.config import RESUMED_FROM, TrainConfig, load_train_config
from zslurm.train.data.loader import Loader
from zslurm.train.data.order import DataOrder
from zslurm.train.data.sampler import rank_microbatches
from zslurm.train.data.training_data import TrainingData
from zslurm.train.errors import Diverged, TrainError
from zslurm.train.evaluation.evaluate import Best, Evaluator, HeldOut, due
from zslurm.train.model.flash import choose_kernels
from zslurm.train.model.zaya import build
from zslurm.train.optim.balance import BalanceState, balance_over
from zslurm.train.optim.sharded import ShardedOptimizer
from zslurm.train.parallel.world import DTYPES, World, open_world
from zslurm.train.parallel.zero import ZeroShards
from zslurm.train.progress import Phase, ProgressWriter, dump_stacks_on_signal
from zslurm.train.schedule import Plan, Position, check_ranks, compare
from zslurm.train.shapes import owned_table
from zslurm.train.stability import Recent, why_skip
from zslurm.train.stop import StopRequest
from zslurm.train.telemetry.metrics import last_attempt
from zslurm.train.telemetry.observers import Instruments, StepResult
from zslurm.train.telemetry.tensorboard import check_installed
from zslurm.train.telemetry.timing import Part


class Ending(IntEnum):
    """Exit code of a rank that ends in order."""

    COMPLETED = 0
    INTERRUPTED = 75  # saved and stopped because it was asked to: start again to continue


class Trainer:
    """One rank of a run."""

    def __init__(self, run_dir: Path, config: TrainConfig, world: World, stop: StopRequest) -> None:
        """Open the data, build the model and its shards, and load the newest checkpoint if there is one.

        Raises:
            ConfigError, DataError: the run cannot be trained as configured.
            TrainError: no checkpoint can be read.
        """
        self.config, self.world, self.stop = config, world, stop
        self.plan = Plan(config.phases)
        if config.metrics.tensorboard:
            check_installed()
        notes = check_ranks(config.phases, world.size)
        self.attempt = int(os.environ.get("ZSLURM_ATTEMPT", "0")) or 1 + last_attempt(run_dir / "metrics.jsonl")
        self.progress = ProgressWriter(world.rank, self.attempt)
        self.data = TrainingData.open(config.data)
        self.data.check_fits(config.model.vocab_size)
        self.order = DataOrder(self.data, self.plan, config.run.seed)
        self.loader = Loader(
            self.order,
            rank=world.rank,
            world_size=world.size,
            device=world.device,
            prefetch=config.data.prefetch,
            isolate_documents=config.data.isolate_documents,
        )
        held_out = HeldOut.open(config, self.data.header.tokenizer_sha256)
        self.evaluator = Evaluator(held_out, config.evaluation.every_steps)
        torch.manual_seed(config.run.seed * 1_000_003 + world.rank)
        dtype, head_dim = DTYPES[config.parallel.dtype], config.model.head_dim
        attention = choose_kernels(config.parallel.attention, device=world.device, dtype=dtype, head_dim=head_dim)
        self.model = build(config.model, config.run.seed, dtype=dtype, device=world.device)
        self.model.run_with(
            attention=attention,
            grouped_gemm=config.parallel.grouped_gemm,
            recompute=config.parallel.recompute,
            compile=config.parallel.compile,
        )
        self.shards = ZeroShards(
            self.model,
            owned_table(config.model, config.optim),
            world.dp_group,
            gradient_dtype=DTYPES[config.parallel.gradient_dtype],
            reduce_dtype=DTYPES[config.parallel.reduce_dtype or config.parallel.gradient_dtype],
            bucket_bytes=config.parallel.bucket_mb * 2**20,
            overlap=config.parallel.overlap,
        )
        self.optimizer = ShardedOptimizer(self.shards, config.optim)
        self.balance = BalanceState.initial(config.model, world.device)
        self.recent = Recent()
        self.left_out: list[str] = []
        """The steps skipped last, in a row: number, loss and gradient norm to the bit, first tensor, rank."""
        self.save_owed = self.export_owed = False
        self.checkpointer = Checkpointer(
            run_dir / "checkpoints",
            world,
            config.model,
            self.shards,
            self.optimizer,
            config.checkpoint,
            attempt=self.attempt,
            timeout_s=config.parallel.timeout_s,
        )
        self.step = self._resume(self.checkpointer.load_newest(starts_elsewhere=config.init is not None))
        for note in notes:
            self._say(f"note: {note}")
        self.instruments = Instruments(
            run_dir,
            config,
            world,
            attempt=self.attempt,
            done=self.step,
            total_steps=self.plan.total_steps,
            say=self._say,
        )
        self.clock, self.metrics = self.instruments.clock, self.instruments.metrics
        self._say(self.checkpointer.prepare())
        self.to_export: set[int] = set()
        self.saves = Saves(
            self.checkpointer,
            config.checkpoint,
            self.progress,
            first=world.is_first,
            write=self.metrics.write if self.metrics is not None else None,
            say=self._say,
            committed=self._committed,
        )

    def _start(self) -> None:
        init, weights = self.config.init, ""
        if init is not None:
            self.balance = self.checkpointer.start_from(init, self.data.header.tokenizer_sha256)
            self.model.balancing_bias.copy_(self.balance.bias)
            weights = f" from the weights of {init}"
        on = f"on {counted(self.world.size, 'rank')} ({self.world.device.type})"
        self._say(f"starting {self.config.run.name} {on}{weights}")

    def _resume(self, restored: Restored | None) -> int:
        if restored is None:
            self._start()
            return 0
        cursor = restored.cursor
        changes = compare(cursor.get("plan"), self.plan, restored.step)
        for change in changes + self.order.changes(cursor, restored.step):
            self._say(f"note: {change}")
        self.recent = Recent.of(cursor.get("recent", self.recent.record()))
        self.evaluator.best = Best.of(cursor.get("best"))
        self.balance = restored.balance
        self.model.balancing_bias.copy_(restored.balance.bias)
        self._say(
            f"resuming {self.config.run.name} from {restored.path.name} on {counted(self.world.size, 'rank')}"
        )
        return restored.step

    def run(self) -> Ending:
        """Train to the end of the plan, or until asked to stop."""
        with self.instruments, self.loader:
            return self._run()

    def _run(self) -> Ending:
        while self.step < self.plan.total_steps:
            here = self.plan.at(self.step)
            result = self._train_step(here)
            self.stop.renew()
            self.step += 1
            self.progress.update(phase=Phase.STEP, step=self.step, pace_ns=self.instruments.pace_ns)
            self.instruments.step_done(self.step, here, result)
            self.saves.report()
            last = self.step == self.plan.total_steps
            if self.evaluator.is_due(self.step, last=last, stop=result.stop):
                self._evaluate(here)
            due = self._save_is_due(result.taken)
            if last or result.stop:
                self._save(wait=True)
            elif due and self.saves.may_start():
                self._save(wait=False)
            if result.stop and not last:
                self.checkpointer.close()
                self._say(f"stopped as asked after step {self.step}; start again to continue")
                return Ending.INTERRUPTED
        self.checkpointer.close()
        self.checkpointer.forget_copies()
        self.progress.update(phase=Phase.DONE)
        self._say(f"completed {counted(self.plan.total_steps, 'step')}, saved at {self.step}")
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
        grad_norm = self.shards.clip_gradients(self.config.optim.clip_norm).item()
        loss_mean, z_loss = (totals[:2] / max(1, targets)).tolist()
        if here.step_in_phase == 0:
            self.recent = self.recent.in_new_phase()
        reason = why_skip(self.recent, loss_mean, grad_norm, optim)
        if reason is not None:
            self._skip(reason, loss_mean, grad_norm)
            return StepResult(loss_mean, z_loss, grad_norm, counts_MLC.sum(dim=0), stop, taken=False)
        self.recent, self.left_out = self.recent.taken(loss_mean, grad_norm, optim), []
        self.clock.enter(Part.CHECKPOINT)
        self.saves.hold()
        self.clock.enter(Part.OPTIMIZER)
        self.optimizer.step(here.lr)
        self.shards.gather_weights()
        self.clock.enter(Part.OTHER)
        self.balance = balance_over(self.balance, counts_MLC, lr=optim.balance_lr, betas=optim.balance_betas)
        self.model.balancing_bias.copy_(self.balance.bias)
        return StepResult(loss_mean, z_loss, grad_norm, counts_MLC.sum(dim=0), stop, taken=True)

    def _skip(self, reason: str, loss: float, grad_norm: float) -> None:
        """Leave a step out: say why, and what went wrong first and where.

        Raises:
            Diverged: too many were skipped in a row.
        """
        self.recent = self.recent.left_out()
        first = None if math.isfinite(loss) and math.isfinite(grad_norm) else self.shards.first_nonfinite()
        tensor, rank = first or (None, None)
        if self.metrics is not None:
            self.metrics.write(
                "skipped",
                step=self.step + 1,
                reason=reason,
                loss=loss if math.isfinite(loss) else None,
                grad_norm=grad_norm if math.isfinite(grad_norm) else None,
                tensor=tensor,
                rank=rank,
                in_a_row=self.recent.skipped,
            )
        where = f", first in {tensor} on rank {rank}" if tensor else ""
        limit = self.config.optim.skip_limit
        self.left_out = self.left_out[-limit:] if limit else []
        self.left_out.append(f"{self.step + 1} {loss.hex()} {grad_norm.hex()} {tensor} {rank}")
        if self.recent.skipped > limit:
            raise Diverged(
                f"step {self.step + 1}: {reason}{where}; it is the last of {self.recent.skipped} in a row, more "
                f"than optim.skip_limit ({limit}) allows; the weights were not updated by them. Lower phases[].lr "
                "or look at the data; the last checkpoint is from before them",
                fingerprint=hashlib.sha256("\n".join(self.left_out).encode()).hexdigest()[:16],
            )
        self._say(f"step {self.step + 1} is skipped: {reason}{where} ({self.recent.skipped} in a row, of {limit})")

    def _evaluate(self, here: Position) -> None:
        self.progress.update(phase=Phase.EVAL)
        with self.clock.within(None):
            found = self.evaluator.evaluate(self.step, self.model, here.phase, self.world, self.progress.update)
        self.progress.update(phase=Phase.STEP)
        if self.metrics is not None:
            self.metrics.write("evaluation", step=self.step, phase=here.phase.name, **found.fields())
        self._say(f"step {self.step} held-out loss {found.loss:.4f} ({found.seconds:.2f} s)")

    def _save_is_due(self, taken: bool) -> bool:
        """At the steps of checkpoint.every_steps, and where evaluation.command wants a checkpoint.

        Skipped steps may have ruined weights before them: what is due then waits for a step that is taken.
        """
        self.export_owed = self.export_owed or due(self.config.evaluation.command_every_steps, self.step)
        self.save_owed = self.save_owed or self.export_owed or due(self.config.checkpoint.every_steps, self.step)
        return self.save_owed and taken

    def _save(self, *, wait: bool) -> None:
        self.save_owed = False
        best = self.evaluator.will_save(self.step)
        cursor = {
            "step": self.step,
            **self.order.record(self.step),
            "plan": self.plan.record(),
            "recent": self.recent.record(),
            "best": best.record() if best is not None else None,
            RESUMED_FROM: self.config.checkpoint.resume_from,
        }
        if self.export_owed:
            self.to_export.add(self.step)
            self.export_owed = False
        with self.clock.within(Part.CHECKPOINT):
            self.saves.start(
                self.step,
                wait=wait,
                best={
                    "best_step": best.step if best is not None else None,
                    "best_loss": best.loss if best is not None else None,
                },
                tokens=self.plan.tokens_after(self.step),
                cursor=cursor,
                balance=self.balance,
                keep=self._kept(),
            )

    def _committed(self, step: int, path: Path) -> None:
        """A checkpoint is there: whatever waited for it can begin."""
        if self.instruments.command is not None and step in self.to_export:
            self.instruments.command.start(step, path)
        self.to_export.discard(step)

    def _kept(self) -> set[int]:
        """Steps whose checkpoints stay though they are not among the newest."""
        command = self.instruments.command
        kept = set(command.reads()) if command is not None else set()
        if self.evaluator.best is not None and self.config.checkpoint.keep_best:
            kept.add(self.evaluator.best.step)
        return kept

    def _say(self, text: str) -> None:
        if self.world.is_first:
            print(text, flush=True)


def train(run_dir: Path, stop: StopRequest | None = None) -> Ending:
    """Train one rank of the run in `run_dir`, which holds config.json; the environment is torchrun's.

    Args:
        run_dir: the run.
        stop: a request that listens already; default: one that listens from now on.

    Raises:
        ConfigError, DataError: the user can mend the configuration or the data.
        TrainError: training cannot go on.
    """
    if stop is None:
        stop = StopRequest()
        stop.install()
    dump_stacks_on_signal()
    config = load_train_config(run_dir / "config.json")
    try:
        with open_world(config.parallel) as world:
            trainer = Trainer(run_dir, config, world, stop)
            ending = trainer.run()
        # The other ranks have left, or may leave: rank 0 alone waits for what judges the last weights.
        trainer.instruments.finish(give_up=lambda: stop.asked or ending is Ending.INTERRUPTED)
        return ending
    except CheckpointError as error:
        raise TrainError(f"checkpoint: {error}") from error
    finally:
        stop.close()


def main(argv: list[str]) -> int:
    """`python -m zslurm.train RUN_DIR`; returns the exit code."""
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
