"""The whole environment of each shipped profile, as recorded here; and who wins if several say something."""

from __future__ import annotations

from typing import Any

import pytest

from zslurm.cluster.rccl.environment import RULES, environment, left_out, left_out_note
from zslurm.cluster.site import resolve_profile
from zslurm.config.layers import Override
from zslurm.config.spec import ClusterSection
from zslurm.hardware.compiler_caches import node_directory

# What every cluster with GPUs gets.
GPUS = {
    "TORCH_NCCL_ENABLE_MONITORING": "1",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "600",
    "TRITON_CACHE_DIR": f"{node_directory()}/triton",
    "TORCH_EXTENSIONS_DIR": f"{node_directory()}/torch_extensions",
    "TORCHINDUCTOR_CACHE_DIR": f"{node_directory()}/inductor",
    "NCCL_DEBUG": "WARN",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "20000",
    "TORCH_INCLUDE_STACK_TRACE": "False",
}
RDMA = {"NCCL_IB_TIMEOUT": "21", "NCCL_IB_RETRY_CNT": "7"}
MI300X = {
    "HSA_NO_SCRATCH_RECLAIM": "1",
    "HSA_KERNARG_POOL_SIZE": "12582912",
    "GPU_MAX_HW_QUEUES": "4",
    "TORCH_NCCL_HIGH_PRIORITY": "1",
    "NCCL_P2P_NET_CHUNKSIZE": "524288",
    "AITER_JIT_DIR": f"{node_directory()}/aiter",
    "MIOPEN_USER_DB_PATH": f"{node_directory()}/miopen",
    "MIOPEN_CUSTOM_CACHE_DIR": f"{node_directory()}/miopen",
}
EXPECTED: dict[str, dict[str, str]] = {
    "local": {},
    "h100-ib": GPUS | RDMA,
    "mi300x-cx7": GPUS | RDMA | MI300X | {"NCCL_IB_GID_INDEX": "3", "NCCL_IB_ROCE_VERSION_NUM": "2"},
    "mi300x-broadcom": GPUS
    | RDMA
    | MI300X
    | {"NCCL_IB_GID_INDEX": "3", "NCCL_IB_ROCE_VERSION_NUM": "2", "NCCL_DMABUF_ENABLE": "1"},
    "mi300x-pollara": GPUS
    | RDMA
    | MI300X
    | {
        "GPU_MAX_HW_QUEUES": "8",
        "NCCL_IB_GID_INDEX": "1",
        "NCCL_IB_ROCE_VERSION_NUM": "2",
        "NCCL_CROSS_NIC": "0",
        "NCCL_PXN_DISABLE": "0",
        "NCCL_IGNORE_CPU_AFFINITY": "1",
        "NCCL_IB_USE_INLINE": "1",
        "NCCL_GDR_FLUSH_DISABLE": "1",
        "RCCL_GDR_FLUSH_GPU_MEM_NO_RELAXED_ORDERING": "0",
        "NCCL_CUMEM_ENABLE": "0",
        "IONIC_LOCKFREE": "all",
    },
}


def values(cluster: ClusterSection) -> dict[str, str]:
    return {setting.name: setting.value for setting in environment(cluster)}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_environment_of_a_shipped_profile(name: str) -> None:
    assert values(resolve_profile(name).spec.cluster) == EXPECTED[name]


def test_a_site_that_knows_its_nics_interface_gid_and_version_gets_them() -> None:
    known = [
        "cluster.nics=[rdma0, rdma1, rdma2, rdma3, rdma4, rdma5, rdma6, rdma7]",
        "cluster.interface=eno1",
        "cluster.gid_index=3",
        "cluster.rccl_version=2.22.3",
    ]
    assert values(resolve_profile("mi300x-pollara", list(map(Override.parse, known))).spec.cluster) == EXPECTED[
        "mi300x-pollara"
    ] | {
        "NCCL_IB_HCA": "=rdma0,rdma1,rdma2,rdma3,rdma4,rdma5,rdma6,rdma7",
        "GLOO_SOCKET_IFNAME": "eno1",
        "NCCL_SOCKET_IFNAME": "=eno1",
        "NCCL_IB_GID_INDEX": "3",
        "RCCL_MSCCL_ENABLE": "0",
        "RCCL_MSCCLPP_ENABLE": "0",
        "NCCL_NET_PLUGIN": "librccl-anp.so",
    }


