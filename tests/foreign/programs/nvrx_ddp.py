"""The script of plain_ddp.py in a function that nvidia-resiliency-ext calls again in the ranks that are left."""

import argparse
import os
from datetime import timedelta
from pathlib import Path

import faults
import nvidia_resiliency_ext.inprocess as inprocess
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--out", type=Path, default=Path("out"))
options = parser.parse_args()
host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
torch.set_num_threads(1)


def train(call_wrapper: inprocess.CallWrapper = None):
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(host, port, is_master=rank == 0, wait_for_workers=False, multi_tenant=True)
    store = dist.PrefixStore(f"{call_wrapper.iteration}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options.out.mkdir(parents=True, exist_ok=True)
    saved = sorted(options.out.glob("step-*.pt"))
    first = 1
    if saved:
        state = torch.load(saved[-1])
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1
    for step in range(first, options.steps + 1):
        generator = torch.Generator().manual_seed(step * 1000 + rank)
        inputs = torch.randn(16, 32, generator=generator)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        call_wrapper.ping()
        print(f"step {step} loss {loss.item():.6f} ranks {size}", flush=True)
        if step % 10 == 0 and rank == 0:
            draft = options.out / f"part-{os.getpid()}"
            torch.save(
                {"step": step, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, draft
            )
            draft.rename(options.out / f"step-{step:06d}.pt")
        faults.after_step(step)
    dist.destroy_process_group()


# Shorter than the defaults where they only wait: a test of a second.
inprocess.Wrapper(
    store_kwargs={"timeout": timedelta(seconds=60), "port": port + 1},
    monitor_thread_interval=timedelta(milliseconds=100),
    monitor_process_interval=timedelta(milliseconds=100),
    heartbeat_interval=timedelta(milliseconds=100),
    progress_watchdog_interval=timedelta(milliseconds=100),
    last_call_wait=timedelta(milliseconds=100),
)(train)()
