"""What GPU tools say, from public sources named next to each sample.

No GPU was at hand: what a source gives as values is marked so; else the form is the source's, and the values are
those that a test needs.
"""

from __future__ import annotations

import json
from typing import Any

# Fields and blocks as ROCm/device-metrics-exporter has them in its tests' notes ("AMD-SMI JSON Output Structure"),
# `mem_usage`, `xgmi_err` and `N/A` as amd/node-scraper (test/unit/plugin/test_amdsmi_data.py: dummy_metric_dict).
_COUNTERS = {"correctable_count": 0, "uncorrectable_count": 0, "deferred_count": 0}
_BLOCKS = ("UMC", "SDMA", "GFX", "MMHUB", "PCIE_BIF", "HDP", "XGMI_WAFL")


def metric_row(gpu: int, *, used_mb: int = 283, **counts: int) -> dict[str, Any]:
    """One GPU of `amd-smi metric --ecc --ecc-blocks --mem-usage --json`.

    Args:
        gpu: its index.
        used_mb: memory in use; 283 MB is that of an idle MI300X (297,771,008 bytes: ROCm/legacy-rocm-build#4750).
        counts: `uncorrectable`, `correctable`, `deferred`; all of them in block UMC.
    """
    totals = {f"total_{kind}_count": counts.get(kind, 0) for kind in ("correctable", "uncorrectable", "deferred")}
    blocks: dict[str, dict[str, Any]] = {block: dict(_COUNTERS) for block in _BLOCKS}
    blocks["UMC"] |= {f"{kind}_count": count for kind, count in counts.items()}
    return {
        "gpu": gpu,
        "ecc": totals | {"cache_correctable_count": 0, "cache_uncorrectable_count": 0},
        "ecc_blocks": blocks,
        "xgmi_err": "N/A",
        "mem_usage": {
            "total_vram": {"value": 196592, "unit": "MB"},
            "used_vram": {"value": used_mb, "unit": "MB"},
            "free_vram": {"value": 196592 - used_mb, "unit": "MB"},
        },
    }


def metric(rows: list[dict[str, Any]]) -> str:
    """ROCm 7's document."""
    return json.dumps({"gpu_data": rows}, indent=4)


def bad_pages(gpus: int) -> str:
    """`amd-smi bad-pages --json` of sound GPUs: the string is amdsmi_commands.py's (ROCm/amdsmi)."""
    sound = dict.fromkeys(("retired", "pending", "un_res"), "No bad pages found.")
    return json.dumps([{"gpu": index} | sound for index in range(gpus)])


BAD_PAGE = {"page_address": "0x27f5d43000", "page_size": "0x1000", "status": "RESERVED"}
"""An entry of such a list: amdsmi_commands.py (keys), the page of drm/amd's mailing list below."""

PROCESS_IDLE = '[{"gpu": 7, "process_list": [{"process_info": "No running processes detected"}]}]'
"""`amd-smi process --json` of an idle GPU: the entry is a string (ROCm/amdsmi, amdsmi_commands.py)."""

PROCESS_MEM_USAGE_ZERO = """[{"gpu": 0, "process_list": [{"process_info": {"name": "N/A", "pid": 2266127,
 "memory_usage": {"gtt_mem": {"value": 0.0, "unit": "B"}, "cpu_mem": {"value": 0.0, "unit": "B"},
 "vram_mem": {"value": 1.9, "unit": "GB"}}, "mem_usage": {"value": 0.0, "unit": "B"}}}]}]"""
"""Name and mem_usage say nothing, memory_usage does: values of ROCm/amdsmi#130 (MI300X VF), as JSON."""

PROCESS_FLAT = """[{"gpu": 0, "process_list": [{"name": "python", "pid": 4242, "mem": 1024,
 "engine_usage": {"gfx": 1000000, "enc": 0},
 "memory_usage": {"gtt_mem": 0, "cpu_mem": 4096, "vram_mem": 2048}, "cu_occupancy": 12}]}]"""
"""An older form without `process_info`: amd/node-scraper, test_amdsmi_collector.py; values as there."""

CONCATENATED = """[{"gpu": 0, "memory_partition": "NPS1", "compute_partition": "CPX_DISABLED"}]
[{"gpu": 1, "memory_partition": "NPS1", "compute_partition": "CPX_DISABLED"}]
[{"gpu_id": "N/A", "profile_index": "N/A", "partition_id": "0"}]

Legend:
  * = Current mode"""
"""Three documents and a legend: amd/node-scraper, test_amdsmi_collector.py; values as there."""

MISSING_GROUPS = (
    "WARNING: User is missing the following required groups: render, video. Please add user to these groups."
)
"""The first line of many answers: ROCm/amdsmi#130."""

RAS_BAD_PAGES = """\
0x027f5d43 : 0x00001000 : R
0x027f5d4b : 0x00001000 : R
0x027f5d53 : 0x00001000 : R"""
"""Lines of gpu_vram_bad_pages in a report of retired pages on the amd-gfx mailing list; values as there."""

NVIDIA_IDLE = """\
0, 00000000:18:00.0, 4, 0, 0
1, 00000000:2A:00.0, 4, 0, 0"""
"""The form of nvidia-smi(1)'s CSV without header and units."""

NVIDIA_NO_ECC = "0, 00000000:01:00.0, 1, [N/A], [N/A]"
"""A GPU without ECC: nvidia-smi(1)."""

IBV_DEVICES = "    device          \t   node GUID\n    ------          \t----------------\n"
"""The head of ibv_devices: linux-rdma/rdma-core, libibverbs/examples/device_list.c; below, a line for each."""

IBV_ABI_WARNING = (
    "libibverbs: Warning: Driver ionic does not support the kernel ABI of 4 (supports 1 to 1) for device "
    "/sys/class/infiniband/ionic_0"
)
"""The warning of linux-rdma/rdma-core, libibverbs/init.c, with the versions of AMD-AGI/Primus#887."""

NICCTL_QOS = """\
NIC : 42424650-4c32-3433-3530-303030000000 (0000:06:00.0)

Port : 04908130-7af8-4242-4242-000011010000
  Classification type             : DSCP
  DSCP-to-priority :
    DSCP                          : 0-25, 27-47, 49-63 ==> priority : 0
    DSCP                          : 26 ==> priority : 3
    DSCP                          : 48 ==> priority : 6
  PFC :
    PFC no-drop priorities        : 3
"""
"""As AMD documents it; a stand-in, not recorded on a node."""

DCB_PFC = "prio-pfc 0:off 1:off 2:off 3:off 4:on 5:off 6:off 7:off"
DCB_APP = "dscp-prio 26:3 34:4"
MLNX_QOS = """\
DCBX mode: OS controlled
Priority trust state: dscp
dscp2prio mapping:
	prio:0 dscp:07,06,05,04,03,02,01,00,
	prio:3 dscp:31,30,29,28,27,26,25,24,
	prio:6 dscp:55,54,53,52,51,50,49,48,
PFC configuration:
	priority    0   1   2   3   4   5   6   7
	enabled     0   0   0   1   0   0   0   0
"""
