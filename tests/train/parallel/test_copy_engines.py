"""The weights are a symmetric window only where copy engines could use it, and what keeps them from it is said."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from zslurm.train.parallel import copy_engines
from zslurm.train.parallel.copy_engines import weights_memory, why_not
from zslurm.train.parallel.levels import Levels
from zslurm.train.parallel.topology import Topology
from zslurm.train.parallel.world import World

ASKED = {"NCCL_CTA_POLICY": "2"}
LEVELS = Levels(Topology(2, 8), node="node", rail="rail")  # type: ignore[arg-type]  # groups that are not called


def world(size: int = 8, device: str = "cuda:0", **changes: Any) -> World:
    return World(0, size, 8, torch.device(device), group="all", store=None, **changes)  # type: ignore[arg-type]


def test_nothing_changes_unless_the_policy_is_zero_and_there_is_a_gpu() -> None:
    assert why_not(world(), None, 8, {}) == ""
    assert why_not(world(), None, 8, {"NCCL_CTA_POLICY": "1"}) == ""
    assert why_not(world(device="cpu"), None, 8, ASKED) == ""
    assert weights_memory(world(device="cpu"), None, 8, ASKED) is nullcontext


def test_the_group_must_be_inside_a_node() -> None:
    assert why_not(world(), None, 8, ASKED) is None
    assert why_not(world(16), LEVELS, 8, ASKED) is None
    assert "flat over several nodes" in str(why_not(world(16), None, 8, ASKED))


def test_it_is_left_out_with_recovery_in_memory_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    recovering = world(making_groups=lambda: nullcontext())
    assert weights_memory(recovering, None, 8, ASKED) is nullcontext
    assert [record.message for record in caplog.records] == [
        "NCCL_CTA_POLICY=2: the weights are no symmetric window: "
        "recovery in memory aborts the groups, and a window of an aborted group was not tried"
    ]


@pytest.mark.parametrize(("levels", "group"), [(None, "all"), (LEVELS, "node")])
def test_the_window_is_of_the_group_that_gathers_inside_the_node(
    levels: Levels | None, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = []

    @contextmanager
    def window(of: object, device: torch.device) -> Any:
        windows.append((of, device))
        yield

    monkeypatch.setattr(copy_engines, "_window", window)
    with weights_memory(world(8 if levels is None else 16), levels, 8, ASKED)():
        pass
    assert windows == [(group, torch.device("cuda:0"))]


def test_what_was_allocated_is_registered_with_the_backend_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls and their order, as torch's ProcessGroupNCCL has them: allocate from its memory, then register."""
    calls: list[object] = []

    class Backend:
        mem_allocator = "ncclMemAlloc"

        def register_mem_pool(self, pool: object, *, symm: bool) -> None:
            calls.append(("register", pool, symm))

    class Group:
        def _get_backend(self, device: torch.device) -> Backend:
            return Backend()

        def size(self) -> int:
            return 8

    @contextmanager
    def use(pool: object, device: torch.device) -> Any:
        calls.append(("use", pool))
        yield

    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: f"pool of {allocator}")
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use)
    monkeypatch.setattr(copy_engines, "_POOLS", [])
    of_eight = world()
    of_eight.group = Group()  # type: ignore[assignment]
    with weights_memory(of_eight, None, 8, ASKED)():
        calls.append("allocate")
    assert calls == [("use", "pool of ncclMemAlloc"), "allocate", ("register", "pool of ncclMemAlloc", True)]
