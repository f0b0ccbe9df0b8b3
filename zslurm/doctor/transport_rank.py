"""One rank of the doctor's test of the transport; its arguments are FILE RANK WORLD GPU SECONDS.

The ranks meet at a store of rank 0, whose address is in FILE, and sum one buffer, then another one in a second
process group: some networks hang only there. RCCL's log goes to stdout.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from zslurm.checkpoint_tools.quantities import counted
from zslurm.core.files import write_atomically
from zslurm.slurm.environment import task_node

NO_GPU = 3
"""Exit code if torch sees no GPU."""

_ELEMENTS = 1 << 20


def meet(file: Path, rank: int, world: int, timeout_s: float) -> Any:
    """Return the store of the group: rank 0 opens it and writes its address into FILE, the others wait for that.

    Raises:
        TimeoutError: rank 0 wrote no address in time.
        torch.distributed.DistStoreError: not all ranks came in time.
    """
    from torch.distributed import TCPStore

    timeout = timedelta(seconds=timeout_s)
    if rank == 0:
        host = _host()
        store = TCPStore(host, 0, world, is_master=True, wait_for_workers=False, timeout=timeout)
        write_atomically(file, json.dumps([host, store.port]))
    else:
        deadline = time.monotonic() + timeout_s
        while not file.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no address of rank 0 within {timeout_s:g} s")
            time.sleep(0.05)
            list(file.parent.iterdir())  # makes an NFS client look again
        host, port = json.loads(file.read_text())
        store = TCPStore(host, port, world, is_master=False, timeout=timeout)
    store.set(f"here-{rank}", "")
    store.wait([f"here-{peer}" for peer in range(world)], timeout)
    return store


def _host() -> str:
    interface = os.environ.get("ZSLURM_INTERFACE")
    if interface:
        import psutil

        for address in psutil.net_if_addrs().get(interface, []):
            if address.family == socket.AF_INET:
                return str(address.address)
    return task_node(os.environ) or "127.0.0.1"


def main(arguments: list[str]) -> int:
    """Meet the others and sum one buffer; returns the exit code."""
    file, rank, world, gpu = Path(arguments[0]), *(int(word) for word in arguments[1:4])
    timeout_s = float(arguments[4])
    import torch
    import torch.distributed as dist

    if torch.cuda.device_count() <= gpu:
        return NO_GPU
    store = meet(file, rank, world, timeout_s)
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s))
    right = True
    for group in (dist.group.WORLD, dist.new_group(list(range(world)))):
        buffer = torch.ones(_ELEMENTS, device="cuda")
        dist.all_reduce(buffer, group=group)
        torch.cuda.synchronize()
        right = right and bool((buffer == world).all())
    dist.destroy_process_group()
    if not right:
        print(f"the sum over {counted(world, 'rank')} is wrong", file=sys.stderr)
    return 0 if right else 1


if __name__ == "__main__":
    # Without the destructors of native libraries, which can abort with two SMI libraries of ROCm (job/rank.py).
    # The check starts Python with -u: nothing is left in a buffer, RCCL's log included.
    os._exit(main(sys.argv[1:]))
