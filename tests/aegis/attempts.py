"""Attempts as the policy sees them, with names for what tests vary."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zslurm.aegis.fault_kinds import FaultKind
from zslurm.aegis.types import AttemptSummary, Fault, History, Incident, Resources, Role, Scope
from zslurm.config.aegis import AegisSection
from zslurm.run.exclusions import Exclusion

NOW = 1_800_000_000.0
NODES = ("node0", "node1", "node2", "node3")
SETTINGS = AegisSection()

HARDWARE = ("gpu_ras_uncorrectable", "host_memory_error", "gpu_bad_pages", "gpu_init_fail", "gpu_test_failed",
            "node_dead", "slurm_node_fail", "orphans", "gpu_hang_reset", "xgmi_error",
            "numbers_wrong")  # fmt: skip
NETWORK = ("nic_link_down", "nic_fault", "pcie_error", "memory_changed", "transfer_wrong")
UNEXPLAINED = ("rank_killed", "rank_exit", "crash_segv", "rank_hang", "gpu_memory_fault")
BLAMELESS = ("user_error", "early_exit", "user_import", "config_error", "slurm_launch_config", "gpu_oom",
             "host_oom", "memlock", "process_limit", "net_config", "port_collision", "storage_full",
             "storage_fault", "checkpoint_corrupt", "nan_loss", "rccl_timeout", "hang_heartbeat",
             "slurm_cancelled", "slurm_control_plane")  # fmt: skip
STOPPING = ("user_import", "config_error", "slurm_launch_config", "gpu_oom")
_SCOPES: dict[str, Scope] = {"node_dead": "node", "orphans": "node", "slurm_node_fail": "node", "host_oom": "node"}


def fault(
    kind: str, node: str | None = "node1", *, ago: float = 5.0, role: Role = "root", source: str = "kernel_log",
    **more: Any,
) -> Fault:  # fmt: skip
    """A fault `ago` seconds before NOW."""
    scope: Scope = _SCOPES.get(kind) or ("gpu" if kind.startswith("gpu") else "unknown")
    return Fault(FaultKind(kind), role, scope, NOW - ago, source, f"words of {kind}", node, **more)


def attempt_state(*faults: Fault, outcome: Any = "failed", step: int = 40, **more: Any) -> AttemptSummary:
    return AttemptSummary(NOW, 9, outcome, faults, committed_step=step, **{"nodes": NODES[:3]} | more)


def resources(
    alive: Iterable[str] = NODES[:3], *, in_use: Iterable[str] = NODES[:3], needed: int = 3, **more: Any
) -> Resources:
    """Three nodes in use and no spare, in a job that outlives its nodes, on a partition of many."""
    defaults = {"outlives_nodes": True, "elsewhere": 16}
    return Resources(tuple(alive), tuple(in_use), needed, **defaults | more)


def incident(
    root: Fault | None,
    *,
    step: int = 40,
    action: Any = "restart",
    ago: float = 600.0,
    excluded: tuple[str, ...] = (),
) -> Incident:
    return Incident(NOW - ago, 1, action, root, step, excluded)


def excluded(*nodes: str, ago: float = 60.0, lasts: float = 7 * 86400.0) -> dict[str, Exclusion]:
    """Return exclusions of some nodes, as a history has them."""
    return {node: Exclusion((node,), "bad", NOW - ago, NOW - ago + lasts) for node in nodes}


def history(*incidents: Incident, **more: Any) -> History:
    return History(incidents, **more)


def settings(**changed: Any) -> AegisSection:
    return AegisSection.model_validate(changed)
