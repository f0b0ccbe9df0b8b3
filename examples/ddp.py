"""A plain PyTorch DDP script with two lines for zslurm: a hang is noticed, and `zslurm status` has its steps.

    zslurm submit --nodes 2 -- python examples/ddp.py                                  # on a Slurm cluster
    zslurm submit --cluster local --set slurm.ranks_per_node=2 -- python examples/ddp.py --steps 20

Launching needs no change: ranks get torchrun's variables. The two lines are marked below.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from zslurm import progress  # the first line


def main() -> None:
    """Train a line through points."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(torch.nn.Linear(8, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, steps + 1):
        inputs = torch.randn(32, 8, device=device)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        progress.step(step, loss=loss.item())  # the second line
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f} after {steps} steps on {dist.get_world_size()} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
