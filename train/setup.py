"""Build what one rank trains with, and load the newest checkpoint into it.

The order matters: what is wrong with the run is found before memory is taken, the random state is set before the
model is made, and everything is there before a checkpoint fills it.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from zslurm.checkpoint_tools.quantities import counted
from zslurm.kernels import dispatch
from zslurm.train.checkpointing.checkpointer import Checkpointer, Restored
from zslurm.train.config import TrainConfig
from zslurm.train.data.loader import Loader
from zslurm.train.data.order import DataOrder
from zslurm.train.data.training_data import TrainingData
from zslurm.train.evaluation.evaluate import Best, Evaluator, Validation
from zslurm.train.model.flash import choose_kernels
from zslurm.train.model.zaya import Zaya, build
from zslurm.train.optim.balance import BalanceState
from zslurm.train.optim.sharded import ShardedOptimizer
from zslurm.train.parallel.world import DTYPES, World
from zslurm.train.parallel.zero import ZeroShards
from zslurm.train.progress import ProgressWriter
from zslurm.train.schedule import Plan, check_ranks, compare
from zslurm.train.shapes import owned_table
from zslurm.train.stability import Recent, StepGuard
from zslurm.train.telemetry.metrics_file import last_attempt
from zslurm.train.telemetry.observers import check_observers

_LOG = logging.getLogger(__name__)


@dataclass
class Parts:
    """What one rank trains with.

    Attributes:
        attempt: number of this start, from 1.
        progress: shows a watcher how far this rank is.
        plan: the steps of the run.
        order: which step trains on which data.
        loader: this rank's microbatches.
        evaluator: measures the validation loss.
        model: the weights as they compute.
        shards: gradients and master weights, divided over the ranks.
        optimizer: this rank's share of the update.
        balance: the balancing state of the experts.
        guard: decides which steps are skipped.
        checkpointer: saves and loads all of it.
        step: steps that are done.
    """

    attempt: int
    progress: ProgressWriter
    plan: Plan
    order: DataOrder
    loader: Loader
    evaluator: Evaluator
    model: Zaya
    shards: ZeroShards
    optimizer: ShardedOptimizer
    balance: BalanceState
    guard: StepGuard
    checkpointer: Checkpointer
    step: int = 0


def set_up(run_dir: Path, config: TrainConfig, world: World) -> Parts:
    """Open the data, build the model and its shards, and load the newest checkpoint if there is one.

    Raises:
        ConfigError, DataError: the run cannot be trained as configured.
        TrainError: no checkpoint can be read.
    """
    plan = Plan(config.phases)
    check_observers(config)
    notes = check_ranks(config.phases, world.size)
    attempt = int(os.environ.get("ZSLURM_ATTEMPT", "0")) or 1 + last_attempt(run_dir)
    progress = ProgressWriter(world.rank, attempt)
    data = TrainingData.open(config.data)
    data.check_fits(config.model.vocab_size)
    order = DataOrder(data, plan, config.run.seed)
    tokenizer = data.header.tokenizer_sha256
    loader = Loader(
        order,
        rank=world.rank,
        world_size=world.size,
        device=world.device,
        prefetch=config.data.prefetch,
        isolate_documents=config.data.isolate_documents,
    )
    evaluator = Evaluator(Validation.open(config, tokenizer), config.evaluation.every_steps)
    torch.manual_seed(config.run.seed * 1_000_003 + world.rank)
    model = _build_model(config, world)
    shards = _shard(model, config, world)
    optimizer = ShardedOptimizer(shards, config.optim)
    checkpointer = Checkpointer(
        run_dir / "checkpoints",
        world,
        config.model,
        shards,
        optimizer,
        config.checkpoint,
        attempt=attempt,
        timeout_s=config.parallel.timeout_s,
    )
    parts = Parts(
        attempt,
        progress,
        plan,
        order,
        loader,
        evaluator,
        model,
        shards,
        optimizer,
        BalanceState.initial(config.model, world.device),
        StepGuard(config.optim),
        checkpointer,
    )
    restored = checkpointer.load_newest(starts_elsewhere=config.init is not None)
    if restored is None:
        _start(parts, config, world, tokenizer)
    else:
        _resume(parts, config, world, restored)
    for note in notes:
        _LOG.info("note: %s", note)
    return parts


def _build_model(config: TrainConfig, world: World) -> Zaya:
    dtype, head_dim = DTYPES[config.parallel.dtype], config.model.head_dim
    attention = choose_kernels(config.parallel.attention, device=world.device, dtype=dtype, head_dim=head_dim)
    model = build(config.model, config.run.seed, dtype=dtype, device=world.device)
    chosen = config.parallel.grouped_gemm
    dispatch.use("grouped_gemm", {"on": "torch", "off": "reference"}.get(chosen, chosen))
    model.run_with(
        attention=attention,
        recompute=config.parallel.recompute,
        compile=config.parallel.compile,
    )
    return model


def _shard(model: Zaya, config: TrainConfig, world: World) -> ZeroShards:
    return ZeroShards(
        model,
        owned_table(config.model, config.optim),
        world.dp_group,
        gradient_dtype=DTYPES[config.parallel.gradient_dtype],
        reduce_dtype=DTYPES[config.parallel.reduce_dtype or config.parallel.gradient_dtype],
        bucket_bytes=config.parallel.bucket_mb * 2**20,
        overlap=config.parallel.overlap,
    )


def _start(parts: Parts, config: TrainConfig, world: World, tokenizer_sha256: str) -> None:
    """Begin at step 0, from fresh weights or from those that `init` names."""
    weights = ""
    if config.init is not None:
        _set_balance(parts, parts.checkpointer.start_from(config.init, tokenizer_sha256))
        weights = f" from the weights of {config.init}"
    ranks = counted(world.size, "rank")
    _LOG.info("starting %s on %s (%s)%s", config.run.name, ranks, world.device.type, weights)


def _resume(parts: Parts, config: TrainConfig, world: World, restored: Restored) -> None:
    """Go on where a checkpoint was made; its tensors are loaded already."""
    cursor = restored.cursor
    changes = compare(cursor.get("plan"), parts.plan, restored.step)
    for change in changes + parts.order.changes(cursor, restored.step):
        _LOG.info("note: %s", change)
    parts.step = restored.step
    if "recent" in cursor:
        parts.guard.recent = Recent.of(cursor["recent"])
    parts.evaluator.best = Best.of(cursor.get("best"))
    _set_balance(parts, restored.balance)
    _LOG.info("resuming %s from %s on %s", config.run.name, restored.path.name, counted(world.size, "rank"))


def _set_balance(parts: Parts, balance: BalanceState) -> None:
    parts.balance = balance
    parts.model.balancing_bias.copy_(balance.bias)
