"""The training program: DDP with a sharded optimizer, and its own checkpoints.

It takes torchrun's variables, writes a checkpoint every ten steps, and continues from the newest one. The data of
a step depend on its number and on the rank alone: a run that lost nothing has the losses of one without faults.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from injector import Injector
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

WIDTH, BATCH, SAVE_EVERY = 64, 16, 10


def batch_of(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs [16, 64] and targets [16, 1] of a step of a rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(BATCH, WIDTH, generator=generator)
    return inputs, inputs.sum(1, keepdim=True) / math.sqrt(WIDTH)


def model_of() -> torch.nn.Module:
    """Return the model, with the same weights on every rank."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1))


def spoil(model: torch.nn.Module) -> None:
    """Make the parameters not a number, as a broken product does."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)


def load(out: Path, model: DistributedDataParallel, optimizer: ZeroRedundancyOptimizer) -> int:
    """Take the newest checkpoint; return its step, 0 without one."""
    saved = sorted(out.glob("step-*.pt"))
    if not saved:
        return 0
    state = torch.load(saved[-1])
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def save(
    step: int, out: Path, model: DistributedDataParallel, optimizer: ZeroRedundancyOptimizer, injector: Injector
) -> None:
    """Write a checkpoint if one is due after this step; all ranks call it together.

    Raises:
        OSError: the disk is full, as the injector plays it.
    """
    if step % SAVE_EVERY:
        return
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() != 0:
        return
    injector.before_save(step)
    out.mkdir(parents=True, exist_ok=True)
    draft = out / f"draft-{os.getpid()}"
    torch.save({"step": step, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, draft)
    draft.rename(out / f"step-{step:06d}.pt")


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--each-step", help="MODULE:FUNCTION that a contender wants to be called with each step")
    options = parser.parse_args()
    module, _, function = (options.each_step or "builtins:id").partition(":")
    each_step = getattr(importlib.import_module(module), function)
    torch.set_num_threads(1)
    injector = Injector(int(os.environ["RANK"]))
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(model_of())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    first = load(options.out, model, optimizer) + 1
    for step in range(first, options.steps + 1):
        inputs, targets = batch_of(step, rank)
        loss = (model(inputs) - targets).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        each_step(step)
        save(step, options.out, model, optimizer, injector)
        injector.after_step(step, loss.item(), lambda: spoil(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
