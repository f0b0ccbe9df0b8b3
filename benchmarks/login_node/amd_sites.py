"""Figures of AMD sites with HPE Slingshot that need no GPU: rules with sources, HPE's list, gfx90a's code objects.

HPE's values are those of HewlettPackard/shs-ccl-docs as of November 2026: `ccl_env.sh` at b1502307, and the table
in rccl/rccl_tuning_guide.md at 1617c309. Ours are the variables of a run on two nodes with the profile lumi-g.
"""

from __future__ import annotations

from collections import Counter
from importlib.metadata import version
from typing import Any

from benchmarks.common import write_result
from zslurm.cluster.rccl.environment import environment
from zslurm.cluster.rccl.rules import rules
from zslurm.cluster.site import resolve_profile
from zslurm.kernels.arch import GFX90A
from zslurm.kernels.harness.builds import build_all

HPE = {
    "HSA_FORCE_FINE_GRAIN_PCIE": "1",
    "FI_MR_CACHE_MONITOR": "userfaultfd",
    "FI_CXI_DISABLE_HOST_REGISTER": "1",
    "FI_CXI_DEFAULT_CQ_SIZE": "131072",
    "FI_CXI_RDZV_PROTO": "alt_read",
    "FI_CXI_RDZV_EAGER_SIZE": "0",
    "FI_CXI_RDZV_THRESHOLD": "0",
    "FI_CXI_RDZV_GET_MIN": "0",
    "FI_CXI_DEFAULT_TX_SIZE": "2048",
    "FI_CXI_RX_MATCH_MODE": "hybrid",
    "NCCL_CROSS_NIC": "1",
    "NCCL_NET_GDR_LEVEL": "PHB",
    "NCCL_SOCKET_IFNAME": "hsn0,hsn1,hsn2,hsn3",
    "NCCL_NET": "AWS Libfabric",
}
REASONS = {
    "NCCL_SOCKET_IFNAME": "the rendezvous needs one interface, which the profile names; the plugin takes all NICs",
}
"""Why a value of ours is another one."""


def run() -> None:
    """Compare, compile, and write results/amd_sites.json."""
    known = rules().rules
    of_network = [rule for rule in known if "slingshot" in (rule.when.network or ())]
    write_result(
        "amd_sites",
        {
            "rules": {
                "all": len(known),
                "all_with_source": sum(bool(rule.source) for rule in known),
                "slingshot": len(of_network),
                "slingshot_with_source": sum(bool(rule.source) for rule in of_network),
            },
            "hpe_list": _compared(),
            "code_objects": {"architecture": GFX90A.name, "triton_version": version("triton"), **_code_objects()},
            "doctor_product_ms": None,
            "not_measured": "the doctor's product and everything else on a GPU: none of AMD was at hand",
        },
    )


def _compared() -> dict[str, Any]:
    """Return HPE's values next to ours; a value of ours that differs must have a reason."""
    cluster = resolve_profile("lumi-g").spec.cluster
    ours = {setting.name: setting.value for setting in environment(cluster)}
    rows = {
        name: {"hpe": value, "ours": ours.get(name), "reason": REASONS.get(name)}
        for name, value in HPE.items()
        if ours.get(name) != value
    }
    unexplained = [name for name, row in rows.items() if row["reason"] is None]
    if unexplained:
        raise RuntimeError(f"values other than HPE's without a reason: {', '.join(unexplained)}")
    return {"variables": len(HPE), "equal": len(HPE) - len(rows), "others": rows}


def _code_objects() -> dict[str, Any]:
    """Compile every kernel in Triton for gfx90a, and count those that keep the limits of gfx942."""
    launches = [built for built in build_all(GFX90A) if built.language == "triton"]
    beyond = [built for built in launches if built.problem]
    return {
        "launches": len(launches),
        "compiled": sum(built.code is not None for built in launches),
        "within_limits": len(launches) - len(beyond),
        "beyond": dict(Counter(built.kernel.partition(",")[0] for built in beyond)),
    }
