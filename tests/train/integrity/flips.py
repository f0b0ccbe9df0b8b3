"""Single bits that flip in a rank, at a step: what the tests and the benchmark of integrity inject."""

from __future__ import annotations

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


def inject(target: str, rank: int, steps: range, element: int = 12345, bit: int = 29) -> None:
    """Flip a bit in one of PLACES of a rank, in these steps (from 1): a `prepare` of ranks."""
    train_step = Trainer.train_step

    def flipping(self: Trainer, here: Position) -> Any:
        if self.step + 1 not in steps or self.world.rank != rank:
            return train_step(self, here)
        if target == "product":
            hook = self.model.get_parameter(TENSOR).register_hook(spoiled)
            try:
                return train_step(self, here)
            finally:
                hook.remove()
        if target == "received":
            with patch.object(ZeroShards, "reduce_gradients", receiving):
                return train_step(self, here)
        if target == "weights":
            self.wait_for_weights()
            flip(self.shards.weights[: self.shards.layout.flat_length], element, bit)
        elif target == "masters":
            flip(self.shards.master, element, bit)
        else:
            flip(self.optimizer.states[1].values, element, bit)
        return train_step(self, here)

    def spoiled(gradient: Tensor) -> Tensor:
        copy = gradient.clone()
        flip(copy, element, bit)
        return copy

    reduce_gradients = ZeroShards.reduce_gradients

    def receiving(self: ZeroShards) -> None:
        reduce_gradients(self)
        flip(self.master_gradient, element, bit)

    Trainer.train_step = flipping  # type: ignore[method-assign]
