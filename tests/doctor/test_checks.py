"""Each check passes on a healthy node, and shows what is wrong on one that is not."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkout import DOCS
from tests.doctor import rccl_logs, samples, timed_look_ups
from tests.doctor.nodes import Node
from tests.fake_sysfs import PEERMEM
from tests.own_network import WHY_NOT, can_run_alone, run_alone
from zslurm.core.errors import ConfigError
from zslurm.doctor.check import Status, all_checks, chosen_checks
from zslurm.doctor.checks import network
from zslurm.doctor.node import run_checks

UID = os.getuid()
NFS_RUNS = {"task": {"directory": "/shared/runs"}}


def write(path: str, text: str) -> Callable[[Node], object]:
    return lambda node: node.fake.write(path, text)


def remove(path: str) -> Callable[[Node], object]:
    return lambda node: (node.root / path).unlink()


def orphan(**environ: str) -> Callable[[Node], None]:
    return lambda node: node.process(4242, "python3", uid=UID, **environ)


SLINGSHOT = {"network": "slingshot", "gpu_type": None, "gpu_family": "mi250x", "nics": (), "rails_only": False}


def cassini(rdzv_get_en: str | None) -> Callable[[Node], None]:
    """Give the node two NICs of Slingshot, whose driver shows this property, or none."""

    def add(node: Node) -> None:
        for index in range(2):
            node.fake.cassini(index, (f"pci0000:e{index}", f"0000:e{index}:00.0"), 0)
            if rdzv_get_en is not None:
                node.fake.write(f"sys/class/cxi/cxi{index}/device/properties/rdzv_get_en", rdzv_get_en)

    return add


def hang(program: str) -> Callable[[Node], None]:
    return lambda node: node.program(program, "exec sleep 600")


def zombies(node: Node) -> None:
    for pid in range(5000, 5030):
        node.process(pid, "loader", uid=UID, state="Z (zombie)")


def hold_memory(node: Node) -> None:
    node.fake.write("sys/class/kfd/kfd/proc/4242/vram_10000", "1024")
    node.fake.write("sys/class/kfd/kfd/proc/4243/vram_10000", "0")  # opened the driver, holds nothing


def no_tree(*places: str) -> Callable[[Node], None]:
    def take_away(node: Node) -> None:
        for place in places:
            (node.root / place).rename(node.root / f"{place}.gone")

    return take_away


def put_pages(kind: str) -> Callable[[Node], None]:
    def put(node: Node) -> None:
        pages = json.loads(samples.bad_pages(8))
        pages[2][kind] = [samples.BAD_PAGE] * 3
        node.smi(**{"bad-pages": json.dumps(pages)})

    return put


def hide_ecc(node: Node) -> None:
    rows = [samples.metric_row(gpu) for gpu in range(8)]
    for row in rows:
        row["ecc"], row["ecc_blocks"] = dict.fromkeys(row["ecc"], "N/A"), "N/A"
    node.smi(metric=samples.metric(rows))


def no_peermem(symbols: str | None) -> Callable[[Node], None]:
    """Takes AMD's client away; `symbols` are those of the kernel."""

    def take_away(node: Node) -> None:
        (node.root / PEERMEM).unlink()
        if symbols is not None:
            node.fake.write("proc/kallsyms", symbols)

    return take_away


def tools(*, dcb: bool, enabled: str = "") -> Callable[[Node], None]:
    """Let the tools of other NICs answer instead of AMD's: dcb, or mlnx_qos with this row of priorities."""

    def put(node: Node) -> None:
        node.program("nicctl", "exit 1")
        qos = re.sub("enabled .*", f"enabled     {enabled}", samples.MLNX_QOS)
        if dcb:
            answers = f'pfc) echo "{samples.DCB_PFC}";; app) echo "{samples.DCB_APP}";;'
            node.program("dcb", f'case "$2" in {answers} esac')
        else:
            node.program("mlnx_qos", f"printf '%s' {shlex.quote(qos)}")

    return put


def leave_in_shm(node: Node) -> None:
    (node.root / "dev/shm/torch_1234").write_bytes(b"x" * (4 << 20))


