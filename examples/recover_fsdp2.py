"""A PyTorch FSDP2 script that survives a lost rank: a new process gets its shards from the rank after it.

    zslurm submit --nodes 2 --set trainer.warm=true -- python examples/recover_fsdp2.py     # on a Slurm cluster
    zslurm submit --cluster local --set slurm.ranks_per_node=2 -- python examples/recover_fsdp2.py --steps 20

Kill the program of one rank while it trains, and look at the steps in `zslurm logs`. The calls of zslurm are those
of recover_ddp.py.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import zslurm


def main() -> None:
    """Train a small network on points."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that a step takes longer")
    options = parser.parse_args()
    zslurm.recover(lambda: train(options.steps, options.pace))


def make_model() -> torch.nn.Sequential:
    """Return the model, with the same weights on every rank."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def train(steps: int, pace: float) -> None:
    """Make groups, model and optimizer, continue with the newest step that is kept, and train."""
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    model = make_model().to(device)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    first = (zslurm.restore(state) or 0) + 1  # or the step of your newest checkpoint
    for step in range(first, steps + 1):
        data = torch.Generator().manual_seed(step * 1000 + dist.get_rank())  # a function of the step
        inputs = torch.randn(32, 8, generator=data).to(device)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        zslurm.keep(step, state)
        zslurm.progress.step(step, loss=loss.item())
        print(f"step {step} loss {loss.item():.6f} pid {os.getpid()}", flush=True)
        time.sleep(pace)
    shards = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    weights = sum(shard.full_tensor().double().sum().item() for shard in shards)
    if dist.get_rank() == 0:
        print(f"weights {weights!r} after {steps} steps on {dist.get_world_size()} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
