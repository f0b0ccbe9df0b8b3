"""Copies of a program's state in host memory, from which a run continues after a lost rank: `keep` and `restore`.

A state that every rank has in full (DDP) is copied on each rank, and a new process gets the copy of another one.
Of a state that is sharded over the ranks (FSDP2, ZeRO), each rank also has the copy of its neighbour, the rank
before it: a new process gets its shard from the rank after it.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

_KEPT_STEPS = 2


class Stateful(Protocol):
    """A model, an optimizer, a schedule."""

    def state_dict(self) -> Any:
        """Return its state."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Take a state."""


@dataclass
class _Copies:
    """What this process keeps.

    Attributes:
        is_on: `recover` can replace a lost rank.
        of_rank: the state of this rank by step.
        of_neighbour: the state of the rank before it, if the state is sharded.
        groups: the default process group, and one for host memory made with it.
    """

    is_on: bool = False
    of_rank: dict[int, dict[str, Any]] = field(default_factory=dict)
    of_neighbour: dict[int, dict[str, Any]] = field(default_factory=dict)
    groups: tuple[Any, Any] | None = None

    def replace(self, step: int, of_rank: dict[str, Any], of_neighbour: dict[str, Any] | None) -> None:
        """Keep nothing but one step."""
        self.of_rank = {step: of_rank}
        self.of_neighbour = {} if of_neighbour is None else {step: of_neighbour}


_copies = _Copies()


@dataclass
class _Shard:
    """The local part of a DTensor; its mesh is another one after a recovery, and has the same key."""

    local: Any
    placements: Any
    shape: Any
    stride: Any
    mesh: tuple[Any, ...]


def switch_on() -> None:
    """Let `keep` copy from now on: a lost rank can be replaced."""
    _copies.is_on = True


def keep(step: int, state: Mapping[str, Stateful], *, sharded: bool = False) -> None:
    """Copy the state after a step to host memory; the copies of two steps are kept. Without `recover` nothing is.

    Args:
        step: its number; all ranks keep the same steps.
        state: what makes the state up, by name.
        sharded: the state differs from rank to rank, as with `ZeroRedundancyOptimizer`; every rank then sends its
            copy to the rank after it. A state with a DTensor (FSDP2) is sharded without it.

    Raises:
        RuntimeError: the state is sharded, and a rank was lost meanwhile.
    """
    if not _copies.is_on:
        return
    parts = {name: _copied(stateful.state_dict()) for name, stateful in state.items()}
    if sharded or any(isinstance(leaf, _Shard) for leaf in _leaves(parts)):
        _copies.of_neighbour[step] = _from_neighbour(parts)
    _copies.of_rank[step] = parts
    for kept in (_copies.of_rank, _copies.of_neighbour):
        for old in sorted(kept)[:-_KEPT_STEPS]:
            del kept[old]


def restore(state: Mapping[str, Stateful]) -> int | None:
    """Give every rank the state of the newest step that is kept; returns the step, None if there is none.

    All ranks call it together, after they have made their process group and, on GPUs, called
    `torch.cuda.set_device`. A rank whose process is new gets a copy that another rank has. After a first start
    nothing is kept, and None is returned; so it is if a rank and the one that has the copy of its shard are new.

    Raises:
        RuntimeError: a rank was lost meanwhile.
    """
    if not _copies.is_on:
        return None
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    kept: list[tuple[list[int], list[int]]] = [([], [])] * size
    dist.all_gather_object(kept, (sorted(_copies.of_rank), sorted(_copies.of_neighbour)))
    new = [number for number, (of_rank, _) in enumerate(kept) if not of_rank]
    is_sharded = any(of_neighbour for _, of_neighbour in kept)
    sets = [set(of_rank) for of_rank, _ in kept if of_rank]
    if is_sharded:
        sets += [set(kept[(number + 1) % size][1]) for number in new]
    step = max(set.intersection(*sets), default=None) if sets else None
    if step is None:
        _copies.of_rank.clear()
        _copies.of_neighbour.clear()
        return None
    parts = _copies.of_rank.get(step)
    neighbours: dict[str, Any] | None = None
    if is_sharded and new:
        if (rank - 1) % size in new:
            _send(_copies.of_neighbour[step], (rank - 1) % size)()
        parts = _receive((rank + 1) % size) if rank in new else parts
        assert parts is not None
        neighbours = _from_neighbour(parts)
    elif is_sharded:
        neighbours = _copies.of_neighbour[step]
    elif any(step not in of_rank for of_rank, _ in kept):
        source = next(number for number, (of_rank, _) in enumerate(kept) if step in of_rank)
        shared = [parts if rank == source else None]
        dist.broadcast_object_list(shared, src=source)
        parts = parts or shared[0]
    assert parts is not None
    _copies.replace(step, parts, neighbours)
    meshes = {_key(leaf.device_mesh): leaf.device_mesh for leaf in _dtensors(state)}
    for name, stateful in state.items():
        # An optimizer takes the tensors that it is given, so that they are copied once more.
        stateful.load_state_dict(_made_again(_copied(parts[name]), meshes))
    return step