# Check, how the node is broken, options of the check, the status, and words of the reason.
FAULTS: list[tuple[str, Callable[[Node], object], dict[str, Any], Status, str]] = [
    ("gpu-count", lambda node: None, {"gpus_per_node": 9, "nics": ()}, Status.FAIL, "8 of 9 GPUs are there"),
    ("gpu-count", lambda node: node.smi(metric=samples.metric([samples.metric_row(0)])), {}, Status.FAIL,
     "amd-smi shows 1 of 8 GPUs"),
    ("gpu-count", no_tree("sys", "opt"), {}, Status.UNAVAILABLE, "neither sysfs nor a tool"),
    ("gpu-driver", hang("amd-smi"), {"doctor": {"canary_s": 0.2}}, Status.FAIL,
     "`amd-smi version` did not answer within 0.2 s: the driver is wedged"),
    ("gpu-driver", remove("opt/rocm/bin/amd-smi"), {}, Status.UNAVAILABLE, "neither on PATH nor in /opt/rocm/bin"),
    ("gpu-driver", lambda node: node.program("amd-smi", f"echo '{samples.MISSING_GROUPS}'"), {},
     Status.UNAVAILABLE,      "missing the following required groups"),
    ("gpu-ecc", lambda node: node.rows(gpu2={"uncorrectable": 1}), {}, Status.FAIL,
     "GPU 2: 1 uncorrectable error (UMC)"),
    ("gpu-ecc", lambda node: node.rows(gpu3={"correctable": 10_001}), {}, Status.FAIL, "10001 correctable errors"),
    ("gpu-ecc", lambda node: node.rows(gpu3={"deferred": 2}), {}, Status.WARN, "GPU 3: 2 deferred errors"),
    ("gpu-ecc", hide_ecc, {}, Status.UNAVAILABLE, "GPUs 0, 1, 2, 3, 4, 5, 6, 7 show none"),
    ("gpu-pages", put_pages("pending"), {}, Status.FAIL, "GPU 2: bad pages: 3 pending"),
    ("gpu-pages", put_pages("un_res"), {}, Status.FAIL, "GPU 2: bad pages: 3 unreservable"),
    ("gpu-pages", put_pages("retired"), {}, Status.WARN, "GPU 2: 3 retired pages"),
    ("gpu-pages", lambda node: node.smi(**{"bad-pages": ""}), {}, Status.UNAVAILABLE, "0 of 8 GPUs show"),
    ("small-product", lambda node: node.products(2e-5, 2e-5, 0.2, 2e-5), {}, Status.FAIL,
     "GPU 2 2e+02 ms for a small product, the others 0.02 ms"),
    ("small-product", lambda node: node.products(0.6, 0.6), {}, Status.FAIL, "takes 600 ms"),
    ("small-product", lambda node: node.products(), {}, Status.UNAVAILABLE, "torch sees no GPU"),
    ("small-product", lambda node: node.program("torch-python", "echo no torch >&2; exit 1"), {},
     Status.UNAVAILABLE, "torch cannot multiply here: no torch"),
    ("gpu-idle", hold_memory, {}, Status.FAIL, "1 process holds GPU memory: 4242"),
    ("gpu-idle", lambda node: node.smi(process=samples.PROCESS_FLAT), {}, Status.FAIL, "4242 python"),
    ("gpu-idle", lambda node: node.rows(gpu5={"used_mb": 2048}), {}, Status.FAIL,
     "no process holds it: GPU 5: 2.00 GiB"),
    ("nics", lambda node: node.fake.take_nic_down("ionic_3"), {}, Status.FAIL,
     "rail 3: ionic_3 is DOWN (Disabled)"),
    ("nics", lambda node: node.fake.remove_nic("ionic_3"), {}, Status.FAIL, "ionic_3 is missing (7 RDMA devices"),
    ("nics", write("sys/class/infiniband/ionic_3/ports/1/rate", "200 Gb/sec (4X HDR)"), {}, Status.WARN,
     "runs at 200 Gb/s, others at 400"),
    ("nics", no_tree("sys"), {}, Status.UNAVAILABLE, "cannot be read"),
    ("rails", lambda node: None, {"gpu_nics": (1, 0, 2, 3, 4, 5, 6, 7)}, Status.WARN, "ionic_0 is closer on PCIe"),
    ("gid-index", lambda node: None, {"gid_index": 0}, Status.FAIL, "index 0 is IB/RoCE v1"),
    ("lossless", lambda node: None, {"traffic_class": 96}, Status.WARN,
     "the lossless class is 104, and NCCL_IB_TC is 96"),
    ("lossless", lambda node: None, {"traffic_class": None}, Status.WARN, "and NCCL_IB_TC is not set"),
    ("lossless", lambda node: node.program("nicctl", "exit 1"), {}, Status.UNAVAILABLE,
     "neither nicctl nor dcb nor mlnx_qos shows a user the class"),
    ("lossless", tools(dcb=True), {}, Status.WARN, "the lossless class is 136, and NCCL_IB_TC is 104"),
    ("lossless", tools(dcb=False, enabled="0 0 0 0 0 0 0 0"), {}, Status.WARN, "every class may be dropped"),
    ("compiler-caches", lambda node: None, {"env": {"TRITON_CACHE_DIR": "/shared/ada/triton"}}, Status.WARN,
     "TRITON_CACHE_DIR: /shared/ada/triton is on nfs4"),
    ("slingshot", lambda node: None, SLINGSHOT, Status.FAIL, "no NIC of Slingshot is there"),
    ("slingshot", cassini("1"), SLINGSHOT, Status.WARN, "cxi0, cxi1: rdzv_get_en is on, and alt_read is not used"),
    ("slingshot", cassini(None), SLINGSHOT, Status.WARN, "cxi0, cxi1: the driver shows no rdzv_get_en"),
    ("transport", lambda node: node.rccl_log(rccl_logs.SOCKET), {}, Status.FAIL,
     "RCCL opened TCP sockets, not RDMA"),
    ("peermem", no_peermem("0000000000000000 T ib_register_device"), {}, Status.FAIL,
     "no peermem, and NCCL_DMABUF_ENABLE is not set: messages go through host memory"),
    ("peermem", no_peermem("0000000000000000 T ib_register_device"),
     {"peermem": True}, Status.FAIL, "no peermem, and NCCL_DMABUF_ENABLE is 0: messages go through host memory"),
    ("peermem", no_peermem(None), {}, Status.UNAVAILABLE, "neither memory_peers in sysfs nor /proc/kallsyms"),
    ("peermem", lambda node: None, {"peermem": False}, Status.WARN, "peermem is there, cluster.peermem is false"),
    ("rccl-conf", write("etc/rccl.conf", "NCCL_NET=Socket"), {}, Status.FAIL,
     "NCCL_NET=Socket: everything between nodes goes over TCP sockets (set in /etc/rccl.conf:1"),
    ("rccl-conf", write("etc/rccl.conf", "NCCL_BUFFSIZE=8388608"), {}, Status.WARN,
     "NCCL_BUFFSIZE=8388608: set in /etc/rccl.conf:1"),
    ("rdma-abi", lambda node: node.libraries([], samples.IBV_ABI_WARNING), {}, Status.FAIL,
     "the library's ionic has ABI 1 to 1, the kernel's 4"),
    ("rdma-abi", lambda node: node.libraries([f"ionic_{i}" for i in range(7)]), {}, Status.FAIL,
     "lists 7 of 8 RDMA devices: not ionic_7"),
    ("rdma-abi", remove("opt/rocm/bin/ibv_devices"), {"env": {}}, Status.UNAVAILABLE, "the kernel has ionic 4"),
    ("memlock", lambda node: node.limits(memlock="8388608"), {}, Status.FAIL,
     "memlock is 8.00 MiB, 32 GiB needed"),
    ("memlock", lambda node: node.limits(memlock=str(16 << 30)), {}, Status.FAIL, "memlock is 16.0 GiB"),
    ("memlock", remove("proc/self/limits"), {}, Status.UNAVAILABLE, "cannot be read"),
    ("ulimits", lambda node: node.limits(files="1024"), {}, Status.FAIL, "1024 open files, 65536 wanted"),
    ("ulimits", lambda node: node.limits(processes="8192"), {}, Status.WARN, "8192 processes, 16384 wanted"),
    ("ulimits", remove("proc/self/limits"), {}, Status.UNAVAILABLE, "cannot be read"),
    ("shm", leave_in_shm, {}, Status.WARN, "1 file of yours that no process uses, 4.00 MiB: torch_1234"),
    ("shm", lambda node: None, {"doctor": {"shm_gib": 1e9}}, Status.FAIL, "1e+09 GiB needed"),
    ("shm", no_tree("dev/shm"), {}, Status.UNAVAILABLE, "/dev/shm: No such file"),
    ("kernel", write("proc/sys/kernel/numa_balancing", "1"), {}, Status.WARN, "numa_balancing is 1"),
    ("kernel", write("proc/cmdline", "root=/dev/sda1"), {}, Status.WARN, "iommu=pt is not"),
    ("kernel", remove("proc/cmdline"), {}, Status.UNAVAILABLE, "command line cannot be read"),
    ("versions", lambda node: None, {"rccl_version": "2.21.5"}, Status.WARN,
     "RCCL is 2.22.3, the profile has 2.21.5"),
    ("versions", no_tree("opt", "sys"), {}, Status.UNAVAILABLE, "no version of ROCm"),
    ("orphaned-processes", orphan(SLURM_JOB_ID="77", SLURMD_NODENAME="node0"), {}, Status.FAIL,
     "1 process of ended jobs (77): 4242 python3"),
    ("orphaned-processes", zombies, {}, Status.WARN, "30 zombies of yours, children of 1"),
    ("orphaned-processes", lambda node: None, {"task": {"jobs": None}}, Status.UNAVAILABLE, "Slurm did not show"),
    ("names", lambda node: None, {"task": {"peers": ("node0", "no-such-node.invalid")}}, Status.FAIL,
     "1 of 2 names do not resolve: no-such-node.invalid"),
    ("names", write("etc/hosts", "127.0.1.1 node0\n10.0.2.11 node1"), {"task": {"peers": ("node0", "node1")}},
     Status.WARN, "its own name resolves to 127.0.1.1"),
    ("disk", lambda node: None, {"doctor": {"tmp_gib": 1e9}}, Status.WARN, "1e+09 GiB wanted"),
    ("disk", no_tree("tmp"), {}, Status.UNAVAILABLE, "/tmp: No such file"),
    ("storage-route", write("etc/hosts", "10.100.0.9 nas"), NFS_RUNS, Status.FAIL,
     "is reached over net-ionic_3, which is rail 3 (ionic_3)"),
    ("storage-route", write("etc/hosts", "10.1.0.9 nas"), NFS_RUNS | {"storage_interface": "storage0"},
     Status.WARN, "is reached over eth0, not storage0"),
    ("storage-route", write("proc/net/route", "Iface\tDestination"), NFS_RUNS, Status.UNAVAILABLE,
     "no route to nas is known"),
    ("storage-route", remove("proc/self/mounts"), NFS_RUNS, Status.UNAVAILABLE, "cannot be read"),
    ("page-cache", remove("proc/meminfo"), {}, Status.UNAVAILABLE, "proc/meminfo cannot be read"),
]  # fmt: skip

