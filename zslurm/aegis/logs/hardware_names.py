"""Names of drivers, runtimes and libraries by which a line of a log shows which hardware it is about.

Words such as `RAS`, `fatal error` or `link down` occur in the logs of every kind of system. A line may exclude
a node only if it also names the hardware: the kernel's driver (`amdgpu 0000:c1:00.0:`), the runtime that talks
to it (`HIP error`), its tools (`GPU[3]`), or a register or a link that only this hardware has (`XGMI`, `UTCL2`).
"""

from __future__ import annotations

import re
from functools import cache

_FLAGS = re.IGNORECASE | re.ASCII

NIC_DRIVERS = (
    r"(?:ionic\w*|mlx[45]\w*|bnxt\w*|bng_\w+|bnx2x?|tg3|ice|ixgbe\w*|i40e|iavf|idpf|igb|igc|e1000e?|irdma|i40iw|efa|ena"
    r"|hns\w*|hclge\w*|hinic\w*|mana\w*|gve|qed[er]?|qedf|be2net|ocrdma|iw_cxgb4|cxgb4|enic|usnic\w*|sfc|nfp|atlantic"
    r"|r8169|hfi1|qib|opa_vnic|fbnic|erdma|cxi\w*|kfi_cxi|virtio_net|vmxnet3|siw|rdma_rxe|rxe|ib_\w+|rdma_\w+)"
)
"""Kernel modules that drive network cards and RDMA devices."""

_GPU_DRIVERS = r"(?:amdgpu|amdkfd|kfd|drm|powerplay|nvidia[\w-]*|nvlink|NVRM|nvswitch\w*)"

_INTERFACES = r"(?:en[ospxP]\w*|(?:eth|ib|bond|benic|hsn|rdma|roce)\w*\d\w*)"

_PCI = r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"

_ALTERNATIVES = {
    "gpu_driver": (
        rf"^\[?{_GPU_DRIVERS}\b",
        rf"^(?:\w+ {_PCI}: )?\[?{_GPU_DRIVERS}[: \]]",
    ),
    "nic_driver": (
        rf"^(?:infiniband|{NIC_DRIVERS})(?: \S+){{0,2}}: ",
        rf"^{NIC_DRIVERS}(?: {_PCI})? \w[^ ]*: ",
        r"^\[qed\w*:\d+\(",
        rf"\({NIC_DRIVERS}\): ",
    ),
    "pci_driver": (rf"^(?:pcieport|pciehp|vfio-pci|pci) {_PCI}\b",),
    "file_system": (
        r"^(?:Lustre|LustreError|LNet|LNetError|nfs\w*|NFS|RPC|ceph|libceph|XFS|EXT4-fs|BTRFS|JBD2"
        r"|Aborting journal|mmfs\w*|GPFS|beegfs\w*|wekafs\w*|fuse|overlayfs|SQUASHFS)"
        r"\b(?: \([^)]*\)| warning| error)?:? ",
        rf"^(?:nvme(?: nvme)?\d*|block nvme\w+|nvme {_PCI}|device-mapper|dm-\d+|md/?\w*)\b.{{0,30}}: ",
    ),
    "gpu": (
        rf"\b{_GPU_DRIVERS}\b",
        r"\bGPUs?\b",
        r"\bS?Xid\b",
        r"\b(?:HIP|CUDA|HSA|ROCm|ROCk|ROCr)\b",
        r"\b(?:hip|cuda)(?-i:[A-Z])\w+",  # hipErrorNoDevice
        r"\b(?:HIP|CUDA|HSA|AMDSMI|RSMI|NVML|hsa)_\w+",
        r"\b(?:amd|rocm|nvidia)-smi\b",
        r"(?:XGMI|WAFL|NVLink)",
        r"\bUTCL2\b|\b(?:mm|gfx|vm)hub|_PROTECTION_FAULT|\bAMD-Vi\b|\bERREVENT_\w+",
        r"\baca entry\[|\bACA\[|Accelerator Check",
        r"\b(?:SMU|MES|MEC|RLC|SDMA|PSP|HIQ|UMC|HBM)\b|\b(?:qcm|kiq) fence|\bcf state\b|\bsq_intr\b",
        r"\bqueues? preemption|\bRAS (?:records|poison|controller)",
        r"\bbad_page|\b(?:retired|bad) pages\b|\bpoison is (?:consumed|created)",
    ),
    "nic": (
        rf"\b{NIC_DRIVERS}\b",
        rf"\b{_INTERFACES}\b",
        r"^[a-z][\w-]* [0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7] \w[\w.]*: ",  # any driver's netdev_err
        r"\b(?:NETDEV WATCHDOG|NIC|HCA|LIFs?|FW heartbeat|RDMA|InfiniBand|bonding|CQE|RNR)\b",
        r"\bNET/\w+|\b[RN]CCL\b|\bnccl\w*|ibv_|\bIBV?_",
        r"\bPort\b.{0,12}\bLink\b|\b(?:Port|Physical) (?:state|link)\b",
        r"\b(?:ud|rc|dc|srd)_\w+\.c:\d+ ",  # UCX's transports over InfiniBand and RoCE
        r"\basync (?:fatal )?event\b|\btransport retry|\bUCX +(?:ERROR|FATAL)|\blibfabric:|\bOFI\b|_OFI_",
    ),
    "pcie": (
        r"\b(?:AER|DPC|EDR|PCI|pcie\w*|D3cold)\b|\baer_\w+|\bSlot\(|\[Hardware Error\]",
        r"\b[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b",
    ),
    "memory": (
        r"\b(?:EDAC|mce)\b|\[Hardware Error\]|\bMemory failure: 0x|\bhardware memory (?:corruption|error)",
    ),
    "slurm": (
        r"\b(?:srun|salloc|sbatch|slurm\w*|scontrol|sinfo|sacct|squeue|NODE_FAIL|StepId|JobId)\b",
        r"^(?:error: )?nodes? \S+ (?:is |are |has )?(?:not responding|DOWN|unexpectedly|rebooted)",
        r"\bsetting (?:node \S+ )?(?:to )?DOWN\b|\bnode failure\b|\bfailure of node\b|\bagent/is_node_resp\b",
        r"\bKernel panic - not syncing\b",
    ),
}


@cache
def names_of(hardware: str) -> re.Pattern[str]:
    """Return the expression that a line about this hardware matches.

    Args:
        hardware: `gpu`, `nic`, `pcie`, `memory` or `slurm`; or, for a line that begins with its driver's name,
            `gpu_driver`, `nic_driver`, `pci_driver` or `file_system`.

    Raises:
        KeyError: another word.
    """
    return re.compile("|".join(_ALTERNATIVES[hardware]), _FLAGS)