PLUGIN = {"NCCL_NET_PLUGIN": "librccl-anp.so"}
BUILT_IN = {"NCCL_NET_PLUGIN": "none", "RCCL_AINIC_ROCE": "1"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"rocm_version": "6.4.1-83"}, PLUGIN),
        ({"rocm_version": "7.2.0"}, PLUGIN),
        ({"rocm_version": "7.2.1"}, BUILT_IN),
        ({"rocm_version": "7.14.0"}, BUILT_IN),
        ({"rocm_version": "10.1"}, BUILT_IN),
        ({"rccl_version": "2.22.3"}, PLUGIN),
        ({"rccl_version": "2.28.3"}, BUILT_IN),
        ({"rccl_version": "2.27.7"}, {}),  # of ROCm 7.2.0, and of 7.2.1
        ({"rccl_version": "2.27.7", "rocm_version": "7.2.1"}, BUILT_IN),
        ({"ainic_transport": "generic", "rocm_version": "6.4.1"}, {}),
        ({"ainic_transport": "plugin", "rocm_version": "7.2.1"}, PLUGIN),
        ({"rocm_version": "7.2.1", "network": "cx7"}, {}),
        ({"rocm_version": "7.2.1", "gpu_family": "h100"}, {}),
        ({}, {}),
    ],
    ids=str,
)
def test_the_transport_of_pollara_is_chosen_by_version(given: dict[str, str], expected: dict[str, str]) -> None:
    overrides = [Override.of(f"cluster.{key}", value) for key, value in given.items()]
    found = values(resolve_profile("mi300x-pollara", overrides).spec.cluster)
    assert {name: found[name] for name in ("NCCL_NET_PLUGIN", "RCCL_AINIC_ROCE") if name in found} == expected


@pytest.mark.parametrize(("peermem", "dmabuf"), [("true", "0"), ("false", "1"), ("null", None)])
def test_dma_buf_takes_the_part_of_peermem(peermem: str, dmabuf: str | None) -> None:
    found = values(resolve_profile("mi300x-pollara", [Override.parse(f"cluster.peermem={peermem}")]).spec.cluster)
    assert found.get("NCCL_DMABUF_ENABLE") == dmabuf


def cluster(**fields: Any) -> ClusterSection:
    h100 = {"gpus_per_node": 8, "gpu_type": "h100", "network": "infiniband"}
    return ClusterSection.model_validate(h100 | fields)


def test_what_the_site_sets_wins_and_null_takes_a_rule_away() -> None:
    given = values(cluster(env={"NCCL_IB_TIMEOUT": "22", "NCCL_DEBUG": None, "MINE": "x"}))
    assert given["NCCL_IB_TIMEOUT"] == "22"
    assert given["MINE"] == "x"
    assert "NCCL_DEBUG" not in given


def test_every_value_has_a_reason_and_an_origin() -> None:
    settings = {
        setting.name: setting
        for setting in environment(
            cluster(env={"NCCL_IB_TIMEOUT": "22", "MINE": "x"}), lambda name: f"file.yaml for {name}"
        )
    }
    rule, replaced, own = (settings[name] for name in ("NCCL_IB_RETRY_CNT", "NCCL_IB_TIMEOUT", "MINE"))
    assert (rule.origin, rule.reason[:8], bool(rule.source)) == (RULES, "the most", True)
    assert replaced.origin == "file.yaml for NCCL_IB_TIMEOUT"
    assert replaced.reason.startswith("instead of the rule's 21: a link that flaps")
    assert (own.origin, own.reason, own.source) == ("file.yaml for MINE", "set in cluster.env", "")