def _from_neighbour(parts: dict[str, Any]) -> dict[str, Any]:
    """Send a state to the rank after this one; returns that of the rank before."""
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    wait = _send(parts, (rank + 1) % size)
    received = _receive((rank - 1) % size)
    wait()
    return received


def _send(parts: dict[str, Any], to: int) -> Callable[[], None]:
    """Begin to send a state; returns what waits until it is sent."""
    import torch
    import torch.distributed as dist

    file = io.BytesIO()
    torch.save(parts, file)
    content = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    group, length = _host_group(), torch.tensor([content.numel()])
    works = [dist.isend(length, to, group), dist.isend(content, to, group)]

    def wait() -> None:
        for work in works:
            assert work is not None
            work.wait()

    return wait


def _receive(source: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    group, length = _host_group(), torch.zeros(1, dtype=torch.int64)
    dist.recv(length, source, group)
    content = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(content, source, group)
    parts: dict[str, Any] = torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=False)
    return parts


def _host_group() -> Any:
    """Return a group of all ranks that sends host memory; the first call is one of all ranks."""
    import torch.distributed as dist

    default = dist.group.WORLD
    if _copies.groups is None or _copies.groups[0] is not default:
        is_gloo = dist.get_backend() == "gloo"
        _copies.groups = default, default if is_gloo else dist.new_group(backend="gloo")
    return _copies.groups[1]


def _copied(value: Any) -> Any:
    """Return a copy in host memory."""
    import torch
    from torch.distributed.tensor import DTensor

    if isinstance(value, _Shard):
        return _Shard(_copied(value.local), value.placements, value.shape, value.stride, value.mesh)
    if isinstance(value, DTensor):
        local = value.to_local().detach().to("cpu", copy=True)
        return _Shard(local, value.placements, value.shape, value.stride(), _key(value.device_mesh))
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {name: _copied(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(item) for item in value]
    return copy.deepcopy(value)


def _made_again(value: Any, meshes: Mapping[tuple[Any, ...], Any]) -> Any:
    """Return a copied state with DTensors on the meshes of now."""
    if isinstance(value, _Shard):
        from torch.distributed.tensor import DTensor

        mesh = meshes[value.mesh]
        return DTensor.from_local(
            value.local.to(mesh.device_type), mesh, value.placements, run_check=False, shape=value.shape,
            stride=value.stride,
        )  # fmt: skip
    if isinstance(value, Mapping):
        return {name: _made_again(item, meshes) for name, item in value.items()}
    if isinstance(value, list):
        return [_made_again(item, meshes) for item in value]
    return value


def _key(mesh: Any) -> tuple[Any, ...]:
    """Return what a mesh has in common with the one of another process group: ranks and names."""
    return tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist()), mesh.mesh_dim_names


def _dtensors(state: Mapping[str, Stateful]) -> Iterator[Any]:
    return (
        leaf for stateful in state.values() for leaf in _leaves(stateful.state_dict()) if hasattr(leaf, "to_local")
    )


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value
