"""Who takes part in a run: ranks, device, process groups, and the store they talk through.

Reads torchrun's variables and nothing else (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
MASTER_PORT, TORCHELASTIC_USE_AGENT_STORE); without them the run has one rank. One code path serves gloo on
CPUs and RCCL or NCCL on GPUs: torch calls both `nccl`.

ZeRO-1 divides optimizer state and gradients over all ranks in every phase. What a phase's `context_parallel` c
changes is the division of its data: c consecutive ranks, of one node, share each sequence; the W / c groups divide
the microbatches. So a run changes c between phases and its optimizer state does not move.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.config import ParallelConfig
from zslurm.train.errors import ConfigError
from zslurm.train.parallel.store_connections import CONNECTIONS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def _not_replaced() -> None:
    """Return: nothing replaces the processes of this run."""


@dataclass
class World:
    """One rank's view of the run.

    Attributes:
        group: all ranks; another one in each generation (train/recovery).
        store: the one of the ranks of this generation.
        generation: 0 from the start of the ranks until some of them are replaced.
        joined: this process came with a later generation, and took the place of a rank.
        resized: this generation has another number of ranks than the one before.
        making_groups: context in which process groups are made.
        fence: returns only in a process that no other one has replaced.
    """

    rank: int
    size: int
    local_size: int
    device: torch.device
    group: dist.ProcessGroup
    store: dist.Store
    generation: int = 0
    joined: bool = False
    resized: bool = False
    making_groups: Callable[[], AbstractContextManager[None]] = nullcontext
    fence: Callable[[], None] = _not_replaced

    def second_store(self) -> dist.Store:
        """Return another connection to the store, for another thread: an operation holds its connection."""
        if "MASTER_ADDR" not in os.environ:
            return self.store.clone()  # type: ignore[attr-defined]  # not in torch's stubs
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        timeout: timedelta = self.store.timeout  # type: ignore[attr-defined]  # not in torch's stubs
        return dist.PrefixStore(_prefix(self.generation), CONNECTIONS.take(host, port, timeout))

    @property
    def is_first(self) -> bool:
        """Return True on rank 0, which writes metrics and manifests."""
        return self.rank == 0


def choose_device(asked: str, local_rank: int) -> torch.device:
    """Return the device of a rank of this node.

    Raises:
        ConfigError: a GPU is asked for that is not there.
    """
    available = torch.cuda.device_count()
    if asked == "cuda" and local_rank >= available:
        raise ConfigError(
            f"parallel.device: cuda, but local rank {local_rank} sees {counted(available, 'GPU')}; "
            "set slurm.ranks_per_node to the GPUs of a node, or parallel.device: cpu"
        )
    if asked == "cpu" or (asked == "auto" and local_rank >= available):
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


def cpu_threads(asked: int) -> int:
    """Return the threads of this rank: as asked, else its share of the cores that this process may use."""
    return asked or max(1, len(os.sched_getaffinity(0)) // _ranks_on_cores())


def _ranks_on_cores() -> int:
    """Return how many ranks share this one's cores; a launcher that gives ranks cores sets it."""
    return int(os.environ.get("ZSLURM_CORE_RANKS") or os.environ.get("LOCAL_WORLD_SIZE", "1"))


def overlaps(config: ParallelConfig, device: torch.device) -> bool:
    """Return whether gradients are reduced during backward: as asked, else if that takes no time from it.

    On CPUs gloo adds gradients up on the cores that compute, unless the ranks' threads leave some of them free.
    """
    if config.overlap != "auto":
        return config.overlap
    spare = len(os.sched_getaffinity(0)) - _ranks_on_cores() * torch.get_num_threads()
    return device.type == "cuda" or spare > 0


def _store(rank: int, timeout: timedelta) -> dist.Store:
    if "MASTER_ADDR" not in os.environ:
        return dist.HashStore()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank != 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return CONNECTIONS.take(host, port, timeout)
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout)


def _open_store(rank: int, timeout: timedelta, generation: int) -> dist.Store:
    """Return a connection to the store, with the keys of this start and generation."""
    return dist.PrefixStore(_prefix(generation), _store(rank, timeout))