PEERS = {"task": {"peers": ("node0", "node1")}}


@pytest.mark.parametrize(
    "check",
    [
        check.name
        for check in all_checks()
        if check.runs_on("node")
        and not check.on_request
        and check.name not in ("shared-files", "reverse-names", "slingshot")
    ],
)
def test_a_healthy_node_passes(node: Node, check: str) -> None:
    outcome = node.check(check, **(PEERS if check == "names" else {}))
    assert (outcome.status, outcome.remedy) == (Status.PASS, ""), outcome.reason


@pytest.mark.parametrize(
    ("check", "fault", "options", "status", "words"), FAULTS, ids=[f"{row[0]}: {row[4][:40]}" for row in FAULTS]
)
def test_a_fault_is_reported_with_its_numbers(
    node: Node, check: str, fault: Callable[[Node], object], options: dict[str, Any], status: Status, words: str
) -> None:
    fault(node)
    outcome = node.check(check, **options)
    assert words in outcome.reason
    assert outcome.status is status
    assert "\n" not in outcome.reason
    assert outcome.remedy or status is Status.UNAVAILABLE


@pytest.mark.parametrize(
    ("there", "profile", "status", "words"),
    [
        (False, {"network": None, "nics": []}, Status.PASS, "memlock is 8.00 MiB; there is no RDMA device"),
        (False, {"nics": []}, Status.FAIL, "memlock is 8.00 MiB, 32 GiB needed"),  # the profile has a network
        (True, {"network": None, "nics": []}, Status.FAIL, "memlock is 8.00 MiB, 32 GiB needed"),
    ],
)
def test_memlock_counts_only_where_rdma_needs_it(
    node: Node, there: bool, profile: dict[str, Any], status: Status, words: str
) -> None:
    node.limits(memlock="8388608")
    if not there:
        no_tree("sys/class/infiniband")(node)
    outcome = node.check("memlock", **profile, rails_only=False)
    assert (outcome.status, outcome.reason[: len(words)]) == (status, words)


