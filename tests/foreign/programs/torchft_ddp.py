"""The script of plain_ddp.py with torchft: each rank is a replica group, and a lost one is healed by the others.

Started as torchft's documents say: torchrun for each group, and one lighthouse (TORCHFT_LIGHTHOUSE).
"""

import argparse
import os
from datetime import timedelta

import faults
import torch
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
options, _ = parser.parse_known_args()
group = int(os.environ["REPLICA_GROUP_ID"])

torch.set_num_threads(1)
torch.manual_seed(0)
plain = torch.nn.Linear(32, 1)
inner = torch.optim.SGD(plain.parameters(), lr=0.01)


def load(state):
    plain.load_state_dict(state["model"])
    inner.load_state_dict(state["optimizer"])


manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
    load_state_dict=load,
    state_dict=lambda: {"model": plain.state_dict(), "optimizer": inner.state_dict()},
    min_replica_size=1,
    timeout=timedelta(seconds=10),
    replica_id=f"group-{group}",
)
model = DistributedDataParallel(manager, plain)
optimizer = Optimizer(manager, inner)
while (step := manager.current_step() + 1) <= options.steps:
    generator = torch.Generator().manual_seed(step * 1000 + group)
    inputs = torch.randn(16, 32, generator=generator)
    optimizer.zero_grad()
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
    loss.backward()
    optimizer.step()
    if manager.current_step() < step:  # the step was not committed: a replica was lost in it
        continue
    print(f"step {step} loss {loss.item():.6f} replicas {manager.num_participants()}", flush=True)
    os.environ["RANK"] = str(group)
    faults.after_step(step)
    os.environ["RANK"] = "0"
os._exit(0)
