"""The script of plain_ddp.py in a function that `zslurm.recover` calls."""

import argparse
import os
from pathlib import Path

import faults
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import zslurm
from zslurm import progress

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--out", type=Path, default=Path("out"))
options = parser.parse_args()

torch.set_num_threads(1)


def train() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    options.out.mkdir(parents=True, exist_ok=True)
    saved = sorted(options.out.glob("step-*.pt"))
    state = {"model": model.module, "optimizer": optimizer}
    first = (zslurm.restore(state) or 0) + 1
    if saved and first == 1:
        loaded = torch.load(saved[-1])
        model.module.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        first = loaded["step"] + 1
        print(f"continues after step {loaded['step']}", flush=True)

    for step in range(first, options.steps + 1):
        generator = torch.Generator().manual_seed(step * 1000 + rank)
        inputs = torch.randn(16, 32, generator=generator)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        zslurm.keep(step, state)
        progress.step(step, loss=loss)
        print(f"step {step} loss {loss.item():.6f}", flush=True)
        if step % 10 == 0 and rank == 0:
            part = options.out / f"part-{os.getpid()}"
            torch.save(
                {"step": step, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, part
            )
            part.rename(options.out / f"step-{step:06d}.pt")
        faults.after_step(step)

    dist.destroy_process_group()


zslurm.recover(train)
