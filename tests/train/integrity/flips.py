"""Single bits that flip in a rank, at a step: what the tests and the benchmark of integrity inject."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from zslurm.train.loop import Trainer
from zslurm.train.parallel.zero import ZeroShards
from zslurm.train.schedule import Position

PLACES = ("product", "received", "weights", "masters", "moments")
TENSOR = "layers.1.router.first.weight"
_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def flip(values: Tensor, element: int, bit: int) -> None:
    """Flip one bit of an element; both numbers begin again after the last."""
    flat = values.detach().view(-1).view(_INTEGER[values.element_size()])
    bits = 8 * values.element_size()
    mask = 1 << bit % bits
    flat[element % len(flat)] ^= mask - (1 << bits) if mask == 1 << (bits - 1) else mask


@contextmanager
def flipped(trainer: Trainer, target: str, element: int, bit: int, tensor: str = TENSOR) -> Iterator[None]:
    """Flip a bit in one of PLACES for the step that the block takes; a product is the gradient of `tensor`."""

    def spoiled(gradient: Tensor) -> Tensor:
        copy = gradient.clone()
        flip(copy, element, bit)
        return copy

    reduce_gradients = ZeroShards.reduce_gradients

    calls: list[int] = []

    def receiving(self: ZeroShards) -> None:
        reduce_gradients(self)
        if not calls:  # it passes: what is reduced again is right
            flip(self.master_gradient, element, bit)
        calls.append(1)

    if target == "product":
        hook = trainer.model.get_parameter(tensor).register_hook(spoiled)
        try:
            yield
        finally:
            hook.remove()
    elif target == "received":
        with patch.object(ZeroShards, "reduce_gradients", receiving):
            yield
    else:
        trainer.wait_for_weights()
        states = {"masters": trainer.shards.master, "moments": trainer.optimizer.states[1].values}
        flip(states.get(target, trainer.shards.weights), element, bit)
        yield


def inject(target: str, rank: int, steps: range, element: int = 12345, bit: int = 29) -> None:
    """Flip a bit in one of PLACES of a rank, in these steps (from 1): a `prepare` of ranks."""
    train_step = Trainer.train_step

    def flipping(self: Trainer, here: Position) -> Any:
        if self.step + 1 not in steps or self.world.rank != rank:
            return train_step(self, here)
        with flipped(self, target, element, bit):
            return train_step(self, here)

    Trainer.train_step = flipping  # type: ignore[method-assign]
