"""The program in a function that nvidia-resiliency-ext calls again, in place, in the ranks that are left.

It has no postponed annotations: the wrapper finds its argument by the class.
"""

import argparse
import os
from datetime import timedelta
from pathlib import Path

import nvidia_resiliency_ext.inprocess as inprocess
import torch
import torch.distributed as dist
from ddp import batch_of, load, model_of, save, spoil
from injector import Injector
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--out", type=Path, required=True)
options = parser.parse_args()
host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
torch.set_num_threads(1)
injector = Injector(int(os.environ["RANK"]))


def train(call_wrapper: inprocess.CallWrapper = None) -> None:
    """Train, from the newest checkpoint."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(host, port, is_master=rank == 0, wait_for_workers=False, multi_tenant=True)
    store = dist.PrefixStore(f"{call_wrapper.iteration}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    model = DistributedDataParallel(model_of())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    first = load(options.out, model, optimizer) + 1
    for step in range(first, options.steps + 1):
        inputs, targets = batch_of(step, rank)
        loss = (model(inputs) - targets).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        call_wrapper.ping()
        save(step, options.out, model, optimizer, injector)
        injector.after_step(step, loss.item(), lambda: spoil(model))
    dist.destroy_process_group()


# Its documents give no intervals for a program of this size; the defaults wait for 1 to 60 s, these do not.
inprocess.Wrapper(
    store_kwargs={"timeout": timedelta(seconds=60), "port": port + 1},
    monitor_thread_interval=timedelta(milliseconds=100),
    monitor_process_interval=timedelta(milliseconds=100),
    heartbeat_interval=timedelta(milliseconds=100),
    progress_watchdog_interval=timedelta(milliseconds=100),
    last_call_wait=timedelta(milliseconds=100),
    soft_timeout=timedelta(seconds=20),
    hard_timeout=timedelta(seconds=30),
)(train)()
