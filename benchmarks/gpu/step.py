"""A whole training step of one rank, as train/loop.py makes it, without data, observers and checkpoints.

Forward and backward of one microbatch, reduction, clipping, the one wait for the device, the optimizer and the
start of the gathering, which the next forward waits for layer by layer. Weights are random and made on the device:
the trainer's own, from the host's generator, would take half a minute of the ten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from zslurm.config import yaml12
from zslurm.config.load import recipes
from zslurm.train.assembly import assemble
from zslurm.train.config import ModelConfig, ParallelConfig, TrainConfig
from zslurm.train.model import init, zaya
from zslurm.train.optim.balance import BalanceState, balance_over
from zslurm.train.optim.sharded import ShardedOptimizer
from zslurm.train.parallel.world import World, open_world, read_back
from zslurm.train.shapes import TensorInfo

LR = 1e-4
CONTEXT, CONTEXT_ON_CPU = 4096, 64


def config_of(recipe: str, *, micro_batch: int, context: int, **parallel: Any) -> TrainConfig:
    """Return a recipe's model and optimizer with one microbatch a step, in bf16."""
    body = yaml12.parse(recipes()[recipe], recipe).data
    phase = {
        "tokens": 10**9,
        "context": context,
        "global_batch": micro_batch,
        "micro_batch": micro_batch,
        "lr": LR,
    }
    sections = {key: body[key] for key in ("model", "optim") if key in body}
    return TrainConfig.model_validate(
        {
            **sections,
            "phases": [phase],
            "parallel": {"dtype": "bf16", **parallel},
            "checkpoint": {"background": False},
        }
    )


def world_on(device_type: str) -> AbstractContextManager[World]:
    """Join the ranks of the environment; on CPUs with one thread each, for more would wait for each other."""
    on_cpu = device_type == "cpu"
    return open_world(ParallelConfig(device="cpu" if on_cpu else "cuda", threads=int(on_cpu)))


@contextmanager
def drawn_on(device: torch.device) -> Iterator[None]:
    """Let models be built with initial values that the device draws: as distributed, not the same."""
    generator = torch.Generator(device).manual_seed(0)

    def drawn(info: TensorInfo, config: ModelConfig, seed: int) -> Tensor:
        if info.kind in init._CONSTANTS:
            return init.initial_tensor(info, config, seed)
        values = torch.randn(info.shape, generator=generator, device=device)
        return values.mul_(init._standard_deviation(info, config))

    with mock.patch.object(zaya, "initial_tensor", drawn):
        yield


class TrainingStep:
    """A rank's model, shards and optimizer, and a step of them.

    Attributes:
        marked: called with the name of each part of the step that is no module's; gives a context manager.
    """

    def __init__(self, config: TrainConfig, world: World) -> None:
        self.config, self.world = config, world
        with drawn_on(world.device):
            self.model, self.shards, _ = assemble(config, world)
        self.optimizer = ShardedOptimizer(self.shards, config.optim)
        self.balance = BalanceState.initial(config.model, world.device)
        self.model.balancing_bias.copy_(self.balance.bias)
        self.model.call_before(self.shards.wait_for_weights)
        phase = config.phases[0]
        self.rope_base = phase.rope_base
        generator = torch.Generator().manual_seed(world.rank)
        shape = (phase.micro_batch, phase.context + 1)
        tokens_BS = torch.randint(config.model.vocab_size, shape, generator=generator).to(world.device)
        self.inputs_BS, self.targets_BS = tokens_BS[:, :-1].contiguous(), tokens_BS[:, 1:].contiguous()
        self.marked: Callable[[str], Any] = _unmarked
        if world.device.type == "cuda":  # what building took is no part of a step
            torch.cuda.synchronize(world.device)
            torch.cuda.empty_cache()

    @property
    def tokens(self) -> int:
        """Tokens of this rank's microbatch."""
        return self.targets_BS.numel()

    def run(self) -> float:
        """Take a step and return its loss."""
        optim = self.config.optim
        self.shards.begin_step(backwards=1)
        losses, counts_LC = self.model.losses(
            self.inputs_BS, self.targets_BS, rope_base=self.rope_base, z_weight=optim.z_loss
        )
        (losses.objective / self.tokens).backward()
        with self.marked("reduction"):
            self.shards.reduce_gradients()
        with self.marked("optimizer"):
            norm = self.shards.clip_gradients(optim.clip_norm)
        loss, _, _ = read_back(losses.cross_entropy, norm, counts_LC)
        with self.marked("optimizer"):
            self.optimizer.step(LR)
        with self.marked("gathering"):
            self.shards.start_gathering(rounded=self.optimizer.rounds)
        with self.marked("router"):
            self.balance = balance_over(self.balance, counts_LC.unsqueeze(0), lr=optim.balance_lr)
            self.model.balancing_bias.copy_(self.balance.bias)
        return float(loss) / self.tokens


@contextmanager
def _unmarked(part: str) -> Iterator[None]:
    yield
