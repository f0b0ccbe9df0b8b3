"""Build a rank's trainer and fill it: the order in which faults of a run are found, and memory is taken.

build   data, model, shards, optimizer and checkpoints: what is wrong with the run is found before memory is
taken, and the random state is set before the model is made
load    the newest checkpoint, or fresh weights, or those that `init` names
begin   observers, the copy of the state that saves are made from, the schedule of saves, the clock
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch

from zslurm.checkpoint_tools.quantities import counted
from zslurm.kernels.prepared import warn_of_builds
from zslurm.train.assembly import assemble, make_contexts
from zslurm.train.checkpointing.checkpointer import Checkpointer, Restored
from zslurm.train.checkpointing.save_schedule import SaveSchedule
from zslurm.train.checkpointing.snapshot import Snapshot
from zslurm.train.config import TrainConfig
from zslurm.train.context.layout import check_phases
from zslurm.train.data.loader import Loader
from zslurm.train.data.order import DataOrder
from zslurm.train.data.training_data import TrainingData
from zslurm.train.evaluation.evaluate import Best
from zslurm.train.evaluation.evaluations import Evaluations
from zslurm.train.integrity.checks import Integrity
from zslurm.train.loop import Trainer
from zslurm.train.model.zaya import Zaya
from zslurm.train.optim.balance import BalanceState
from zslurm.train.optim.sharded import ShardedOptimizer
from zslurm.train.optim.stability import Recent, StepGuard
from zslurm.train.parallel.facts import AgreedFacts
from zslurm.train.parallel.world import World, common_local_size
from zslurm.train.progress import ProgressWriter
from zslurm.train.schedule import Plan, check_ranks, compare
from zslurm.train.stop import StopRequest
from zslurm.train.telemetry import log
from zslurm.train.telemetry.metrics_file import last_attempt
from zslurm.train.telemetry.observers import Observers, check_observers
from zslurm.train.telemetry.timing import StepClock
from zslurm.train.tuned_products import use_kernel_tables, use_tuned_products

_LOG = logging.getLogger(__name__)


def open_trainer(run_dir: Path, config: TrainConfig, world: World, stop: StopRequest) -> Trainer:
    """Return a trainer that continues a run or begins it; all ranks call it together.

    Raises:
        ConfigError, DataError: the run cannot be trained as configured.
        TrainError: no checkpoint can be read, or another run saves into the same directory.
    """
    trainer = build(run_dir, config, world, stop)
    load(trainer)
    begin(trainer)
    return trainer


def build(
    run_dir: Path,
    config: TrainConfig,
    world: World,
    stop: StopRequest,
    *,
    model: Zaya | None = None,
    facts: AgreedFacts | None = None,
) -> Trainer:
    """Return a trainer without its state; all ranks call it together.

    A process that joins the others later (`world.joined`) makes only the collectives of its groups, which the
    other ranks make with it. Its `model` may have been made before, and it adopts the `facts` on which they
    agreed.

    Raises:
        ConfigError, DataError: the run cannot be trained as configured.
        TrainError: another run saves into the same directory.
    """
    log.set_up(world.rank)
    if world.device.type == "cuda":
        warn_of_builds()
    use_tuned_products(run_dir, world.device)
    use_kernel_tables(run_dir)
    # All ranks connect before one may refuse the run: if one exits earlier, the others fail to connect.
    local = world.local_size if world.joined else common_local_size(world)
    check_observers(config)
    check_phases(config.model, config.phases)
    notes = check_ranks(config.phases, world.size, local)
    attempt = int(os.environ.get("ZSLURM_ATTEMPT", "0")) or 1 + last_attempt(run_dir)
    progress = ProgressWriter(world.rank, attempt, fence=world.fence)
    plan, data = Plan(config.phases), TrainingData.open(config.data)
    data.check_fits(config.model.vocab_size)
    order = DataOrder(data, plan, config.run.seed, config.data.packing)
    order.check_epochs(config.data.max_epochs)
    loader = Loader(
        order,
        rank=world.rank,
        world_size=world.size,
        device=world.device,
        prefetch=config.data.prefetch,
        isolate_documents=config.data.isolate_documents,
    )
    evaluator = Evaluations.open(run_dir, config, data.header.tokenizer_sha256, world)
    contexts = make_contexts(config, world)
    torch.manual_seed(config.run.seed * 1_000_003 + world.rank)
    model, shards, facts = assemble(config, world, model, facts)
    optimizer = ShardedOptimizer(shards, config.optim)
    checkpointer = Checkpointer(run_dir / "checkpoints", world, config, shards, optimizer, attempt=attempt)
    integrity = Integrity(config, world, shards, optimizer, order, local=facts.local)
    if config.integrity.every_steps:
        _LOG.log(logging.WARNING if integrity.is_costly() else logging.INFO, integrity.describe())
    for note in notes:
        _LOG.info("note: %s", note)
    return Trainer(
        run_dir=run_dir,
        attempt=attempt,
        config=config,
        world=world,
        stop=stop,
        plan=plan,
        progress=progress,
        order=order,
        loader=loader,
        evaluator=evaluator,
        contexts=contexts,
        model=model,
        shards=shards,
        facts=facts,
        optimizer=optimizer,
        balance=BalanceState.initial(config.model, world.device),
        guard=StepGuard(config.optim),
        checkpointer=checkpointer,
        integrity=integrity,
    )


def load(trainer: Trainer) -> None:
    """Load the newest checkpoint; without one, begin with fresh weights or with those that `init` names.

    Raises:
        ConfigError: the weights that `init` names cannot be read, or are of another model.
        TrainError: no checkpoint can be read.
    """
    config, world = trainer.config, trainer.world
    init, ranks = config.init, counted(world.size, "rank")
    restored = trainer.checkpointer.load_newest(starts_elsewhere=init is not None)
    if restored is not None:
        _resume(trainer, restored)
        _LOG.info("resuming %s from %s on %s", config.run.name, restored.path.name, ranks)
        return
    weights = ""
    if init is not None:
        trainer.set_balance(trainer.checkpointer.start_from(init, trainer.order.data.header.tokenizer_sha256))
        weights = f" from the weights of {init}"
    _LOG.info("starting %s on %s (%s)%s", config.run.name, ranks, world.device.type, weights)


def _resume(trainer: Trainer, restored: Restored) -> None:
    """Continue after a checkpoint, whose tensors are loaded already."""
    cursor, trainer.step = restored.cursor, restored.step
    changes = compare(cursor.get("plan"), trainer.plan, trainer.step)
    for change in changes + trainer.order.changes(cursor, trainer.step):
        _LOG.info("note: %s", change)
    if "recent" in cursor:
        trainer.guard.recent = Recent.of(cursor["recent"])
    if cursor.get("best"):
        trainer.evaluator.best = Best(**cursor["best"])
    trainer.set_balance(restored.balance)


def begin(trainer: Trainer, snapshot: Callable[[], Snapshot] | None = None) -> None:
    """Open what observes and saves the steps that follow; all ranks together, but for one that joins.

    Saves are made from what `snapshot` returns, by default from a separate copy of the state.

    Raises:
        ConfigError: the copy of the state does not fit into this node's memory.
    """
    config, world = trainer.config, trainer.world
    trainer.observers = Observers(
        trainer.run_dir,
        config,
        world,
        attempt=trainer.attempt,
        done=trainer.step,
        total_steps=trainer.plan.total_steps,
        sources=trainer.order.progress,
    )
    trainer.clock = StepClock(world.device)
    trainer.model.call_before(trainer.wait_for_weights)
    _LOG.info(trainer.checkpointer.prepare(snapshot))
    trainer.saves = SaveSchedule(
        trainer.checkpointer,
        config.checkpoint,
        trainer.progress,
        first=world.is_first,
        record=trainer.observers.record,
        committed=trainer.observers.checkpoint_committed,
    )
    trainer.callbacks.append(trainer.saves)
    trainer.kernels_ran = False
