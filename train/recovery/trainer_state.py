"""Copy, restore and hand over the state of a trainer: what a recovery does to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zslurm.checkpoint_tools.format.partition import Partition
from zslurm.train.assembly import make_contexts, make_or_choose_levels
from zslurm.train.checkpointing.writer import CheckpointWriter
from zslurm.train.evaluation.evaluate import Best
from zslurm.train.loop import Trainer
from zslurm.train.model.zaya import Zaya
from zslurm.train.optim.balance import BALANCE_TENSORS, BalanceState
from zslurm.train.optim.sharded import spans_of
from zslurm.train.optim.stability import Recent
from zslurm.train.parallel.world import World
from zslurm.train.parallel.zero import ZeroShards
from zslurm.train.progress import Phase
from zslurm.train.recovery.copies.staging import Slot
from zslurm.train.recovery.resplit import Owned
from zslurm.train.telemetry.timing import StepClock


@dataclass(frozen=True)
class HandedOver:
    """What a trainer leaves to the one that takes its place, in this process, among another number of ranks.

    Attributes:
        model: the model, as it was compiled.
        world: of the old trainer.
        owned: returns what a rank owned, by its former number.
        writers: of checkpoints, which may still be at work on saves that were given up.
        save: whether a save was due or in progress.
    """

    model: Zaya
    world: World
    owned: Callable[[int], Owned]
    writers: Sequence[CheckpointWriter]
    save: bool


def capture(trainer: Trainer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what a copy of a step needs besides masters and optimizer state: plain JSON, and small tensors."""
    best = trainer.evaluator.best
    cursor = {
        "step": trainer.step,
        "optimizer_steps": trainer.optimizer.steps,
        "balance_steps": trainer.balance.step,
        "recent": trainer.guard.recent.record(),
        "best": asdict(best) if best is not None else None,
    }
    tensors = {f"balance/{name}": getattr(trainer.balance, name) for name in BALANCE_TENSORS}
    tensors["rng"] = torch.get_rng_state()
    if trainer.world.device.type == "cuda":
        tensors["rng_device"] = torch.cuda.get_rng_state(trainer.world.device)
    return cursor, tensors


def continue_from(trainer: Trainer, cursor: Mapping[str, Any], extras: Mapping[str, Tensor]) -> None:
    """Restore what `capture` returned at a step; masters and optimizer state are restored separately."""
    device = trainer.world.device
    trainer.step, trainer.optimizer.steps = cursor["step"], cursor["optimizer_steps"]
    trainer.guard.recent = Recent.of(cursor["recent"])
    trainer.evaluator.best = Best(**cursor["best"]) if cursor["best"] else None
    parts = {name: extras[f"balance/{name}"].to(device) for name in BALANCE_TENSORS}
    trainer.set_balance(BalanceState(**parts, step=cursor["balance_steps"]))
    if "rng" in extras:
        torch.set_rng_state(extras["rng"])
    if "rng_device" in extras:
        torch.cuda.set_rng_state(extras["rng_device"], device)


def leave(trainer: Trainer) -> bool:
    """Drop the old groups; return whether a save was due or in progress."""
    pending = trainer.saves.pending
    trainer.shards.abandon()
    trainer.contexts = {}
    return pending


def rejoin(trainer: Trainer) -> None:
    """Make the smaller groups of this generation, next to the group of all ranks, and continue over them."""
    trainer.contexts = make_contexts(trainer.config, trainer.world)
    with trainer.world.making_groups():
        levels = make_or_choose_levels(trainer.config, trainer.world, trainer.facts)
    trainer.shards.regroup(trainer.world.group, levels)


def go_back(trainer: Trainer, slot: Slot, *, save: bool) -> None:
    """Restore the step of a copy; if `save`, a save is due after it."""
    slot.snapshot.restore()
    continue_from(trainer, slot.cursor, slot.extras)
    trainer.checkpointer.regroup()
    trainer.saves.regroup(pending=save)
    trainer.clock, trainer.kernels_ran = StepClock(trainer.world.device), False
    trainer.progress.update(phase=Phase.STEP, step=trainer.step)


def hand_over(trainer: Trainer) -> HandedOver:
    """Release everything but what the next trainer of this process takes; nothing holds this one then."""
    save, shards = leave(trainer), trainer.shards
    shards.release()
    trainer.model.sum_gradients_by(None)
    trainer.model.call_before(lambda _: None)
    writers = trainer.checkpointer.hand_over()
    trainer.progress.remove()
    trainer.callbacks.clear()
    return HandedOver(trainer.model, trainer.world, owned_by(shards, trainer.world), writers, save)


def owned_by(shards: ZeroShards, world: World) -> Callable[[int], Owned]:
    """Return a function of the number of a rank that returns what the rank owns."""
    return partial(_owned, shards.layout, [shards.position_of(rank) for rank in range(world.size)])


def _owned(layout: Partition, positions: Sequence[int], rank: int) -> Owned:
    return Owned(layout.extents(positions[rank]), spans_of(layout, positions[rank]))
