"""Names of drivers, runtimes and libraries by which a line of a log shows which hardware it is about.

Words such as `RAS`, `fatal error` or `link down` occur in the logs of every kind of system. A line may exclude a node
only where it also names the hardware: the kernel's driver (`amdgpu 0000:c1:00.0:`), the runtime that speaks to it
(`HIP error`), its tools (`GPU[3]`), or a register or a link that only this hardware has (`XGMI`, `UTCL2`).
"""

from __future__ import annotations

import re

_FLAGS = re.IGNORECASE | re.ASCII

NIC_DRIVERS = (
    r"(?:ionic\w*|mlx[45]\w*|bnxt\w*|bng_\w+|bnx2x?|tg3|ice|ixgbe\w*|i40e|iavf|idpf|igb|igc|e1000e?|irdma|i40iw|efa|ena"
    r"|hns\w*|hclge\w*|hinic\w*|mana\w*|gve|qed[er]?|qedf|be2net|ocrdma|iw_cxgb4|cxgb4|enic|usnic\w*|sfc|nfp|atlantic"
    r"|r8169|hfi1|qib|opa_vnic|fbnic|erdma|cxi\w*|kfi_cxi|virtio_net|vmxnet3|siw|rdma_rxe|rxe|ib_\w+|rdma_\w+)"
)
"""Kernel modules that drive network cards and RDMA devices."""

_GPU_DRIVERS = r"(?:amdgpu|amdkfd|kfd|drm|powerplay|nvidia[\w-]*|nvlink|NVRM|nvswitch\w*)"

_INTERFACES = r"(?:en[ospxP]\w*|(?:eth|ib|bond|benic|hsn|rdma|roce)\w*\d\w*)"

_NAMES = {
    "gpu": rf"\b{_GPU_DRIVERS}\b|\bGPUs?\b|\bS?Xid\b|\b(?:HIP|CUDA|HSA|ROCm|ROCk|ROCr)\b"
    r"|\b(?:hip|cuda|hsa|amdgpu|nvml|rsmi|amdsmi|rocm?)_?[A-Z]\w*|\b\w*(?:XGMI|WAFL|NVLink)\w*|\bUTCL2\b|\b(?:mm|gfx|vm)hub"
    r"|_PROTECTION_FAULT|\baca entry\[|\bACA\[|Accelerator Check|\bERREVENT_\w+|\bAMD-Vi\b|\b(?:SMU|MES|MEC|RLC|SDMA|PSP)\b"
    r"|\bHIQ\b|\bqcm fence|\bkiq fence|\bUMC\b|\bHBM\b|\bECC\b.{0,40}\bGPU|\b(?:amd|rocm|nvidia)-smi\b|\bretired pages\b|\bbad[ _]page"
    r"|\bcf state\b|\bsq_intr\b|\bqueues? preemption|\bRAS (?:records|poison|controller)|\bpoison\b|\b(?:ECC|RAS)\w* ?:",
    "nic": rf"\b{NIC_DRIVERS}\b|\b{_INTERFACES}\b|\bNETDEV WATCHDOG\b|\bNIC\b|\bNET/\w+|\b[RN]CCL\b|\bnccl\w*|ibv_|\bIBV?_|\bHCA\b"
    r"|\bLIFs?\b|\bFW heartbeat\b|\bPort\b.{0,12}\bLink\b|\b(?:Port|Physical) (?:state|link)\b|\basync (?:fatal )?event\b|\bRNR\b"
    r"|\btransport retry|\bCQE\b|\bRDMA\b|\bInfiniBand\b|\bbonding\b"
    r"|^[a-z][\w-]* [0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7] \w[\w.]*: ",
    "pcie": r"\b(?:AER|DPC|EDR|PCIe?|pcieport|pciehp|pcie\w*|D3cold)\b|\b[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b"
    r"|\baer_\w+|\[Hardware Error\]|\bSlot\(",
    "memory": r"\bEDAC\b|\bmce\b|\[Hardware Error\]|\bMemory failure: 0x|\bMCE\b",
    "slurm": r"\b(?:srun|salloc|sbatch|slurm\w*|scontrol|sinfo|sacct|squeue|NODE_FAIL|StepId|JobId)\b"
    r"|^(?:error: )?nodes? \S+ (?:is |are |has )?(?:not responding|DOWN|unexpectedly|rebooted)"
    r"|\bsetting (?:node \S+ )?(?:to )?DOWN\b|\bDUE TO NODE FAILURE\b|\bNode failure\b|\bnot syncing\b|\bagent/is_node_resp\b|\bfailure of node\b",
}


def names_of(hardware: str) -> re.Pattern[str]:
    """Return the expression that a line about this hardware matches.

    Args:
        hardware: `gpu`, `nic`, `pcie`, `memory` or `slurm`.

    Raises:
        KeyError: another word.
    """
    return re.compile(_NAMES[hardware], _FLAGS)
