"""The program in a function that `zslurm.recover` calls, with a copy of its shard on the next rank."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from ddp import SAVE_EVERY, batch_of, model_of, spoil
from injector import Injector
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import zslurm
from zslurm import progress

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--out", type=Path, required=True)
options = parser.parse_args()
torch.set_num_threads(1)
injector = Injector(int(os.environ["RANK"]))


def train() -> None:
    """Train, from the newest state that is kept or saved."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(model_of())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    options.out.mkdir(parents=True, exist_ok=True)
    state = {"model": model.module, "optimizer": optimizer.optim}
    last = zslurm.restore(state) or 0
    if not last and (saved := sorted(options.out.glob("step-*.pt"))):
        loaded = torch.load(saved[-1])
        model.module.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        last = loaded["step"]
    for step in range(last + 1, options.steps + 1):
        inputs, targets = batch_of(step, rank)
        loss = (model(inputs) - targets).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        zslurm.keep(step, state, sharded=True)
        progress.step(step, loss=loss.item())
        if step % SAVE_EVERY == 0:
            optimizer.consolidate_state_dict(to=0)
            if rank == 0:
                injector.before_save(step)
                draft = options.out / f"draft-{os.getpid()}"
                content = {
                    "step": step, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()
                }  # fmt: skip
                torch.save(content, draft)
                draft.rename(options.out / f"step-{step:06d}.pt")
        injector.after_step(step, loss.item(), lambda: spoil(model))
    dist.destroy_process_group()


zslurm.recover(train)