@pytest.mark.parametrize(
    ("task", "cluster", "status", "words"),
    [
        ({}, {}, Status.PASS, "8 ranks on each node"),
        ({"ranks_per_node": 1}, {}, Status.PASS, "1 rank on each node"),
        (
            {"ranks_per_node": 4},
            {},
            Status.WARN,
            "4 ranks on each node: xGMI gives a group of n MI300X (n - 1) x 64",
        ),
        (
            {},
            {"gpus_per_node": 2, "nics": ["a", "b"]},
            Status.WARN,
            "64 GB/s for 2 against 448 GB/s for all 8, 7.0 t",
        ),
    ],
)
def test_a_profile_that_uses_some_of_the_xgmi_links_is_warned_about(
    node: Node, task: dict[str, Any], cluster: dict[str, Any], status: Status, words: str
) -> None:
    outcome = node.check("xgmi", task=task, **cluster)
    assert outcome.status is status
    assert words in outcome.reason


def test_the_class_of_mlnx_qos_is_read(node: Node) -> None:
    tools(dcb=False, enabled="0 0 0 1 0 0 0 0")(node)
    assert node.check("lossless").reason == "NCCL_IB_TC=104 is lossless"


def test_a_lock_that_no_process_holds_is_named(node: Node, tmp_path: Path) -> None:
    lock = tmp_path / "caches" / "aiter" / "lock_module_moe"
    lock.parent.mkdir(parents=True)
    lock.touch()
    options = {"env": {"AITER_JIT_DIR": str(lock.parent)}}
    assert node.check("compiler-caches", **options).status is Status.PASS, "it may be new"
    os.utime(lock, (0, 0))
    assert f"1 lock that no process here holds: {lock}" in node.check("compiler-caches", **options).reason
    (node.root / "proc/4242/fd").mkdir(parents=True)
    (node.root / "proc/4242/fd/3").symlink_to(lock)
    assert node.check("compiler-caches", **options).status is Status.PASS


