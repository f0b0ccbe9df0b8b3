"""What people set by hand and regret: each slip is found, with what to do, and what is right is left alone."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from zslurm.cluster.rccl.conf_files import read_conf
from zslurm.cluster.rccl.environment import variables_of
from zslurm.cluster.rccl.lint import lint, overridden
from zslurm.cluster.site import resolve_profile
from zslurm.config.layers import Override
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


ON_SLINGSHOT = {"network": "slingshot", "nics": (), "rails_only": False, "gpu_type": "mi250x", "gpu_family": None}
PROTOCOLS = {"NCCL_PROTO": "^LL128"}
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
        {"NCCL_MAX_P2P_CHANNELS": "32"},
        {},
        "warning NCCL_MAX_P2P_CHANNELS=32: nothing reads this name; meant is NCCL_MAX_P2P_NCHANNELS (AMD-AGI/Pri",
    ),
    (
        {"NCCL_GDR_FLUSH_GPU_MEM_NO_RELAXED_ORDERING": "0"},
        {"network": "broadcom"},
        "warning NCCL_GDR_FLUSH_GPU_MEM_NO_RELAXED_ORDERING=0: nothing reads this name; meant is RCCL_GDR_FLUSH",
    ),
    (
        {"NCCL_MAX_P2P_PEERS": "8"},
        {},
        "warning NCCL_MAX_P2P_PEERS=8: nothing reads this name; meant is NCCL_P2P_M",
    ),
    (
        {"RCCL_ENABLE_CONTEXT_TRACKING": "1"},
        {"rocm_version": "7.11"},
        "warning RCCL_ENABLE_CONTEXT_TRACKING=1: has no effect since RCCL 2.28.3: NCCL_LAUNCH_ORDER_IMPLICIT took",
    ),
    ({"RCCL_ENABLE_CONTEXT_TRACKING": "1"}, {"rocm_version": "7.2.1"}, ""),
    (
        {"RCCL_KERNEL_COLL_TRACE_ENABLE": "1"},
        {"rccl_version": "2.30.4"},
        "warning RCCL_KERNEL_COLL_TRACE_ENABLE=1: has no effect since RCCL 2.30.4: RCCL no longer traces",
    ),
    ({"RCCL_KERNEL_COLL_TRACE_THREAD_ENABLE": "1"}, {"rccl_version": "2.28.3"}, ""),
    (
        {"RCCL_ROCR_PATH": "/x"},
        {"rocm_version": "10.0"},
        "warning RCCL_ROCR_PATH=/x: has no effect since RCCL 2.30",
    ),
    ({"RCCL_ROCR_PATH": "/x"}, {"gpu_type": "h100", "network": "infiniband", "rccl_version": "2.30.4"}, ""),
    ({"NCCL_TIMEOUT": "3600"}, {}, "warning NCCL_TIMEOUT=3600: nothing reads this name; meant is parallel.timeo"),
    # timeouts
    (
        {"NCCL_IB_TIMEOUT": "30"},
        {"network": "cx7"},
        "fault NCCL_IB_TIMEOUT=30: 4.096 us * 2^30 * 7 retries is 8h 33m on a peer t",
    ),
    (
        {"NCCL_IB_TIMEOUT": "29"},
        {},
        "fault NCCL_IB_TIMEOUT=29: 4.096 us * 2^29 * 7 retries is 4h 16m on a peer that",
    ),
    ({"NCCL_IB_TIMEOUT": "0"}, {}, "fault NCCL_IB_TIMEOUT=0: waits forever on a peer that is gone"),
    ({"NCCL_IB_TIMEOUT": "32"}, {}, "fault NCCL_IB_TIMEOUT=32: waits forever on a peer that is gone"),
    ({"NCCL_IB_TIMEOUT": "long"}, {}, "fault NCCL_IB_TIMEOUT=long: not a number from 1 to 31"),
    ({"NCCL_IB_RETRY_CNT": "12"}, {}, "fault NCCL_IB_RETRY_CNT=12: not a number from 0 to 7 (it has 3 bits)"),
    (
        {"NCCL_IB_TIMEOUT": "18"},
        {},
        "warning NCCL_IB_TIMEOUT=18: 4.096 us * 2^18 * 7 retries is 7s: a link that flaps for longer ends the",
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
    (
        {"RCCL_DISABLE_RAIL_TREES": "1"},
        {},
        "fault RCCL_DISABLE_RAIL_TREES=1: there is no path from one rail to another: without rail trees RCCL",
    ),
    (
        {"RCCL_DISABLE_RAIL_TREES": "1"},
        {"rccl_version": "2.28.3"},
        "fault RCCL_DISABLE_RAIL_TREES=1: there is no ",
    ),
    ({"RCCL_DISABLE_RAIL_TREES": "1"}, {"rccl_version": "2.21.5"}, ""),
    ({"RCCL_DISABLE_RAIL_TREES": "1"}, {"rails_only": False}, ""),
    ({"RCCL_DISABLE_RAIL_TREES": "0"}, {}, ""),
    # GID
    ({"NCCL_IB_GID_INDEX": "0"}, {}, "warning NCCL_IB_GID_INDEX=0: RoCE v2 usually has GID index 1 on pollara; "),
    (
        {"NCCL_IB_GID_INDEX": "1"},
        {"gid_index": 3},
        "fault NCCL_IB_GID_INDEX=1: by the profile RoCE v2 has GID index 3 (cluster.gid_index)",
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
    # transport and GPUDirect
    (
        {"NCCL_NET_PLUGIN": "none"},
        {"rocm_version": "6.4.1"},
        "warning NCCL_NET_PLUGIN=none: RCCL before ROCm 7.2.1 has no built-in transport for Pollara, and",
    ),
    ({"NCCL_NET_PLUGIN": "none"}, {"rocm_version": "6.4.1", "ainic_transport": "generic"}, ""),
    ({"NCCL_NET_PLUGIN": "none", "RCCL_AINIC_ROCE": "1"}, {"rocm_version": "7.2.1"}, ""),
    ({"NCCL_NET_PLUGIN": "librccl-anp.so"}, {"rocm_version": "7.2.1"}, ""),
    ({"NCCL_NET_PLUGIN": "librccl-anp.so"}, {}, ""),
    (
        {"RCCL_AINIC_ROCE": "1"},
        {"rocm_version": "7.2.0"},
        "note RCCL_AINIC_ROCE=1: RCCL before ROCm 7.2.1 does not",
    ),
    (
        {"NCCL_DMABUF_ENABLE": "0"},
        {"peermem": False},
        "fault NCCL_DMABUF_ENABLE=0: without dma-buf there is no GPUDirect: the nodes have no peermem, and",
    ),
    (
        {},
        {"peermem": False},
        "fault NCCL_DMABUF_ENABLE: is off in RCCL before ROCm 7.12: the nodes have no peermem, ",
    ),
    ({}, {"peermem": False, "rocm_version": "7.11"}, "fault NCCL_DMABUF_ENABLE: is off in RCCL before ROCm 7.12"),
    ({}, {"peermem": False, "rocm_version": "7.12"}, ""),
    ({"NCCL_DMABUF_ENABLE": "0"}, {"peermem": True}, ""),
    ({"NCCL_DMABUF_ENABLE": "1"}, {"peermem": False}, ""),
    # HPE Slingshot
    (
        {"FI_MR_CACHE_MONITOR": "memhooks"} | PROTOCOLS,
        ON_SLINGSHOT,
        "fault FI_MR_CACHE_MONITOR=memhooks: with memhooks,",
    ),
    (
        {"FI_MR_CACHE_MONITR": "userfaultfd"} | PROTOCOLS,
        ON_SLINGSHOT,
        "warning FI_MR_CACHE_MONITR=userfaultfd: nothing",
    ),
    (
        {"NCCL_PROTO": "LL,LL128"},
        ON_SLINGSHOT,
        "fault NCCL_PROTO=LL,LL128: LL128 with GPUDirect has delivered wrong",
    ),
    ({}, ON_SLINGSHOT, "fault NCCL_PROTO: LL128 with GPUDirect has delivered wrong numbers"),
    ({"NCCL_PROTO": "Simple"}, ON_SLINGSHOT, ""),
    ({"NCCL_PROTO": "LL128", "NCCL_NET_GDR_LEVEL": "LOC"}, ON_SLINGSHOT, ""),
    (
        {"NCCL_CROSS_NIC": "0"} | PROTOCOLS,
        ON_SLINGSHOT,
        "warning NCCL_CROSS_NIC=0: 0 is for rails that nothing joins;",
    ),
    (
        {"NCCL_NET": "IB"} | PROTOCOLS,
        ON_SLINGSHOT,
        "fault NCCL_NET=IB: the network is used through the plugin only",
    ),
    (
        {"FI_CXI_RDZV_PROTO": "alt_read", "FI_CXI_RDZV_GET_MIN": "49152"} | PROTOCOLS,
        ON_SLINGSHOT,
        "warning FI_CXI_RDZV_GET_MIN=49152: alt_read needs 0",
    ),
    ({"FI_MR_CACHE_MONITOR": "memhooks"}, {}, ""),
    # what sets variables behind the lint's back
    (
        {"NCCL_ENV_PLUGIN": "corp"},
        {},
        "warning NCCL_ENV_PLUGIN=corp: the plugin corp gives variables other values ",
    ),
    ({"NCCL_ENV_PLUGIN": "none"}, {}, ""),
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
def test_each_slip_is_found(given: dict[str, str], fields: dict[str, Any], message: str) -> None:
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


@pytest.mark.parametrize(
    "name",
    [
        "local",
        "h100-ib",
        "mi300x-cx7",
        "mi300x-broadcom",
        "mi300x-pollara",
        "lumi-g",
        "frontier",
        "setonix",
        "mi300a-slingshot",
    ],
)
@pytest.mark.parametrize("rocm", ["6.2", "7.2.0", "7.2.1", "7.11", "7.14", "10.1"])
@pytest.mark.parametrize("peermem", ["true", "false", "null"])
def test_our_own_rules_pass(name: str, rocm: str, peermem: str) -> None:
    overrides = [Override.of("cluster.rocm_version", rocm), Override.parse(f"cluster.peermem={peermem}")]
    cluster = resolve_profile(name, overrides).spec.cluster
    assert lint(variables_of(cluster), cluster) == []


def test_what_the_login_shell_sets_and_the_job_replaces_is_found() -> None:
    exported = {"NCCL_DEBUG": "INFO", "NCCL_IB_TIMEOUT": "21", "NCCL_ALGO": "Ring", "PATH": "/bin"}
    (found,) = overridden(exported, {"NCCL_DEBUG": "WARN", "NCCL_IB_TIMEOUT": "21", "PATH": "/usr/bin"})
    assert found.line == "NCCL_DEBUG=INFO: the job sets WARN; to keep yours, put it into cluster.env"


# What AMD's published scripts for its AI NICs set, with the values that they have (ROCm/cvs ainic_env_script.sh,
# two versions; AMD-AGI/Primus 03_enable_ainic.sh, two versions).
AMD_SCRIPTS: dict[str, dict[str, str]] = {
    "cvs": {
        "NCCL_DEBUG": "ERROR", "NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_GID_INDEX": "1", "NCCL_IB_TIMEOUT": "30",
        "NCCL_IB_SL": "0", "NCCL_IB_TC": "0", "NCCL_IB_FIFO_TC": "0", "NCCL_IB_SPLIT_DATA_ON_QPS": "0",
        "NCCL_PXN_DISABLE": "0",
        "IB_RX_QUEUE_LEN": "8192", "HCOLL_ENABLE_MCAST_ALL": "0", "NCCL_CUMEM_ENABLE": "0",
        "IONIC_LOCKFREE": "all", "HSA_NO_SCRATCH_RECLAIM": "1", "NCCL_GDR_FLUSH_DISABLE": "1",
        "NCCL_IGNORE_CPU_AFFINITY": "1", "NCCL_NET_OPTIONAL_RECV_COMPLETION": "1", "NCCL_IB_USE_INLINE": "1",
        "NCCL_DMABUF_ENABLE": "0", "NCCL_GDR_FLUSH_GPU_MEM_NO_RELAXED_ORDERING": "0",
        "NCCL_NET_PLUGIN": "librccl-anp.so",
    },
    "cvs, shorter": {
        "IONIC_LOCKFREE": "all", "NCCL_IB_TC": "0", "NCCL_IB_FIFO_TC": "0", "HSA_NO_SCRATCH_RECLAIM": "1",
        "NCCL_GDR_FLUSH_DISABLE": "1", "NCCL_IGNORE_CPU_AFFINITY": "1", "NCCL_NET_OPTIONAL_RECV_COMPLETION": "1",
        "NCCL_IB_USE_INLINE": "1", "NCCL_DMABUF_ENABLE": "0", "NCCL_NET_PLUGIN": "librccl-anp.so",
        "NCCL_GDR_FLUSH_GPU_MEM_NO_RELAXED_ORDERING": "0",
    },
    "primus, plugin": {
        "NCCL_NET_PLUGIN": "librccl-anp.so", "NCCL_IB_GID_INDEX": "1", "NCCL_MAX_P2P_CHANNELS": "56",
        "NCCL_IB_TC": "41",
        "NCCL_IB_FIFO_TC": "185", "NET_OPTIONAL_RECV_COMPLETION": "1", "NCCL_IB_USE_INLINE": "1",
        "RCCL_GDR_FLUSH_GPU_MEM_NO_RELAXED_ORDERING": "0", "NCCL_GDR_FLUSH_DISABLE": "1",
        "NCCL_DMABUF_ENABLE": "0", "NCCL_IGNORE_CPU_AFFINITY": "1", "NCCL_IB_QPS_PER_CONNECTION": "1",
    },
    "primus, built in": {
        "RCCL_AINIC_ROCE": "1", "NCCL_NET_PLUGIN": "none", "NCCL_IB_GID_INDEX": "1", "NCCL_MAX_P2P_CHANNELS": "56",
        "NCCL_IB_ROCE_VERSION_NUM": "2", "NCCL_IB_TC": "104", "NCCL_IB_FIFO_TC": "192", "NCCL_IB_SL": "0",
        "NET_OPTIONAL_RECV_COMPLETION": "1", "NCCL_IB_USE_INLINE": "1", "NCCL_GDR_FLUSH_DISABLE": "1",
        "RCCL_GDR_FLUSH_GPU_MEM_NO_RELAXED_ORDERING": "0", "NCCL_DMABUF_ENABLE": "0",
        "NCCL_IGNORE_CPU_AFFINITY": "1", "NCCL_IB_QPS_PER_CONNECTION": "1",
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("script", "rocm"),
    # The built-in transport is published for ROCm 7.2.1 and newer.
    [case for case in product(AMD_SCRIPTS, (None, "6.4.1", "7.2.1")) if case != ("primus, built in", "6.4.1")],
)
def test_what_amd_publishes_is_not_warned_of(script: str, rocm: str | None) -> None:
    cluster = resolve_profile(
        "mi300x-pollara", [Override.of("cluster.rocm_version", rocm)] if rocm else []
    ).spec.cluster
    alone = lint(AMD_SCRIPTS[script], cluster)
    over_ours = lint(variables_of(cluster) | AMD_SCRIPTS[script], cluster)
    assert [entry.line for entry in (*alone, *over_ours) if entry.level != "note"] == []


@pytest.mark.parametrize(("gpu", "library"), [("mi300x", "rccl"), ("h100", "nccl")])
def test_files_that_the_library_reads_are_checked_where_the_environment_sets_nothing(
    gpu: str, library: str, tmp_path: Path
) -> None:
    cluster = ClusterSection.model_validate(POLLARA | {"gpu_type": gpu})
    home, etc = tmp_path / "home", tmp_path / "etc"
    home.mkdir(), etc.mkdir()
    (home / f".{library}.conf").write_text("# mine\nNCCL_PXN_DISABLE=1\nNCCL_DEBUG=INFO\nMINE=1\n")
    (etc / f"{library}.conf").write_text("NCCL_PXN_DISABLE=0\nNCCL_ALGO=Ring\nNCCL_IB_TIMOUT=22\r\n")
    given = {"HOME": str(home), "NCCL_DEBUG": "WARN"}
    conf = read_conf(given, cluster, tmp_path)
    assert [entry.line for entry in lint(given, cluster, conf)] == [
        "NCCL_PXN_DISABLE=1: there is no path from one rail to another: without PXN an all-to-all cannot reach "
        f"the GPUs of other rails; set 0 (set in {home}/.{library}.conf:2, which the library reads by itself)",
        "NCCL_IB_TIMOUT=22: nothing is known to read this name; did you mean NCCL_IB_TIMEOUT? (set in "
        f"/etc/{library}.conf:3, which the library reads by itself)",
        f"NCCL_ALGO=Ring: set in /etc/{library}.conf:2, which the library reads by itself; "
        "cluster.env would show it",
    ]
    assert lint(given | {"NCCL_PXN_DISABLE": "0"}, cluster, conf)[0].name != "NCCL_PXN_DISABLE"


def test_nccl_conf_file_takes_the_place_of_the_file_at_home(tmp_path: Path) -> None:
    cluster = ClusterSection.model_validate(POLLARA)
    (tmp_path / ".rccl.conf").write_text("NCCL_CROSS_NIC=1\n")
    (tmp_path / "own.conf").write_text("NCCL_NET=Socket\n")
    given = {"HOME": str(tmp_path), "NCCL_CONF_FILE": str(tmp_path / "own.conf")}
    (only,) = lint(given, cluster, read_conf(given, cluster, tmp_path))
    assert (only.level, only.name, only.value) == ("fault", "NCCL_NET", "Socket")
    given["NCCL_CONF_FILE"] = str(tmp_path / "gone.conf")
    (only,) = lint(given, cluster, read_conf(given, cluster, tmp_path))
    assert only.line.endswith("gone.conf: this file cannot be read here; is it there on the compute nodes?")
