"""The program in a function that `zslurm.recover` calls, with a copy of its shard on the next rank."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from ddp import batch_of, load, model_of, save, spoil
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
    state = {"model": model.module, "optimizer": optimizer.optim}
    last = zslurm.restore(state) or load(options.out, model, optimizer)
    for step in range(last + 1, options.steps + 1):
        inputs, targets = batch_of(step, rank)
        loss = (model(inputs) - targets).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        zslurm.keep(step, state, sharded=True)
        progress.step(step, loss=loss.item())
        save(step, options.out, model, optimizer, injector)
        injector.after_step(step, loss.item(), lambda: spoil(model))
    dist.destroy_process_group()


zslurm.recover(train)
