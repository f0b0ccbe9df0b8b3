"""Every rule has a reason and a source, applies exactly where it should, and the timeouts add up."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from zslurm.cluster.rccl.environment import variables_of
from zslurm.cluster.rccl.lint import meant_by
from zslurm.cluster.rccl.rules import (
    Rules,
    in_range,
    patience_s,
    rules,
    variables,
    vendor_of,
    version,
)
from zslurm.config.aegis import AegisSection
from zslurm.config.spec import ClusterSection
from zslurm.hardware.compiler_caches import DEFAULTS, node_directory
from zslurm.kernels.prepared import PREPARED_VARIABLE
from zslurm.train.config import ParallelConfig

NICS = tuple(f"ionic_{i}" for i in range(8))
GPU_NODE: dict[str, Any] = {"launcher": "slurm", "gpus_per_node": 8, "gpu_type": "mi300x"}
POLLARA: dict[str, Any] = {**GPU_NODE, "network": "pollara", "rails_only": True}
BROADCOM: dict[str, Any] = {**GPU_NODE, "network": "broadcom"}
COPY_ENGINES: dict[str, Any] = {**GPU_NODE, "copy_engines": True, "rccl_version": "2.28.3"}
SLINGSHOT: dict[str, Any] = {**GPU_NODE, "gpu_type": "mi250x", "network": "slingshot"}
INFINIBAND: dict[str, Any] = {**GPU_NODE, "gpu_type": "h100", "network": "infiniband"}
NVIDIA: dict[str, Any] = {**GPU_NODE, "gpu_type": "h100"}
NO_GPU: dict[str, Any] = {"launcher": "slurm"}

# Variable -> a cluster on which the rule applies, its value there, and a cluster that differs in what matters.
CASES: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("GLOO_SOCKET_IFNAME", {"interface": "eno1"}, "eno1", {}),
    ("NCCL_SOCKET_IFNAME", {**GPU_NODE, "interface": "eno1"}, "=eno1", {**NO_GPU, "interface": "eno1"}),
    ("NCCL_IB_HCA", {**POLLARA, "nics": NICS}, "=" + ",".join(NICS), POLLARA),
    ("NCCL_IB_GID_INDEX", POLLARA, "1", INFINIBAND),
    ("NCCL_IB_ROCE_VERSION_NUM", BROADCOM, "2", INFINIBAND),
    ("NCCL_IB_TC", {**BROADCOM, "traffic_class": 104}, "104", BROADCOM),
    ("NCCL_IB_FIFO_TC", {**POLLARA, "traffic_class": 96}, "192", POLLARA),
    ("NCCL_IB_TIMEOUT", INFINIBAND, "21", NVIDIA),
    ("NCCL_IB_RETRY_CNT", INFINIBAND, "7", NVIDIA),
    ("TORCH_NCCL_ENABLE_MONITORING", GPU_NODE, "1", NO_GPU),
    ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", GPU_NODE, "600", NO_GPU),
    ("TRITON_CACHE_DIR", GPU_NODE, f"{node_directory()}/triton", NO_GPU),
    ("TORCH_EXTENSIONS_DIR", GPU_NODE, f"{node_directory()}/torch_extensions", NO_GPU),
    ("TORCHINDUCTOR_CACHE_DIR", {**NVIDIA, "stage_env": "/local"}, f"{node_directory('/local')}/inductor", NO_GPU),
    ("AITER_JIT_DIR", {**GPU_NODE, "env": {PREPARED_VARIABLE: "/local/mine"}}, "/local/mine/aiter", NVIDIA),
    ("MIOPEN_USER_DB_PATH", GPU_NODE, f"{node_directory()}/miopen", NVIDIA),
    ("MIOPEN_CUSTOM_CACHE_DIR", GPU_NODE, f"{node_directory()}/miopen", NVIDIA),
    ("NCCL_DEBUG", GPU_NODE, "WARN", NO_GPU),
    ("TORCH_NCCL_DUMP_ON_TIMEOUT", GPU_NODE, "1", NO_GPU),
    ("TORCH_NCCL_TRACE_BUFFER_SIZE", GPU_NODE, "2000", NO_GPU),
    ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", GPU_NODE, "20000", NO_GPU),
    ("TORCH_INCLUDE_STACK_TRACE", GPU_NODE, "False", NO_GPU),
    ("NCCL_CROSS_NIC", POLLARA, "0", BROADCOM),
    ("NCCL_PXN_DISABLE", POLLARA, "0", {**POLLARA, "rails_only": False}),
    ("HSA_NO_SCRATCH_RECLAIM", GPU_NODE, "1", NVIDIA),
    ("HSA_KERNARG_POOL_SIZE", GPU_NODE, "12582912", NVIDIA),
    ("GPU_MAX_HW_QUEUES", {**GPU_NODE, "rails_only": True}, "8", NVIDIA),
    ("GPU_MAX_HW_QUEUES", GPU_NODE, "4", NVIDIA),
    ("TORCH_NCCL_HIGH_PRIORITY", GPU_NODE, "1", NVIDIA),
    ("NCCL_IGNORE_CPU_AFFINITY", POLLARA, "1", BROADCOM),
    ("NCCL_P2P_NET_CHUNKSIZE", BROADCOM, "524288", INFINIBAND),
    ("RCCL_MSCCL_ENABLE", {**GPU_NODE, "rccl_version": "2.27.7"}, "0", {**GPU_NODE, "rccl_version": "2.28.3"}),
    ("RCCL_MSCCLPP_ENABLE", {**GPU_NODE, "rccl_version": "2.22.3"}, "0", GPU_NODE),
    ("NCCL_CTA_POLICY", COPY_ENGINES, "2", {**COPY_ENGINES, "rccl_version": "2.27.7"}),
    ("NCCL_CUMEM_ENABLE", COPY_ENGINES, "1", {**GPU_NODE, "rccl_version": "2.28.3"}),
    ("NCCL_NET_PLUGIN", {**POLLARA, "rocm_version": "6.4.1"}, "librccl-anp.so", POLLARA),
    ("NCCL_NET_PLUGIN", {**POLLARA, "rocm_version": "7.2.1"}, "none", {**BROADCOM, "rocm_version": "7.2.1"}),
    ("RCCL_AINIC_ROCE", {**POLLARA, "rocm_version": "7.2.1"}, "1", {**POLLARA, "rocm_version": "7.2.0"}),
    ("NCCL_IB_USE_INLINE", POLLARA, "1", BROADCOM),
    ("NCCL_GDR_FLUSH_DISABLE", POLLARA, "1", BROADCOM),
    ("RCCL_GDR_FLUSH_GPU_MEM_NO_RELAXED_ORDERING", POLLARA, "0", BROADCOM),
    ("NCCL_DMABUF_ENABLE", {**POLLARA, "peermem": True}, "0", POLLARA),
    ("NCCL_DMABUF_ENABLE", {**POLLARA, "peermem": False}, "1", {**INFINIBAND, "peermem": False}),
    ("NCCL_CUMEM_ENABLE", POLLARA, "0", BROADCOM),
    ("IONIC_LOCKFREE", POLLARA, "all", BROADCOM),
    ("NCCL_DMABUF_ENABLE", BROADCOM, "1", {**BROADCOM, "network": "cx7"}),
    ("NCCL_CUMEM_ENABLE", {**BROADCOM, "rccl_version": "2.27.7"}, "1", {**BROADCOM, "rccl_version": "2.26.6"}),
    ("NCCL_NET", SLINGSHOT, "AWS Libfabric", BROADCOM),
    ("FI_MR_CACHE_MONITOR", SLINGSHOT, "userfaultfd", BROADCOM),
    ("FI_CXI_DISABLE_HOST_REGISTER", SLINGSHOT, "1", BROADCOM),
    ("FI_CXI_DEFAULT_CQ_SIZE", SLINGSHOT, "131072", BROADCOM),
    ("FI_CXI_DEFAULT_TX_SIZE", SLINGSHOT, "2048", BROADCOM),
    ("FI_CXI_RX_MATCH_MODE", SLINGSHOT, "hybrid", BROADCOM),
    ("FI_CXI_RDZV_PROTO", SLINGSHOT, "alt_read", BROADCOM),
    ("FI_CXI_RDZV_EAGER_SIZE", SLINGSHOT, "0", BROADCOM),
    ("FI_CXI_RDZV_THRESHOLD", SLINGSHOT, "0", BROADCOM),
    ("FI_CXI_RDZV_GET_MIN", SLINGSHOT, "0", BROADCOM),
    ("NCCL_CROSS_NIC", SLINGSHOT, "1", BROADCOM),
    ("NCCL_NET_GDR_LEVEL", SLINGSHOT, "PHB", BROADCOM),
    ("NCCL_PROTO", SLINGSHOT, "^LL128", BROADCOM),
    ("HSA_FORCE_FINE_GRAIN_PCIE", SLINGSHOT, "1", {**SLINGSHOT, "gpu_type": "h100"}),
]


def values(cluster: dict[str, Any]) -> dict[str, str]:
    return variables_of(ClusterSection.model_validate(cluster))


@pytest.mark.parametrize(("name", "on", "value", "off"), CASES, ids=[f"{case[0]}={case[2]}" for case in CASES])
def test_a_rule_applies_where_it_should_and_nowhere_else(
    name: str, on: dict[str, Any], value: str, off: dict[str, Any]
) -> None:
    assert values(on)[name] == value
    assert name not in values(off)


def test_every_rule_has_such_a_case_in_its_order() -> None:
    assert [rule.variable for rule in rules().rules] == [case[0] for case in CASES]


def test_every_rule_has_a_reason_and_a_source() -> None:
    for rule in rules().rules:
        assert rule.reason.isprintable() and rule.source.isprintable()
        assert not rule.reason.endswith("."), rule.variable
        assert len(rule.reason) < 120, rule.variable


def test_no_two_rules_for_a_variable_apply_at_once() -> None:
    """The order of the rules never decides: who reads one rule knows the value."""
    for network in ("pollara", "broadcom", "cx7", "infiniband", "slingshot", None):
        for vendor in ("mi300x", "h100"):
            versions = ("2.20.5", "2.27.7", "2.28.3", None)
            for rccl, peermem, engines in product(versions, (True, False, None), (True, False)):
                body = {**GPU_NODE, "gpu_type": vendor, "network": network, "rccl_version": rccl}
                cluster = ClusterSection.model_validate({**body, "peermem": peermem, "copy_engines": engines})
                names = [rule.variable for rule in rules().rules if rule.when.holds(cluster)]
                assert len(names) == len(set(names))


# --- timeouts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("timeout", "retries", "seconds"),
    [(17, 7, 3.8), (18, 7, 7.5), (19, 7, 15), (20, 7, 30), (21, 7, 60), (22, 7, 120), (23, 7, 240)],
)
def test_the_nics_patience_is_that_of_nccls_own_table(timeout: int, retries: int, seconds: float) -> None:
    """NCCL user guide, NCCL_IB_TIMEOUT: its table of totals."""
    assert patience_s(timeout, retries) == pytest.approx(seconds, rel=0.02)


def test_a_glitch_under_a_minute_does_not_end_a_job_and_no_more_than_needed_is_waited() -> None:
    limits = rules().limits
    assert patience_s(limits.ib_timeout, limits.ib_retries) >= limits.network_patience_s == 60
    assert patience_s(limits.ib_timeout - 1, limits.ib_retries) < limits.network_patience_s


def test_a_real_hang_is_still_seen_and_leaves_its_traces() -> None:
    """The NICs give up first, then PyTorch's watchdog sees its own hang, then the collective is given up."""
    limits, given = rules().limits, values(POLLARA)
    stretched = 4 * patience_s(limits.ib_timeout, limits.ib_retries)
    assert stretched < float(given["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]) < ParallelConfig().timeout_s
    assert float(given["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"]) / 1000 < AegisSection().grace_s
    assert int(given["TORCH_NCCL_TRACE_BUFFER_SIZE"]) > 0


# --- what the rules are made of ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("have", "wanted", "holds"),
    [
        ("2.28.3", "<2.28.3", False),
        ("2.28.2", "<2.28.3", True),
        ("2.28", "<2.28.3", True),
        ("2.28.3-rocm7.13", ">=2.28.3", True),
        ("2.27.7", ">=2.22, <2.28", True),
        ("2.9.9", "<2.20", True),
        ("2.20", "==2.20.0", True),
        ("2.20.1", ">2.20", True),
        ("2.20", "<=2.20", True),
        (None, "<9", False),
        ("unknown", ">=0", False),
    ],
)
def test_versions_are_compared_as_numbers_and_an_unknown_one_is_in_no_range(
    have: str | None, wanted: str, holds: bool
) -> None:
    assert in_range(have, wanted) is holds


def test_a_version_is_the_numbers_at_its_beginning() -> None:
    assert version("7.1.1-38") == (7, 1, 1)
    assert version("v2.22.3") == (2, 22, 3)
    assert version("") == ()


@pytest.mark.parametrize(
    ("gpu", "vendor"),
    [
        ("mi300x", "amd"), ("MI250", "amd"), ("amd_mi300x", "amd"), ("amd", "amd"), ("h100", "nvidia"),
        ("nvidia_h100_80gb_hbm3", "nvidia"), ("a100", "nvidia"), ("gb200", "nvidia"), ("l40s", "nvidia"),
        ("tesla_v100", "nvidia"), ("gpu", None), ("max1550", None),
    ],
)  # fmt: skip
def test_the_vendor_is_known_by_the_gpus_name(gpu: str, vendor: str | None) -> None:
    """Names as sites have them in slurm.conf, and as Slurm's AutoDetect of NVML and RSMI gives them."""
    assert vendor_of(ClusterSection(gpus_per_node=8, gpu_type=gpu)) == vendor
    assert vendor_of(ClusterSection(gpus_per_node=8, gpu_type="x", gpu_family=gpu)) == vendor


def test_the_rccl_of_a_rocm_is_known() -> None:
    assert rules().rccl_of("7.1.1-38") == "2.27.7"
    assert rules().rccl_of("7.13.0") == "2.28.3"
    assert [rules().rccl_of(rocm) for rocm in ("7.11", "7.12.0", "7.14", "10.0", "10.1.0")] == [
        "2.28.3", "2.28.3", "2.30.4", "2.30.4", "2.30.7",
    ]  # fmt: skip
    assert rules().rccl_of("5.0.0") is rules().rccl_of(None) is None


@pytest.mark.parametrize(
    "spoilt",
    [
        {"reason": ""},
        {"source": " "},
        {"value": "{nonesuch}"},
        {"variable": "lower"},
        {"when": {"network": ["token ring"]}},
        {"when": {"rccl": "2.20 or so"}},
        {"since": "2020"},
        {"reason": "two\nlines"},
    ],
)
def test_a_rule_with_a_mistake_is_refused(spoilt: dict[str, Any]) -> None:
    body = rules().model_dump(mode="json")
    good = {"variable": "NCCL_DEBUG", "value": "WARN", "reason": "why", "source": "who"}
    assert Rules.model_validate({**body, "rules": [good]})
    with pytest.raises(ValidationError):
        Rules.model_validate({**body, "rules": [{**good, **spoilt}]})


def test_no_name_is_known_twice_or_both_real_and_misspelt() -> None:
    shipped = variables()
    listed = [group.prefix + name for group in shipped.known for name in group.names.split()]
    assert len(listed) == len(set(listed))
    assert not {entry.name for entry in shipped.misspelt} & shipped.names


def test_every_variable_of_a_rule_is_known() -> None:
    others = {"GLOO_SOCKET_IFNAME", "GPU_MAX_HW_QUEUES", "IONIC_LOCKFREE", *DEFAULTS}
    assert {rule.variable for rule in rules().rules} - others <= variables().names


# Names that NCCL's and RCCL's sources, documentation and changelogs have, collected apart from the table.
COLLECTED = Path(__file__).with_name("rccl_variable_names.txt")


def collected() -> list[str]:
    lines = COLLECTED.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_every_real_name_that_was_collected_is_known() -> None:
    shipped = variables()
    assert len(collected()) > 300
    assert [name for name in collected() if name not in shipped.names] == []


def test_a_real_name_that_the_table_lacks_is_hardly_ever_called_misspelt() -> None:
    """Names come with every release. The table without a name must not take it for a slip of another one."""
    names = variables().names
    taken = {name: meant for name in sorted(names) if (meant := meant_by(name, names - {name}))}
    # What is left are variants: the same name with RCCL_, NCCL_ and TORCH_NCCL_ in front.
    variants = [name for name, meant in taken.items() if name.partition("CL_")[2] == meant.partition("CL_")[2]]
    assert sorted(taken) == sorted(variants)
    assert len(variants) < 30


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("NCCL_IB_TIMOUT", "NCCL_IB_TIMEOUT"), ("NCLL_DEBUG", "NCCL_DEBUG"), ("RCL_DEBUG", "NCCL_DEBUG"),
        ("RCCL_IB_TIMEOUT", "NCCL_IB_TIMEOUT"), ("NCCL_AGLO", "NCCL_ALGO"), ("NCCL_IBHCA", "NCCL_IB_HCA"),
        ("NCCL_DISABLE_P2P", "NCCL_P2P_DISABLE"), ("NCCL_SOCKET_IFNAMES", "NCCL_SOCKET_IFNAME"),
        ("HSA_NO_SCRATCH_RECLAM", "HSA_NO_SCRATCH_RECLAIM"), ("NCCL_DEBUG ", "NCCL_DEBUG"),
        ("NCCL_DEBUG", None), ("NCCL_IB_GID", None), ("NCCL_SOMETHING_OF_NEXT_YEAR", None),
    ],
)  # fmt: skip
def test_a_slip_of_the_pen_is_found(slip: str, meant: str | None) -> None:
    assert meant_by(slip, variables().names) == meant
