"""What a result states about the machine: nodes of different kinds have no common figures."""

from __future__ import annotations

from zslurm.bench.run.machine import MachineFacts, kinds_that_differ, machine_of
from zslurm.bench.run.messages import Task

TASK = Task(benchmark="hbm", options={}, cluster="lab", nodes=["n0", "n1", "n2"], ranks_per_node=2)


def facts(gpu: str | None, memory: int = 100) -> MachineFacts:
    return MachineFacts(device="cuda" if gpu else "cpu", gpu=gpu, gpus=8, memory=memory, cpu="EPYC", cores=96)


def test_nodes_of_one_kind_are_one_machine_with_the_least_memory() -> None:
    ranks = [facts("MI300X", 100 - rank) for rank in range(6)]
    assert kinds_that_differ(TASK, ranks) is None
    assert (machine_of(TASK, ranks).gpu, machine_of(TASK, ranks).gpu_memory) == ("MI300X", 95)
    assert kinds_that_differ(TASK, [facts(None)] * 6) is None


def test_nodes_of_different_kinds_are_named_with_their_gpus() -> None:
    ranks = [facts(gpu) for gpu in ("MI300X", "MI300X", "MI250X", "MI250X", "MI300X", "MI300X")]
    assert kinds_that_differ(TASK, ranks) == (
        "the nodes are of different kinds (MI300X on n[0,2], MI250X on n1); "
        "measure each kind by itself with --nodelist"
    )
    assert "no GPU on n2" in str(kinds_that_differ(TASK, [facts("MI300X")] * 4 + [facts(None)] * 2))
