"""What people set by hand and regret: each slip is told with what to do, and what is right is left alone."""

from __future__ import annotations

from typing import Any

import pytest

from zslurm.cluster.rccl import environment, lint, overridden
from zslurm.cluster.resolved import resolve_profile
from zslurm.config.spec import ClusterSection

EIGHT = tuple(f"ionic_{i}" for i in range(8))
POLLARA: dict[str, Any] = {
    "gpus_per_node": 8,
    "gpu_type": "mi300x",
    "network": "pollara",
    "rails_only": True,
    "nics": EIGHT,
}


def found(given: dict[str, str], **fields: Any) -> list[str]:
    """`level NAME=value: message` of every finding."""
    cluster = ClusterSection.model_validate(POLLARA | fields)
    return [f"{finding.level} {finding.line}" for finding in lint(given, cluster)]


CASES: list[tuple[dict[str, str], dict[str, Any], str]] = [
    # names
    (
        {"RCCL_MSCCL_ENABLE": "0"},
        {"rccl_version": "2.28.3"},
        "warning RCCL_MSCCL_ENABLE=0: has no effect since RCCL 2.28.3: MSCCL and MSCCL++ are no longer in RCCL",
    ),
    ({"NCCL_TREE_THRESHOLD": "0"}, {}, "warning NCCL_TREE_THRESHOLD=0: has no effect since NCCL and RCCL 2.5.0"),
    ({"NCCL_IB_TIMOUT": "22"}, {}, "warning NCCL_IB_TIMOUT=22: nothing is known to read this name; did you mean"),
    ({"NCLL_DEBUG": "INFO"}, {}, "warning NCLL_DEBUG=INFO: nothing is known to read this name; did you mean NCC"),
    ({"RCCL_IB_TIMEOUT": "21"}, {}, "warning RCCL_IB_TIMEOUT=21: nothing is known to read this name; did you me"),
    (
        {"NCCL_MAX_P2P_CHANNELS": "56"},
        {},
        "warning NCCL_MAX_P2P_CHANNELS=56: nothing reads this name; meant is NCCL_MAX_P2P_NCHANNELS (AMD-AGI/Pri",
    ),
    (
        {"NCCL_GDR_FLUSH_GPU_MEM_NO_RELAXED_ORDERING": "0"},
        {},
        "warning NCCL_GDR_FLUSH_GPU_MEM_NO_RELAXED_ORDERING=0: nothing reads this name; meant is RCCL_GDR_FLUSH",
    ),
    ({"NCCL_TIMEOUT": "3600"}, {}, "warning NCCL_TIMEOUT=3600: nothing reads this name; meant is parallel.timeo"),
    # timeouts
    ({"NCCL_IB_TIMEOUT": "30"}, {}, "fault NCCL_IB_TIMEOUT=30: 4.096 us * 2^30 * 7 retries is 8.6 h on a peer t"),
    ({"NCCL_IB_TIMEOUT": "0"}, {}, "fault NCCL_IB_TIMEOUT=0: waits for ever on a peer that is gone"),
    ({"NCCL_IB_TIMEOUT": "32"}, {}, "fault NCCL_IB_TIMEOUT=32: waits for ever on a peer that is gone"),
    ({"NCCL_IB_TIMEOUT": "long"}, {}, "fault NCCL_IB_TIMEOUT=long: not a number from 1 to 31"),
    ({"NCCL_IB_RETRY_CNT": "12"}, {}, "fault NCCL_IB_RETRY_CNT=12: not a number from 0 to 7 (it has 3 bits)"),
    (
        {"NCCL_IB_TIMEOUT": "18"},
        {},
        "warning NCCL_IB_TIMEOUT=18: 4.096 us * 2^18 * 7 retries is 7.5 s: a link that flaps for longer ends the",
    ),
    (
        {"NCCL_IB_TIMEOUT": "22", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "60"},
        {},
        "fault TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=60: PyTorch ends the process before the network gives up",
    ),
    # rails
    ({"NCCL_PXN_DISABLE": "1"}, {}, "fault NCCL_PXN_DISABLE=1: there is no path from one rail to another: witho"),
    ({"NCCL_P2P_PXN_LEVEL": "0"}, {}, "fault NCCL_P2P_PXN_LEVEL=0: there is no path from one rail to another"),
    ({"NCCL_P2P_DISABLE": "1"}, {}, "fault NCCL_P2P_DISABLE=1: there is no path from one rail to another, and P"),
    ({"NCCL_CROSS_NIC": "1"}, {}, "fault NCCL_CROSS_NIC=1: there is no path from one rail to another; set 0"),
    # GID
    ({"NCCL_IB_GID_INDEX": "0"}, {}, "warning NCCL_IB_GID_INDEX=0: RoCE v2 usually has GID index 1 on pollara; "),
    (
        {"NCCL_IB_GID_INDEX": "1"},
        {"gid_index": 3},
        "fault NCCL_IB_GID_INDEX=1: the profile says that RoCE v2 has GID index 3 (cluster.gid_index)",
    ),
    # devices
    (
        {"NCCL_IB_HCA": "ionic_1"},
        {"nics": ("ionic_1", "ionic_10", *EIGHT[2:])},
        "fault NCCL_IB_HCA=ionic_1: ionic_1 also takes ionic_10; write =ionic_1 for exactly these",
    ),
    ({"NCCL_IB_HCA": "^mlx5_0,ionic_9"}, {}, ""),
    (
        {"NCCL_IB_HCA": ",".join(EIGHT)},
        {},
        "warning NCCL_IB_HCA=ionic_0,ionic_1,ionic_2,ionic_3,ionic_4,ionic_5,ionic_6,ionic_7: ionic_0 also takes",
    ),
    ({"NCCL_IB_HCA": "=mlx5_0"}, {}, "fault NCCL_IB_HCA==mlx5_0: mlx5_0: not among the profile's NICs (ionic_0, "),
    ({"NCCL_IB_HCA": "=" + ",".join(EIGHT[:7])}, {}, "warning NCCL_IB_HCA==ionic_0,ionic_1,ionic_2,ionic_3,ioni"),
    # off the fast network
    ({"NCCL_IB_DISABLE": "1"}, {}, "fault NCCL_IB_DISABLE=1: everything between nodes goes over TCP sockets"),
    ({"NCCL_NET": "Socket"}, {}, "fault NCCL_NET=Socket: everything between nodes goes over TCP sockets"),
    ({"NCCL_SOCKET_IFNAME": "10.1.2.3"}, {}, "fault NCCL_SOCKET_IFNAME=10.1.2.3: is an address; name an interfa"),
    # traces and signals
    (
        {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0"},
        {},
        "warning TORCH_NCCL_DUMP_ON_TIMEOUT=1: there is nothing to dump: TORCH_NCCL_TRACE_BUFFER_SIZE is 0",
    ),
    ({"NCCL_NET_PLUGIN": "librccl-anp.so"}, {}, "warning NCCL_NET_PLUGIN=librccl-anp.so: AMD's ANP plugin ends "),
    ({"RCCL_ENABLE_SIGNALHANDLER": "1"}, {}, "warning RCCL_ENABLE_SIGNALHANDLER=1: RCCL takes SIGUSR2 for itself"),
    # right as they are, or none of ours
    ({"NCCL_IB_HCA": "=" + ",".join(EIGHT)}, {}, ""),
    ({"NCCL_IB_HCA": "=" + ",".join(f"{nic}:1" for nic in EIGHT)}, {}, ""),
    ({"NCCL_IB_HCA": "ionic"}, {}, ""),
    ({"NCCL_IB_GID_INDEX": "-1"}, {}, ""),
    ({"NCCL_IB_TIMEOUT": "22", "NCCL_IB_RETRY_CNT": "7"}, {}, ""),
    ({"RCCL_MSCCL_ENABLE": "0"}, {"rccl_version": "2.27.7"}, ""),
    ({"RCCL_MSCCL_ENABLE": "0"}, {}, ""),
    ({"NCCL_PXN_DISABLE": "1", "NCCL_CROSS_NIC": "1"}, {"rails_only": False}, ""),
    ({"NCCL_IB_GID_INDEX": "0"}, {"network": "infiniband"}, ""),
    ({"NCCL_SOCKET_IFNAME": "=eno1", "NCCL_NET_PLUGIN": "none"}, {}, ""),
    ({"NCCL_SOMETHING_OF_NEXT_YEAR": "1", "PATH": "/bin", "NCCL": "x", "TORCH_HOME": "/t"}, {}, ""),
]


@pytest.mark.parametrize(("given", "fields", "message"), CASES, ids=[",".join(case[0]) for case in CASES])
def test_each_slip_is_told(given: dict[str, str], fields: dict[str, Any], message: str) -> None:
    lines = found(given, **fields)
    if message:
        (line,) = lines
        assert line.startswith(message)
        assert line.isprintable()
    else:
        assert lines == []


def test_faults_come_first() -> None:
    lines = found({"NCCL_IB_TIMOUT": "1", "NCCL_PXN_DISABLE": "1", "NCCL_CROSS_NIC": "2", "NCCL_AGLO": "Ring"})
    assert [line.split()[0] for line in lines] == ["fault", "fault", "warning", "warning"]


@pytest.mark.parametrize("name", ["local", "h100-ib", "mi300x-cx7", "mi300x-broadcom", "mi300x-pollara"])
@pytest.mark.parametrize("rccl", ["2.20.5", "2.27.7", "2.28.3"])
def test_our_own_rules_pass(name: str, rccl: str) -> None:
    cluster = resolve_profile(name, [f"cluster.rccl_version={rccl}"]).spec.cluster
    assert lint({setting.name: setting.value for setting in environment(cluster)}, cluster) == []


def test_what_the_login_shell_sets_and_the_job_replaces_is_told() -> None:
    exported = {"NCCL_DEBUG": "INFO", "NCCL_IB_TIMEOUT": "21", "NCCL_ALGO": "Ring", "PATH": "/bin"}
    (told,) = overridden(exported, {"NCCL_DEBUG": "WARN", "NCCL_IB_TIMEOUT": "21", "PATH": "/usr/bin"})
    assert told.line == "NCCL_DEBUG=INFO: the job sets WARN; to keep yours, put it into cluster.env"