def test_rules_that_the_profile_leaves_out_are_warned_about(node: Node) -> None:
    outcome = node.check("environment", nics=())
    assert outcome.status is Status.WARN
    interface = "GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME are not set: the profile does not give cluster.interface"
    for line in (interface, "NCCL_IB_HCA is not set: the profile does not give cluster.nics"):
        assert line in outcome.reason
    complete = {"interface": "eth0", "rocm_version": "6.4.1", "peermem": True}
    assert node.check("environment", **complete).status is Status.PASS


@pytest.mark.parametrize(
    ("rdzv_get_en", "env", "reason"),
    [
        ("0", {}, "2 NICs are there, with rdzv_get_en off"),
        ("1", {"FI_CXI_RDZV_PROTO": "default"}, "2 NICs are there"),
    ],
)
def test_slingshot_is_well_with_the_protocol_that_its_driver_allows(
    node: Node, rdzv_get_en: str, env: dict[str, str], reason: str
) -> None:
    cassini(rdzv_get_en)(node)
    outcome = node.check("slingshot", **SLINGSHOT, env=env)
    assert (outcome.status, outcome.reason) == (Status.PASS, reason)


def test_without_peermem_dma_buf_does(node: Node) -> None:
    no_peermem("0000000000000000 T ib_register_device")(node)
    for options in (
        {"peermem": False},
        {"rocm_version": "7.12"},
        {"environ": {"NCCL_DMABUF_ENABLE": "1"}},
    ):
        outcome = node.check("peermem", **options)
        assert (outcome.status, outcome.reason) == (Status.PASS, "no peermem; RCCL takes dma-buf"), options


