"""Which network RCCL opened, by published logs; whether it is the profile's; and how the ranks are started."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.doctor import rccl_logs as logs
from tests.doctor.nodes import CLUSTER, Node
from tests.waiting import DEADLINE_S
from zslurm.config.spec import ClusterSection
from zslurm.doctor.check import Status
from zslurm.doctor.checks.transport import RANK_VARIABLE, group_of
from zslurm.doctor.transport import Opened, problems, read_log
from zslurm.doctor.transport_rank import NO_GPU, meet

LUMI = {"network": "slingshot", "gpu_type": None, "gpu_family": "mi250x", "nics": (), "rails_only": False}
IONIC = tuple(f"ionic_{index}" for index in range(8))


@pytest.mark.parametrize(
    ("log", "opened"),
    [
        (logs.GENERIC, Opened("IB", None, IONIC)),
        (logs.BUILT_IN, Opened("IB-CAST", None, IONIC, ainic=True, gpu_direct=True)),
        (logs.STAGED, Opened("IB-CAST", None, IONIC, ainic=True, gpu_direct=False)),
        (logs.PLUGIN, Opened("RCCL-ANP", "RCCL-ANP", IONIC)),
        (logs.INFINIBAND, Opened("IB", None, ("mlx5_0",))),
        (logs.NO_DEVICE, Opened("Socket", trouble=("NET/IB : No device found.",))),
        (logs.LIBFABRIC, Opened("AWS Libfabric", "Libfabric")),
        (logs.SLINGSHOT, Opened("AWS Libfabric", "AWS Libfabric", gpu_direct=True)),
        (logs.OLD_PLUGIN, Opened("AWS Libfabric", ofi_plugin="aws-ofi-rccl 1.4.0")),
        (logs.NEW_PLUGIN, Opened("Libfabric", ofi_plugin="aws-ofi-nccl 1.19.0", libfabric="2.1")),
        (
            logs.NO_PROVIDER,
            Opened(
                plugin="AWS Libfabric",
                trouble=("NET/OFI No eligible providers were found",),
                ofi_plugin="aws-ofi-nccl 1.21.1",
                libfabric="2.3",
            ),
        ),
        (logs.HPCX, Opened("IBext_v8", None, ("mlx5_0", "mlx5_1"))),
        ("a line of another program\n", Opened()),
        ("", Opened()),
    ],
)
def test_published_logs_are_read(log: str, opened: Opened) -> None:
    assert read_log(log) == opened


def test_the_lines_that_show_why_it_is_tcp_are_kept() -> None:
    opened = read_log(logs.SOCKET)
    assert opened.network == "Socket"
    assert [line[:40] for line in opened.trouble] == [
        "NET/Plugin: No plugin found (librccl-net",
        "NET/Plugin: Plugin load returned 2 : lib",
        "Failed to open libibverbs.so[.1]",
    ]


OLD, NEW = {"rocm_version": "6.4.1"}, {"rocm_version": "7.2.1"}
H100 = {"gpu_type": "h100", "network": "infiniband", "nics": ["mlx5_0"], "gpu_nics": [0] * 8, "rails_only": False}


@pytest.mark.parametrize(
    ("log", "profile", "words"),
    [
        # Pollara: each version has its transport.
        (logs.PLUGIN, OLD, ""),
        (logs.BUILT_IN, NEW, ""),
        (logs.BUILT_IN.replace("network IB-CAST", "network IB"), NEW, ""),
        (logs.GENERIC, OLD | {"ainic_transport": "generic"}, ""),
        (logs.GENERIC, {}, ""),
        (logs.PLUGIN, {}, ""),
        (logs.GENERIC, OLD, "fail RCCL opened IB, not AMD's plugin librccl-anp.so (RCCL-ANP)"),
        (logs.GENERIC, NEW, "fail RCCL opened IB, not RCCL's own transport for AMD's NICs (IB-CAST)"),
        (logs.PLUGIN, NEW, "fail RCCL opened RCCL-ANP, not RCCL's own transport for AMD's NICs (IB-CAST)"),
        (logs.BUILT_IN, OLD, "fail RCCL opened IB-CAST, not AMD's plugin librccl-anp.so (RCCL-ANP)"),
        # TCP is no profile's.
        (
            logs.SOCKET,
            OLD,
            "fail RCCL opened TCP sockets, not AMD's plugin librccl-anp.so (RCCL-ANP) (NET/Plugin: N",
        ),
        (logs.SOCKET, {}, "fail RCCL opened TCP sockets, not RDMA (NET/Plugin: No plugin found"),
        (logs.NO_DEVICE, H100, "fail RCCL opened TCP sockets, not RDMA (NET/IB : No device found.)"),
        # HPE Slingshot
        (logs.SLINGSHOT, LUMI, ""),
        (
            logs.SLINGSHOT.replace("/GDRDMA", ""),
            LUMI,
            "warn RCCL opened AWS Libfabric without GPUDirect: messages",
        ),
        (
            logs.SOCKET,
            LUMI,
            "fail RCCL opened TCP sockets, not AWS's plugin for libfabric (AWS Libfabric) (NET/Plugin",
        ),
        (
            logs.OLD_PLUGIN,
            LUMI,
            "warn the plugin is aws-ofi-rccl 1.4.0: with libfabric 1.22 and newer its runs hang",
        ),
        (
            logs.NO_PROVIDER,
            LUMI,
            "fail RCCL's log does not show which network it opened (NET/OFI No eligible providers were found)",
        ),
        # InfiniBand and RoCE elsewhere; a plugin is the site's choice.
        (logs.INFINIBAND, H100, ""),
        (logs.HPCX, H100, ""),
        (logs.LIBFABRIC, H100, ""),
        # What is less than it should be.
        (logs.STAGED, NEW, "warn RCCL opened IB-CAST without GPUDirect: messages go through host memory"),
        (logs.PLUGIN.replace(" [3]ionic_3:1/RoCE", ""), OLD, "fail RCCL uses 7 of 8 NICs, without ionic_3"),
        ("Segmentation fault\n", OLD, "fail RCCL's log does not show which network it opened"),
    ],
)
def test_the_network_that_opened_is_compared_with_the_profile(
    log: str, profile: dict[str, Any], words: str
) -> None:
    cluster = ClusterSection.model_validate(CLUSTER | profile)
    found = [f"{problem.status} {problem.reason}" for problem in problems(read_log(log), cluster, {})]
    assert len(found) == bool(words)
    assert all(line.startswith(words) for line in found), found


def test_a_network_that_was_asked_for_by_name_is_right_but_for_tcp() -> None:
    cluster = ClusterSection.model_validate(CLUSTER | NEW)
    assert problems(read_log(logs.GENERIC), cluster, {"NCCL_NET": "ib"}) == []
    assert problems(read_log(logs.BUILT_IN), cluster, {"NCCL_NET": "ROCM-IB"}) == []
    lumi = ClusterSection.model_validate(CLUSTER | LUMI)
    for name in ("AWS Libfabric", "Libfabric", "OFI"):
        assert problems(read_log(logs.NEW_PLUGIN), lumi, {"NCCL_NET": name}) == []
    (wrong,) = problems(read_log(logs.GENERIC), cluster, {"NCCL_NET": "IB-CAST"})
    assert wrong.reason == "RCCL opened IB, not NCCL_NET=IB-CAST"
    (tcp,) = problems(read_log(logs.SOCKET), cluster, {"NCCL_NET": "Socket"})
    assert tcp.status is Status.FAIL


# --- the check --------------------------------------------------------------------------------------------------


def rank(node: Node, script: str) -> dict[str, Any]:
    """Options of checks whose ranks are this shell script."""
    return {"environ": {RANK_VARIABLE: str(node.rank_program(script)), "PATH": os.environ["PATH"]}}


def test_a_node_that_is_alone_starts_two_ranks_with_rccls_log_on(node: Node) -> None:
    seen = node.root / "seen"
    line = "$2 of $3 on GPU $4: $NCCL_DEBUG $NCCL_DEBUG_SUBSYS $NCCL_IB_TIMEOUT"
    script = f'echo "{line}" >>{seen}\ncat <<"E"\n{logs.PLUGIN}E'
    outcome = node.check("transport", **OLD, **rank(node, script))
    assert (outcome.status, outcome.must_match) == (Status.PASS, {"RCCL's network": "RCCL-ANP"})
    assert outcome.reason == "RCCL opened RCCL-ANP: AMD's plugin librccl-anp.so (RCCL-ANP)"
    assert sorted(seen.read_text().splitlines()) == [
        "0 of 2 on GPU 0: INFO INIT,NET 21",
        "1 of 2 on GPU 1: INFO INIT,NET 21",
    ]


def test_a_rank_that_fails_after_its_network_opened_is_reported_with_both(node: Node) -> None:
    script = f'cat <<"E"\n{logs.SOCKET}E\necho "RuntimeError: NCCL error: unhandled system error" >&2; exit 1'
    outcome = node.check("transport", **OLD, **rank(node, script))
    assert outcome.status is Status.FAIL
    assert "RCCL opened TCP sockets, not AMD's plugin" in outcome.reason
    assert outcome.reason.endswith("RCCL failed: RuntimeError: NCCL error: unhandled system error")
    assert outcome.node_fault
    broken = node.check("transport", **rank(node, "echo 'ImportError: no torch' >&2; exit 1"))
    assert (broken.reason, broken.node_fault) == ("RCCL failed: ImportError: no torch", False)


def test_ranks_that_never_meet_are_given_up(node: Node) -> None:
    limits = {"doctor": {"check_s": 0.5}}
    outcome = node.check("transport", **limits, **rank(node, "exec sleep 600"))
    assert (outcome.status, outcome.node_fault) == (Status.FAIL, False)
    assert outcome.reason == "RCCL connected no ranks with the other rank within 1 s"


def test_a_node_whose_partner_is_dead_waits_no_longer_than_for_a_check(node: Node, tmp_path: Path) -> None:
    options = rank(node, "exec sleep 600")
    options["environ"] |= {"SLURM_STEP_NODELIST": "node[0-1]", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7"}
    outcome = node.check("transport", task={"probe": str(tmp_path)}, doctor={"check_s": 1}, **options)
    assert outcome.status is Status.UNAVAILABLE
    assert outcome.reason == "not checked: node1 did not come to test it with within 0.5 s"


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        ({"gpus_per_node": 0, "nics": []}, Status.PASS, "no GPUs: ranks talk by gloo over TCP, RCCL is not used"),
        ({"network": None}, Status.UNAVAILABLE, "not checked: the profile does not give cluster.network"),
        (
            {"container": {"image": "x.sif"}},
            Status.UNAVAILABLE,
            "not checked: ranks run in a container, with anoth",
        ),
    ],
)
def test_where_there_is_nothing_to_start_the_reason_is_given(
    node: Node, options: dict[str, Any], status: Status, words: str
) -> None:
    outcome = node.check("transport", **options, **rank(node, "exit 1"))
    assert outcome.status is status
    assert outcome.reason.startswith(words)


def test_without_a_gpu_that_torch_sees_nothing_is_claimed(node: Node) -> None:
    """The real program, on a machine without GPUs."""
    environ = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME")}
    hidden = {"CUDA_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": "", RANK_VARIABLE: ""}
    outcome = node.check("transport", environ=environ | hidden, gpus_per_node=1, nics=())
    assert outcome.status is Status.UNAVAILABLE
    assert outcome.reason == "not checked: torch sees no GPU here (see torch-import)"


def test_a_library_that_aborts_at_exit_does_not_change_the_code_of_a_rank(tmp_path: Path) -> None:
    program = (
        "import ctypes, runpy\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.__cxa_atexit(ctypes.cast(libc.abort, ctypes.c_void_p), None, None)\n"
        "runpy.run_module('zslurm.doctor.transport_rank', run_name='__main__')\n"
    )
    no_such_gpu = [str(tmp_path / "address"), "0", "1", "999", "5"]
    assert subprocess.run([sys.executable, "-c", program, *no_such_gpu], check=False).returncode == NO_GPU


@pytest.mark.parametrize(
    ("nodes", "node_name", "group"),
    [
        ("node[0-3]", "node0", ("node0", "node1")),
        ("node[0-3]", "node3", ("node2", "node3")),
        ("node[0-4]", "node1", ("node0", "node1")),
        ("node[0-4]", "node2", ("node2", "node3", "node4")),
        ("node[0-4]", "node4", ("node2", "node3", "node4")),
        ("node[0-2]", "node0", ("node0", "node1", "node2")),
        ("node[0-2]", "node2", ("node0", "node1", "node2")),
        ("node5", "node5", ("node5",)),
        ("node[0-1]", "elsewhere", ("elsewhere",)),
    ],
)
def test_nodes_form_pairs_and_none_is_alone(
    node: Node, nodes: str, node_name: str, group: tuple[str, ...]
) -> None:
    environ = {"SLURM_STEP_NODELIST": nodes, "SLURM_STEP_ID": "0", "SLURMD_NODENAME": node_name}
    assert group_of(node.sources(environ=environ)) == group


def test_ranks_meet_at_the_address_that_rank_0_publishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)

    def join(rank: int) -> Any:
        store = meet(tmp_path / "address", rank, 3, DEADLINE_S)
        store.set(f"value-{rank}", str(rank))
        return store

    with ThreadPoolExecutor(3) as pool:
        stores = list(pool.map(join, (2, 1, 0)))
    assert [int(stores[0].get(f"value-{rank}")) for rank in range(3)] == [0, 1, 2]


def test_a_rank_0_that_never_comes_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="no address of rank 0"):
        meet(tmp_path / "address", 1, 2, 0.2)
