"""How fast this node's GPUs are: `python -m zslurm.doctor.speed FOLDER` prints one JSON document.

One process for each GPU, each pinned to its own; they meet through a file in FOLDER. Without GPUs two processes
measure the CPU with small sizes, through gloo: the same code, figures that mean little. The measurements are those
of `zslurm bench`, of which each is one point here:

    gemm        a bf16 product of n x n matrices, n = 8192 (bench/gemm.py)
    memory      a copy of 1 GiB (bench/hbm.py)
    all-reduce  bus bandwidth of 64 MiB (bench/collectives.py)
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from zslurm.checkpoint_tools.quantities import counted

_CPU_RANKS = 2
_SECONDS = 1.0
_MIB = 1 << 20


def measure(rank: int, world: int, store: str) -> dict[str, Any]:
    """Return the figures of one rank; only rank 0 knows the all-reduce's."""
    import torch
    import torch.distributed as dist

    from zslurm.bench.collectives import bus_factor
    from zslurm.bench.gemm import Product
    from zslurm.bench.hbm import Pattern
    from zslurm.bench.run.timing import time_together

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    n, copied, reduced = (8192, 1024 * _MIB, 64 * _MIB) if on_gpu else (512, 16 * _MIB, 4 * _MIB)
    sizes = {"product": "", "pass": "forward", "kind": "dense", "m": n, "n": n, "k": n, "batch": 1}
    product = Product({**sizes, "dtype": "bf16" if on_gpu else "fp32"}, device)
    gemm = time_together(product.call, group=None, device=device, seconds=_SECONDS).seconds
    if product.wrong():
        raise SystemExit(f"GPU {rank}: a matrix product is wrong in {counted(product.wrong(), 'row')} of {n}")
    pattern = Pattern("copy", copied, torch.float32, device)
    copy = time_together(pattern.call, group=None, device=device, seconds=_SECONDS).seconds
    if pattern.wrong():
        raise SystemExit(f"GPU {rank}: a copy in its memory differs in {counted(pattern.wrong(), 'element')}")
    bandwidth = None
    if world > 1:
        backend = "nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
        buffer = torch.ones(reduced // 4, device=device)
        took = time_together(
            lambda: dist.all_reduce(buffer, dist.ReduceOp.MAX), group=dist.group.WORLD, device=device,
            seconds=_SECONDS,
        ).seconds  # fmt: skip
        bandwidth = bus_factor("all_reduce", world) * reduced / took / 1e9
        dist.destroy_process_group()
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "gemm_tflops": 2 * n**3 / gemm / 1e12,
        "memory_gb_s": pattern.moved / copy / 1e9,
        "all_reduce_gb_s": bandwidth,
    }


def run(folder: Path) -> dict[str, Any]:
    """Return all ranks of this node.

    Raises:
        SystemExit: one of them failed; its last line is in the message.
    """
    import torch

    world = torch.cuda.device_count() or _CPU_RANKS
    store = folder / "store"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", "-m", __spec__.name, str(folder), str(rank), str(world), str(store)],
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(world)
    ]  # fmt: skip
    printed = [process.communicate() for process in ranks]
    for rank, (process, (_, err)) in enumerate(zip(ranks, printed, strict=True)):
        if process.returncode != 0:
            lines = err.strip().splitlines() or [f"ended with {process.returncode}"]
            raise SystemExit(f"GPU {rank}: {lines[-1]}")
    figures = [json.loads(out.splitlines()[-1]) for out, _ in printed]
    return {
        "device": figures[0]["device"],
        "gemm_tflops": [figure["gemm_tflops"] for figure in figures],
        "memory_gb_s": [figure["memory_gb_s"] for figure in figures],
        "all_reduce_gb_s": figures[0]["all_reduce_gb_s"],
    }


def main(arguments: list[str]) -> None:
    """Run the parent with FOLDER, or a rank with FOLDER RANK WORLD STORE."""
    if len(arguments) == 1:
        print(json.dumps(run(Path(arguments[0]))))
    else:
        _, rank, world, store = arguments
        print(json.dumps(measure(int(rank), int(world), store)))


if __name__ == "__main__":
    main(sys.argv[1:])