def test_a_file_that_sets_what_the_job_sets_anyway_changes_nothing(node: Node) -> None:
    node.fake.write("etc/rccl.conf", "NCCL_DEBUG=TRACE\nHF_TOKEN=secret")
    outcome = node.check("rccl-conf")
    assert (outcome.status, outcome.reason) == (Status.PASS, "no file sets variables of RCCL")


def test_every_check_of_a_node_has_a_fault_above() -> None:
    elsewhere = {"clock", "python", "shared-files", "slurm", "environment", "speed", "torch-import", "xgmi"}
    elsewhere |= {"reverse-names"}
    assert {check.name for check in all_checks()} == {row[0] for row in FAULTS} | elsewhere


def test_processes_of_this_job_and_of_active_jobs_are_not_orphans(node: Node) -> None:
    orphan(SLURM_JOB_ID="77", SLURMD_NODENAME="node0")(node)
    assert node.check("orphaned-processes", task={"jobs": ("77",)}).status is Status.PASS
    assert node.check("orphaned-processes", environ={"SLURM_JOB_ID": "77"}).status is Status.PASS
    orphan(SLURM_JOB_ID="78", SLURM_ARRAY_JOB_ID="77", SLURMD_NODENAME="node0")(node)
    assert node.check("orphaned-processes", task={"jobs": ("77_3",)}).status is Status.PASS


def test_processes_of_other_nodes_and_other_users_are_not_orphans(node: Node) -> None:
    orphan(SLURM_JOB_ID="77", SLURMD_NODENAME="node1")(node)
    node.process(4343, "python3", uid=UID + 1, SLURM_JOB_ID="77", SLURMD_NODENAME="node0")
    assert node.check("orphaned-processes").status is Status.PASS


def test_a_job_of_another_cluster_with_the_same_number_is_left_alone(node: Node) -> None:
    orphan(SLURM_JOB_ID="77", SLURMD_NODENAME="node0", SLURM_CLUSTER_NAME="other")(node)
    assert node.check("orphaned-processes", environ={"SLURM_CLUSTER_NAME": "mi"}).status is Status.PASS
    assert node.check("orphaned-processes", environ={"SLURM_CLUSTER_NAME": "other"}).status is Status.FAIL


def test_ones_own_processes_may_hold_the_gpus(node: Node) -> None:
    hold_memory(node)
    node.process(4242, "python3", uid=UID, SLURM_JOB_ID="9")
    assert node.check("gpu-idle", environ={"SLURM_JOB_ID": "9"}).status is Status.PASS
    assert node.check("gpu-idle", environ={"SLURM_JOB_ID": "8"}).status is Status.FAIL


def test_a_file_in_shm_that_a_process_uses_is_not_stale(node: Node) -> None:
    leave_in_shm(node)
    (node.root / "proc/self/fd").mkdir()
    (node.root / "proc/4242/fd").mkdir(parents=True)
    (node.root / "proc/4242/fd/3").symlink_to(node.root / "dev/shm/torch_1234")
    assert node.check("shm").status is Status.PASS


def test_checks_of_gpus_and_networks_do_not_apply_to_nodes_without(node: Node) -> None:
    no_tree("sys", "opt")(node)
    sources = node.sources(gpus_per_node=0, gpu_type=None, network=None, nics=(), rails_only=False)
    found = run_checks([check for check in all_checks() if not check.on_request], sources)
    assert {name for name, outcome in found.items() if outcome is None} >= {
        "gpu-count", "gpu-driver", "gpu-ecc", "gpu-pages", "gpu-idle", "nics", "rails", "gid-index", "rdma-abi",
    }  # fmt: skip


def test_what_the_login_node_wrote_must_be_visible(node: Node) -> None:
    directory = node.root / "shared"
    probe = directory / "probe"
    probe.mkdir(parents=True)
    task = {"directory": str(directory), "probe": str(probe), "token": "word"}
    assert "not visible" in node.check("shared-files", task=task).reason
    (probe / "from-login").write_text("word")
    outcome = node.check("shared-files", task=task)
    assert outcome.status is Status.PASS
    assert [path.name for path in sorted(probe.iterdir())] == ["from-login", "node0.small"]
    slow = node.check("shared-files", task=task, doctor={"write_mib_s": 1e9, "fsync_s": 1e-9})
    assert (slow.status, slow.remedy != "") == (Status.WARN, True)
    (probe / "from-login").write_text("another")
    assert node.check("shared-files", task=task).status is Status.FAIL


