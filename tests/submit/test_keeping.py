"""`zslurm.keep` and `restore`: what a new process gets, of a state in full and of one that is sharded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tests.train.ranks import in_group
from zslurm import keeping

RANKS = 3


class Counter:
    """A state with a number that differs from rank to rank."""

    def __init__(self, value: int) -> None:
        self.value = torch.tensor([value])

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "nested": [{"more": self.value * 2}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["nested"][0]["more"] == 2 * state["value"]
        self.value = state["value"]


def _restored(_: Any, new: tuple[int, ...], sharded: bool, newest: int = 3) -> tuple[int | None, int]:
    """Keep the steps until `newest` (of rank 2 until 3), forget them in new processes, and restore."""
    rank = dist.get_rank()
    keeping._copies = keeping._Copies(is_on=True)
    for step in range(1, newest + 1 if rank != 2 else 4):
        keeping.keep(step, {"counter": Counter(10 * step + (rank if sharded else 0))}, sharded=sharded)
    if rank in new:
        keeping._copies = keeping._Copies(is_on=True)
    counter = Counter(0)
    step = keeping.restore({"counter": counter})
    if step is not None and sharded:  # every rank can be lost again
        assert keeping._copies.of_neighbour[step]["counter"]["value"] == 10 * step + (rank - 1) % RANKS
    return step, int(counter.value)


@pytest.mark.parametrize("new", [(), (0,), (1,), (2,)], ids=str)
def test_a_new_process_gets_its_shard_from_the_rank_after_it(new: tuple[int, ...]) -> None:
    assert in_group(_restored, RANKS, new, True) == [(3, 30), (3, 31), (3, 32)]


@pytest.mark.parametrize("new", [(0, 1), (0, 2), (0, 1, 2)], ids=str)
def test_nothing_is_restored_if_the_copy_of_a_shard_is_lost_too(new: tuple[int, ...]) -> None:
    assert in_group(_restored, RANKS, new, True) == [(None, 0)] * 3


@pytest.mark.parametrize("new", [(), (0,), (0, 1)], ids=str)
def test_one_process_that_is_left_has_all_of_a_state_in_full(new: tuple[int, ...]) -> None:
    assert in_group(_restored, RANKS, new, False) == [(3, 30)] * 3


def _ranks_of_restored(_: Any) -> list[list[int]]:
    """Restore tensors on two meshes of the same size, as of two kinds of parallelism, and return their ranks."""
    keeping._copies = keeping._Copies(is_on=True)
    tensors = {
        name: DTensor.from_local(torch.ones(2), DeviceMesh("cpu", ranks), [Shard(0)])
        for name, ranks in (("first", [0, 1]), ("second", [1, 0]))
    }
    restored: dict[str, Any] = {}
    state = SimpleNamespace(state_dict=lambda: tensors, load_state_dict=restored.update)
    keeping.keep(1, {"tensors": state})
    assert keeping.restore({"tensors": state}) == 1
    return [restored[name].device_mesh.mesh.tolist() for name in tensors]


def test_a_sharded_tensor_is_restored_on_its_mesh() -> None:
    assert in_group(_ranks_of_restored, 2) == [[[0, 1], [1, 0]]] * 2


def test_the_newest_step_that_all_have_is_restored() -> None:
    assert in_group(_restored, RANKS, (0,), False, 4) == [(3, 30)] * 3


def test_nothing_is_kept_while_no_rank_can_be_replaced() -> None:
    keeping._copies = keeping._Copies()
    keeping.keep(1, {"counter": Counter(1)})
    assert (keeping._copies.of_rank, keeping.restore({"counter": Counter(1)})) == ({}, None)
