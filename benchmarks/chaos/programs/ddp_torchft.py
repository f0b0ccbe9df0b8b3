"""The program with torchft: each rank is a replica group, and a lost one is healed by the others.

Started as torchft's README says: torchrun for each group, and one lighthouse (TORCHFT_LIGHTHOUSE). The optimizer
is not sharded: torchft shards inside a group, and a group is one rank here.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from ddp import batch_of, model_of, spoil
from injector import Injector
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--out", type=Path, required=True)
options = parser.parse_args()
group = int(os.environ["REPLICA_GROUP_ID"])
torch.set_num_threads(1)
injector = Injector(group)
plain = model_of()
inner = torch.optim.AdamW(plain.parameters(), lr=1e-3)


def load(state: dict[str, Any]) -> None:
    """Take the state of a healthy replica."""
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
    inputs, targets = batch_of(step, group)
    optimizer.zero_grad()
    loss = (model(inputs) - targets).pow(2).mean()
    loss.backward()
    optimizer.step()
    if manager.current_step() < step:  # the step was not committed: a replica was lost in it
        continue
    injector.after_step(step, loss.item(), lambda: spoil(plain))
os._exit(0)