def _prefix(generation: int) -> str:
    # torchrun keeps its store through restarts of the workers: each start has its own keys.
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"train/{start}" if not generation else f"generation-{generation}"


def _open_group(world_size: int, rank: int, device: torch.device, store: dist.Store, timeout: timedelta) -> None:
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("groups", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )


@contextmanager
def open_world(
    config: ParallelConfig,
    making_groups: Callable[[], AbstractContextManager[None]] = nullcontext,
    generation: int = 0,
    fence: Callable[[], None] = _not_replaced,
) -> Iterator[World]:
    """Join the run; leave it in order when the block ends without an error.

    `making_groups` and `fence` are the `World`'s; the group of all ranks is made in such a context. A
    process that takes the place of a rank joins a `generation` after the first.

    Raises:
        ConfigError: a GPU is asked for that is not there.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if config.deterministic:
        use_deterministic_algorithms()
    device = choose_device(config.device, local_rank)
    torch.set_num_threads(cpu_threads(config.threads))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=config.timeout_s)
    store = _open_store(rank, timeout, generation)
    with making_groups():
        _open_group(size, rank, device, store, timeout)
    assert dist.group.WORLD is not None
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    yield World(
        rank,
        size,
        local_size,
        device,
        dist.group.WORLD,
        store,
        generation,
        joined=generation > 0,
        making_groups=making_groups,
        fence=fence,
    )
    # The host of the store must not leave while others still talk through it. After an error none is
    # waited for: the process ends, and its peers notice.
    dist.barrier()
    dist.destroy_process_group()


def use_deterministic_algorithms() -> None:
    """Let torch run algorithms that repeat bit for bit, and raise RuntimeError for operations without one.

    To be called before the first call of CUDA or HIP: cuBLAS reads its workspace from the environment then
    (NVIDIA, cuBLAS documentation, results reproducibility). By default torch also fills new memory with NaN in
    this mode, which costs a pass over it and changes no result.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # of torch


def regroup(
    world: World,
    config: ParallelConfig,
    generation: int,
    connecting: Callable[[], AbstractContextManager[None]],
    making_groups: Callable[[], AbstractContextManager[None]],
) -> None:
    """Make a new group of all ranks in a generation, whose members all call it; the old one is gone.

    A connection to the store that only the new group uses is opened inside of `connecting()`.

    Raises:
        RuntimeError: a member did not come, or what waits was aborted.
    """
    timeout = timedelta(seconds=config.timeout_s)
    with making_groups():
        with connecting():
            store = _open_store(world.rank, timeout, generation)
        _open_group(world.size, world.rank, world.device, store, timeout)
    assert dist.group.WORLD is not None
    world.group, world.generation = dist.group.WORLD, generation
    world.store = _open_store(world.rank, timeout, generation)


def to_device(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """Return numbers of the host as an fp64 tensor of the device; the host does not wait."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=torch.float64)
    return torch.tensor(values, dtype=torch.float64, pin_memory=True).to(device, non_blocking=True)


def least_of_all(values: Sequence[float], world: World) -> list[float]:
    """Return the least of each number over all ranks, for what they must not choose differently.

    All ranks call it together, with as many numbers; the host waits.
    """
    minima = to_device(values, world.device)
    dist.all_reduce(minima, dist.ReduceOp.MIN, group=world.group)
    least: list[float] = minima.tolist()
    return least


def common_local_size(world: World) -> int:
    """Return the ranks of a node; if nodes differ, the most that every node's ranks can be divided by.

    So many neighbours are always in one node. All ranks call it together, and get the same number; the host waits.
    """
    sizes = to_device([world.local_size], world.device)
    every = [torch.empty_like(sizes) for _ in range(world.size)]
    dist.all_gather(every, sizes, group=world.group)
    return math.gcd(*(int(size) for size in torch.cat(every).tolist()))


def read_back(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Copy tensors to the host as fp64, all in one; on a GPU the host waits for all that was queued before.

    Only here does a training step wait for the device. Whole numbers up to 2^53 are exact.
    """
    flat = torch.cat([tensor.flatten().to(torch.float64) for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
