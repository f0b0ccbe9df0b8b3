"""The training loop: reads like the algorithm.

    for each step:
        each rank runs its microbatches forward and backward, gradients summed in one flat buffer
        reduce-scatter the gradients, clip, update this rank's chunk, all-gather the weights
        balance the experts, write metrics, save when it is time or when asked to stop

`train(run_dir)` is the whole program of one rank; `python -m train RUN_DIR` and zslurm's ranks call it.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint_tools import CheckpointError
from train.checkpoint import Checkpointer, Restored
from train.config import TrainConfig, load_train_config
from train.data.bundle import Corpus
from train.data.sampler import Sampler, microbatch_counters, rank_microbatches
from train.errors import ConfigError, DataError, Diverged, TrainError
from train.metrics import MetricsWriter, last_attempt, routing_metrics
from train.model.packing import documents_of
from train.model.zaya import build
from train.optim.adamw import ShardedAdamW
from train.optim.balance import BalanceState, balance_over
from train.optim.schedule import Plan, Position
from train.parallel.world import DTYPES, World, open_world
from train.parallel.zero import ZeroShards
from train.progress import CheckpointState, Phase, ProgressWriter, dump_stacks_on_signal
from train.shapes import tensor_table
from train.stop import StopRequest


class Ending(IntEnum):
    """Exit code of a rank that ends in order."""

    COMPLETED = 0
    INTERRUPTED = 75  # saved and stopped because it was asked to: start again to continue


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; the same on every rank."""

    loss: float
    grad_norm: float
    counts_LC: Tensor
    stop: bool


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
        self.attempt = int(os.environ.get("ZSLURM_ATTEMPT", "0")) or 1 + last_attempt(run_dir / "metrics.jsonl")
        self.progress = ProgressWriter(world.rank, self.attempt)
        self.corpus = _open_corpus(config)
        torch.manual_seed(config.run.seed * 1_000_003 + world.rank)
        self.model = build(config.model, config.run.seed, dtype=DTYPES[config.parallel.dtype], device=world.device)
        self.model.run_with(
            grouped_gemm=config.parallel.grouped_gemm,
            recompute=config.parallel.recompute,
            compile=config.parallel.compile,
        )
        self.shards = ZeroShards(
            self.model,
            tensor_table(config.model),
            world.dp_group,
            DTYPES[config.parallel.gradient_dtype],
        )
        self.optimizer = ShardedAdamW(self.shards, config.optim)
        self.balance = BalanceState.initial(config.model, world.device)
        self.checkpointer = Checkpointer(
            run_dir / "checkpoints",
            world,
            config.model,
            self.shards,
            self.optimizer,
            keep_last=config.checkpoint.keep_last,
            attempt=self.attempt,
        )
        starts_elsewhere = config.checkpoint.start_from is not None
        self.step = self._resume(self.checkpointer.load_newest(starts_elsewhere=starts_elsewhere))
        self.metrics = MetricsWriter(run_dir / "metrics.jsonl", self.attempt) if world.is_first else None

    def _start(self) -> None:
        source = self.config.checkpoint.start_from
        weights = ""
        if source is not None:
            started = self.checkpointer.start_from(Path(source))
            if started.tokenizer_sha256 not in (None, self.corpus.header.tokenizer_sha256):
                raise DataError(
                    f"{self.corpus.path}: made with another tokenizer than the weights of {source}; "
                    "build the data with their tokenizer.json (zslurm data build --tokenizer)"
                )
            self.balance = started.balance
            self.model.balancing_bias.copy_(started.balance.bias)
            weights = f" from the weights of {source}"
        on = f"on {self.world.size} ranks ({self.world.device.type})"
        self._say(f"starting {self.config.run.name} {on}{weights}")

    def _resume(self, restored: Restored | None) -> int:
        if restored is None:
            self._start()
            return 0
        cursor = restored.cursor
        if cursor["tokenizer_sha256"] != self.corpus.header.tokenizer_sha256:
            raise DataError(
                f"{self.corpus.path}: made with another tokenizer than the checkpoint's run; "
                "set data.path back, or submit with --new"
            )
        if cursor["data_fingerprint"] != self.corpus.fingerprint:
            self._say(f"note: {self.corpus.path} is not the data that the checkpoint was trained on")
        self.balance = restored.balance
        self.model.balancing_bias.copy_(restored.balance.bias)
        self._say(f"resuming {self.config.run.name} from {restored.path.name} on {self.world.size} ranks")
        return restored.step

    def run(self) -> Ending:
        """Train to the end of the plan, or until asked to stop."""
        saved_at = self.step
        while self.step < self.plan.total_steps:
            started = time.monotonic()
            here = self.plan.at(self.step)
            result = self._train_step(here)
            self.step += 1
            self.progress.update(phase=Phase.STEP, step=self.step)
            self._report(here, result, time.monotonic() - started)
            last = self.step == self.plan.total_steps
            if self.step % self.config.checkpoint.every_steps == 0 or last or result.stop:
                self._save()
                saved_at = self.step
            if result.stop and not last:
                self._say(f"stopped as asked after step {self.step}; start again to continue")
                return Ending.INTERRUPTED
        self.progress.update(phase=Phase.DONE)
        self._say(f"completed {self.plan.total_steps} steps" + (f", saved at {saved_at}" if saved_at else ""))
        return Ending.COMPLETED

    def _train_step(self, here: Position) -> StepResult:
        phase = here.phase
        sampler = Sampler(self.corpus.sequences(phase.context), self.config.run.seed)
        self.shards.zero_gradients()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.world.device)
        optim = self.config.optim
        shares = phase.microbatches if optim.balance_scope == "microbatch" else 1
        counts_MLC = torch.zeros((shares, *self.balance.bias.shape), dtype=torch.int64, device=self.world.device)
        for j in rank_microbatches(phase.microbatches, self.world.rank, self.world.size):
            counters = microbatch_counters(here.counter, j, phase.micro_batch)
            windows = torch.from_numpy(self.corpus.windows(sampler.indices(counters), phase.context))
            tokens_BS = windows.to(self.world.device)
            loss, counts_LC = self.model(
                tokens_BS[:, :-1],
                tokens_BS[:, 1:],
                rope_base=phase.rope_base,
                document_BS=self._documents(tokens_BS[:, :-1]),
            )
            (loss / phase.step_tokens).backward()
            loss_sum += loss.detach()
            counts_MLC[j % shares] += counts_LC
        totals = torch.stack([loss_sum, loss_sum.new_tensor(float(self.stop.asked))])
        dist.all_reduce(totals, group=self.world.dp_group)
        dist.all_reduce(counts_MLC, group=self.world.dp_group)
        self.shards.reduce_gradients()
        grad_norm = self.shards.clip_gradients(self.config.optim.clip_norm).item()
        loss_mean = totals[0].item() / phase.step_tokens
        if not (abs(loss_mean) < float("inf") and grad_norm < float("inf")):
            raise Diverged(
                f"step {self.step + 1}: loss {loss_mean:g}, gradient norm {grad_norm:g}: not finite; the weights "
                "were not updated. Lower phases[].lr or look at the data; the last checkpoint is sound"
            )
        self.optimizer.step(here.lr)
        self.shards.gather_weights()
        self.balance = balance_over(self.balance, counts_MLC, lr=optim.balance_lr, betas=optim.balance_betas)
        self.model.balancing_bias.copy_(self.balance.bias)
        return StepResult(loss_mean, grad_norm, counts_MLC.sum(dim=0), bool(totals[1].item() > 0))

    def _documents(self, tokens_BS: Tensor) -> Tensor | None:
        """Which document each token belongs to, where these are kept apart."""
        if not self.config.data.isolate_documents:
            return None
        return documents_of(tokens_BS, self.corpus.header.end_token)

    def _save(self) -> None:
        self.progress.update(phase=Phase.SAVE, checkpoint=CheckpointState.REQUESTED)
        tokens = self._tokens_done()
        cursor = {
            "step": self.step,
            "seed": self.config.run.seed,
            "data_fingerprint": self.corpus.fingerprint,
            "tokenizer_sha256": self.corpus.header.tokenizer_sha256,
        }
        saved = self.checkpointer.save(self.step, tokens, cursor, self.balance)
        self.progress.update(phase=Phase.STEP, checkpoint=CheckpointState.COMMITTED, committed_step=self.step)
        if self.metrics is not None:
            self.metrics.write(
                "checkpoint", step=self.step, state="COMMITTED", bytes=saved.bytes, seconds=saved.seconds
            )
        self._say(f"saved {saved.path.name} ({saved.bytes / 1e6:.1f} MB in {saved.seconds:.2f} s)")

    def _tokens_done(self) -> int:
        if self.step == 0:
            return 0
        before = self.plan.at(self.step - 1)
        return before.tokens_before + before.phase.step_tokens

    def _report(self, here: Position, result: StepResult, seconds: float) -> None:
        if self.metrics is None:
            return
        rate = here.phase.step_tokens / seconds
        self.metrics.write(
            "step",
            step=self.step,
            tokens=here.tokens_before + here.phase.step_tokens,
            phase=here.phase.name,
            loss=result.loss,
            lr=here.lr,
            grad_norm=result.grad_norm,
            tokens_per_s=rate,
            step_time_s=seconds,
            **routing_metrics(result.counts_LC, self.config.model.skip_expert),
        )
        if self.step % 10 == 0 or self.step == 1:
            self._say(
                f"step {self.step}/{self.plan.total_steps} loss {result.loss:.4f} lr {here.lr:.3g} "
                f"grad norm {result.grad_norm:.3g} {rate:,.0f} tokens/s"
            )

    def _say(self, text: str) -> None:
        if self.world.is_first:
            print(text, flush=True)


def _open_corpus(config: TrainConfig) -> Corpus:
    if config.data.path is None:
        raise ConfigError("data.path: required to train; make a bundle with `zslurm data build`")
    corpus = Corpus.open(config.data.path)
    corpus.check_fits(config.model.vocab_size)
    for phase in config.phases:
        corpus.sequences(phase.context)
    return corpus


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
            return Trainer(run_dir, config, world, stop).run()
    except CheckpointError as error:
        raise TrainError(f"checkpoint: {error}") from error
    finally:
        stop.close()


def main(argv: list[str]) -> int:
    """`python -m train RUN_DIR`; returns the exit code."""
    if len(argv) != 1 or argv[0].startswith("-"):
        print(
            "usage: python -m train RUN_DIR   (also: torchrun --nproc-per-node N -m train RUN_DIR)",
            file=sys.stderr,
        )
        return 2
    try:
        return train(Path(argv[0]))
    except TrainError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
