"""The decision of the policy for each fault of the fault matrix."""

from __future__ import annotations

from typing import Any

import pytest

from tests.aegis.attempts import (
    fault,
    history,
    incident,
)
from tests.aegis.core.policy.decisions import WITH_SPARE, decided, raised
from zslurm.aegis.types import Fault


def row(
    name: str, faults: list[Fault], action: str, *exclude: str, there: dict[str, Any] | None = None,
    says: dict[str, Any] | None = None, **more: Any,
) -> Any:  # fmt: skip
    """A fault of the matrix, and what must be done about it; a spare is there unless `there` says otherwise."""
    return pytest.param(faults, there or WITH_SPARE, says or {}, more, action, exclude, id=name)


@pytest.mark.parametrize(
    ("faults", "there", "says", "more", "action", "exclude"),
    [
        row("1 one rank killed", [fault("rank_killed", rank=5, source="srun")], "restart"),
        row("2 one rank exits 1 once", [fault("rank_exit", rank=5, source="srun")], "restart"),
        row("3 rank stopped", [fault("rank_hang", rank=5, ago=0)], "restart"),
        row(
            "4 node dies",
            [
                fault("peer_lost", "node0", role="cascade"),
                fault("rank_killed", "node0", ago=4),
                fault("node_dead", ago=1),
            ],
            "swap", "node1", there={"alive": ("node0", "node2", "node3")},
        ),
        row(
            "5 two nodes die together", [fault("node_dead"), fault("node_dead", "node2")],
            "shrink", "node1", "node2", there={"alive": ("node0",)}, says={"min_nodes": 1},
        ),
        row(
            "6 node dies during a checkpoint write",
            [fault("storage_fault", "node0"), fault("node_dead", step=40)],
            "requeue", "node1", there={"alive": ("node0", "node2")},
        ),
        row(
            "7 uncorrectable ECC, line and counter",
            [fault("gpu_ras_uncorrectable", gpu="0"), fault("gpu_ras_uncorrectable", source="gpu", ago=1)],
            "swap", "node1",
        ),
        row("8 NIC link down", [fault("nic_link_down", ago=61)], "swap", "node1"),
        row(
            "9 NIC glitch of 20 s that a rank did not survive",
            [
                fault("nic_link_down", ago=25),
                fault("nic_link_down", ago=5, cleared=True),
                fault("rank_exit", ago=4, source="srun"),
            ],
            "restart",
        ),
        row("10 host OOM kill", [fault("rank_killed", rank=5), fault("host_oom", ago=2)], "restart"),
        row("11 GPU out of memory", [fault("gpu_oom")], "stop"),
        row("11 GPU out of memory, retried", [fault("gpu_oom")], "restart", says={"gpu_oom": "retry"}),
        row("12 NaN loss burst", [fault("nan_loss", None)], "restart"),
        row("13 newest checkpoint damaged", [fault("checkpoint_corrupt")], "restart"),
        row("14 disk full while saving", [fault("storage_full")], "restart"),
        row("15 time limit", [], "requeue", asked_to_stop="SIGUSR2", outcome="interrupted"),
        row("16 requeued from outside", [], "finish", asked_to_stop="SIGTERM", requeued=True),
        row(
            "17 slurmctld down while a rank is killed",
            [fault("slurm_control_plane", role="advisory"), fault("rank_killed", source="srun")],
            "restart",
        ),
        row("18 the batch host dies: the attempt is lost", [], "restart", outcome="lost"),
        row("19 deterministic bug at step 50", [fault("user_error", step=50, source="rank")], "restart"),
        row("20 bug at import", [fault("user_import", source="rank")], "stop"),
        row(
            "21 all spares used up, then one more node lost", [fault("node_dead")],
            "requeue", "node1", there={"alive": ("node0", "node2")},
        ),
        row(
            "22 agent killed, and later a rank",
            [fault("agent_lost", role="advisory", ago=99), fault("rank_killed", "node2")],
            "restart",
        ),
        row("23 supervisor killed: its successor finds a killed rank", [fault("rank_killed")], "restart"),
        row(
            "24 excluded node on a full partition", [fault("gpu_ras_uncorrectable")],
            "requeue", "node1", there={"elsewhere": 3}, says={"min_nodes": 2}, asked_to_stop="SIGUSR2",
        ),
        row(
            "25 NaN from one rank, and its GPU fails the test",
            [fault("nan_loss", rank=5), fault("gpu_test_failed", ago=0)],
            "swap", "node1",
        ),
        row("a GPU computes other numbers than two others", [fault("numbers_wrong", rank=5)], "swap", "node1"),
        row("masters of a rank change in memory", [fault("memory_changed", rank=5)], "restart"),
        row("a rank receives other numbers than were sent", [fault("transfer_wrong", rank=5)], "restart"),
    ],
)  # fmt: skip
def test_fault_matrix(
    faults: list[Fault], there: dict[str, Any], says: dict[str, Any], more: dict[str, Any], action: str,
    exclude: tuple[str, ...],
) -> None:  # fmt: skip
    decision = decided(*faults, there=there, says=says, **more)
    assert (decision.action, decision.exclude) == (action, exclude), decision.reason
    assert decision.reason
    assert "\n" not in decision.reason


@pytest.mark.parametrize("kind", ["memory_changed", "transfer_wrong"])
def test_wrong_numbers_of_the_same_node_exclude_it_the_second_time(kind: str) -> None:
    first = fault(kind, rank=5, step=40, source="rank")
    again = fault(kind, rank=5, step=90, source="rank")
    decision = decided(again, past=history(incident(first)))
    assert decision.exclude == ("node1",), decision.reason


def test_fault_matrix_9_a_glitch_of_20_s_restarts_nothing() -> None:
    down, up = fault("nic_link_down", ago=70.0), fault("nic_link_down", ago=50.0, cleared=True)
    assert not raised(fault("nic_link_down", ago=20.0)).give_up
    assert not raised(down, up).give_up


def test_fault_matrix_19_a_deterministic_bug_stops_after_the_second_time() -> None:
    bug = fault("user_error", rank=0, step=50, source="rank")
    assert decided(bug).action == "restart"
    decision = decided(bug, past=history(incident(bug)))
    assert decision.action == "stop"
    assert "the same error as in attempt" in decision.reason


def test_fault_matrix_22_a_lost_agent_restarts_nothing() -> None:
    assert not raised(fault("agent_lost", role="advisory", ago=900.0)).give_up


def test_fault_matrix_23_a_new_supervisor_decides_the_same() -> None:
    """It has the same events, and so the same faults and history, in whatever order it found them."""
    faults = [
        fault("rank_killed", ago=9.0, rank=5),
        fault("host_oom", ago=2.0),
        fault("peer_lost", role="cascade"),
    ]
    assert decided(*faults) == decided(*reversed(faults))


def test_fault_matrix_25_nan_from_one_rank_is_tested_before_it_is_excluded() -> None:
    nan = fault("nan_loss", rank=5, source="rank")
    decision = decided(nan, past=history(incident(nan)))
    assert (decision.action, decision.test_gpu, decision.exclude) == ("restart", ("node1", "5"), ())