def test_a_check_that_hangs_has_failed_and_one_that_breaks_is_unavailable(node: Node) -> None:
    node.program("ibv_devices", "exec sleep 600")
    hung = node.check("rdma-abi", doctor={"check_s": 0.3, "canary_s": 600})
    assert (hung.status, hung.reason) == (Status.FAIL, "the check did not end within 0.3 s")
    broken = node.check("names", task={"peers": (None,)})
    assert broken.status is Status.UNAVAILABLE
    assert "the check itself failed" in broken.reason


@pytest.mark.parametrize(
    ("seconds", "status", "words"),
    [
        ({}, Status.PASS, "2 addresses are looked up at once"),
        ({"10.0.2.11": [3.0, 0.001]}, Status.PASS, "2 addresses are looked up at once"),  # a packet was lost
        ({"10.0.2.12": [2.0, 1.5]}, Status.WARN, "looking up the name of 10.0.2.12 takes 1.5 s"),
        ({"10.0.2.12": [2.0, 1.5]}, Status.WARN, "one after the other: 48s for 32 ranks"),
        ({"10.0.2.11": [3.0, 3.0]}, Status.WARN, "more than 1m 36s for 32 ranks"),
    ],
)
def test_the_look_up_of_addresses_is_timed(
    node: Node, monkeypatch: pytest.MonkeyPatch, seconds: dict[str, list[float]], status: Status, words: str
) -> None:
    hosts = "10.0.2.10 node0\n10.0.2.11 node1\n10.0.2.12 node2\n127.0.1.1 node3"
    node.fake.write("etc/hosts", hosts)
    node.fake.write("etc/resolv.conf", "nameserver 10.0.0.53")
    asked: list[str] = []

    def look_up(address: str, limit_s: float) -> float:
        asked.append(address)
        return min(limit_s, next(iter(seconds.get(address, [])[asked.count(address) - 1 :]), 0.001))

    monkeypatch.setattr(network, "reverse_lookup_s", look_up)
    peers = ("node0", "node1", "node2", "node3")
    outcome = node.check("reverse-names", task={"peers": peers, "ranks_per_node": 8})
    assert words in outcome.reason
    assert outcome.status is status
    assert ("RES_OPTIONS" in outcome.remedy) == (status is Status.WARN)
    assert set(asked) <= {"10.0.2.11", "10.0.2.12"}, "not its own address, nor a loopback one"


def test_addresses_are_looked_up_where_there_is_dns_alone(node: Node) -> None:
    assert network.reverse_names.run(node.sources(task={"peers": ("node0", "node1")})) is None
    assert network.reverse_names.run(node.sources(task={"peers": ("node0",)})) is None


@pytest.mark.skipif(not can_run_alone(), reason=WHY_NOT)
def test_dns_that_does_not_answer_is_reported_and_one_that_has_no_name_is_not(tmp_path: Path) -> None:
    found = run_alone(timed_look_ups.__name__, str(tmp_path))
    assert found["queries"] > 0, "an address of the form that torch's store has is asked for"
    assert found["answered"]["status"] == "pass"
    assert found["silent"]["status"] == "warn"
    assert "looking up the name of 10.0.2.11 takes more than" in found["silent"]["reason"]


def test_checks_are_chosen_by_name() -> None:
    named = [check.name for check in chosen_checks(["disk", "speed"], [])]
    assert named == ["disk", "speed"]
    usual = {check.name for check in chosen_checks([], ["disk"])}
    assert not usual & {"disk", "speed", "torch-import"}
    with pytest.raises(ConfigError, match=r"^dsik: there is no such check"):
        chosen_checks(["dsik"], [])


def test_the_document_has_a_row_for_every_check() -> None:
    rows = re.findall(r"^\| `([a-z][a-z-]+)`", (DOCS / "doctor.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(check.name for check in all_checks())