def test_braces_in_a_sites_own_words_are_just_text() -> None:
    assert values(cluster(interface="{nics}"))["NCCL_SOCKET_IFNAME"] == "={nics}"


def test_a_profile_without_interface_and_nics_names_the_rules_that_it_leaves_out() -> None:
    missing = {rule.variable: rule for rule in left_out(resolve_profile("mi300x-pollara").spec.cluster)}
    assert {name: rule.needs for name, rule in missing.items()} == {
        "GLOO_SOCKET_IFNAME": "cluster.interface",
        "NCCL_SOCKET_IFNAME": "cluster.interface",
        "NCCL_IB_HCA": "cluster.nics",
        "RCCL_MSCCL_ENABLE": "cluster.rccl_version or cluster.rocm_version",
        "RCCL_MSCCLPP_ENABLE": "cluster.rccl_version or cluster.rocm_version",
        "NCCL_NET_PLUGIN": "cluster.rocm_version or cluster.ainic_transport",
        "RCCL_AINIC_ROCE": "cluster.rocm_version or cluster.ainic_transport",
        "NCCL_DMABUF_ENABLE": "cluster.peermem",
    }
    assert missing["NCCL_IB_HCA"].line == (
        "NCCL_IB_HCA is not set: the profile does not give cluster.nics (only the rails' NICs; = is an exact "
        "match, without it ionic_1 also takes ionic_10)"
    )


def test_rules_that_wait_for_the_network_or_the_vendor_are_left_out_and_counted() -> None:
    unknown = ClusterSection(launcher="slurm", gpus_per_node=8, gpu_type="mi300x", name="lab")
    needs = {rule.variable: rule.needs for rule in left_out(unknown)}
    for variable in ("NCCL_IB_HCA", "NCCL_IB_TIMEOUT", "NCCL_CROSS_NIC", "NCCL_NET_PLUGIN", "NCCL_DMABUF_ENABLE"):
        assert needs[variable] == "cluster.network"
    assert (left_out_note(unknown) or "").startswith("34 variables of RCCL or NCCL are not set: profile lab ")
    nameless = {
        rule.variable: rule.needs for rule in left_out(cluster(gpu_type=None, network=None, launcher="slurm"))
    }
    assert nameless["HSA_NO_SCRATCH_RECLAIM"] == "cluster.gpu_family"


def test_another_network_decides_every_rule_of_networks() -> None:
    other = ClusterSection(launcher="slurm", gpus_per_node=8, gpu_type="h100", network="other")
    assert {rule.needs for rule in left_out(other)} == {"cluster.interface"}
    assert left_out_note(other) is None
    without_gpus = ClusterSection(launcher="slurm")
    assert left_out_note(without_gpus) is None


def _pollara(assignments: list[str]) -> ClusterSection:
    return resolve_profile("mi300x-pollara", list(map(Override.parse, assignments))).spec.cluster


def test_nothing_is_left_out_of_a_complete_profile_of_one_that_decides_itself_and_of_one_machine() -> None:
    nics = ", ".join(f"ionic_{index}" for index in range(8))
    complete = [
        f"cluster.nics=[{nics}]",
        "cluster.interface=eno1",
        "cluster.rocm_version=6.4.1",
        "cluster.peermem=true",
    ]
    assert left_out(_pollara(complete)) == []
    own = [*complete[1:], "cluster.env.NCCL_IB_HCA==ionic_0"]
    assert left_out(_pollara(own)) == []
    unset = [*complete[1:], "cluster.env.NCCL_IB_HCA=null"]
    assert left_out(_pollara(unset)) == []
    assert left_out(resolve_profile("local").spec.cluster) == []
