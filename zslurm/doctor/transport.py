"""Read which network RCCL or NCCL opened from its log, and compare it with the profile's.

The log is what NCCL_DEBUG=INFO prints with the subsystems INIT and NET. RCCL falls back to TCP without an error:
one line, `Using network Socket`, is all that shows it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from zslurm.checkpoint_tools.quantities import counted
from zslurm.cluster.rccl.rules import PLUGIN, ainic_transport, in_range
from zslurm.config.spec import ClusterSection
from zslurm.doctor.check import CheckOutcome, failed, warned

_MESSAGE = re.compile(r"\bNCCL (?:INFO|WARN) (.*)")
_NETWORK = re.compile(r"^Using network (.+?)\s*$")
_PLUGIN = re.compile(r"^NET/Plugin ?: Loaded net plugin (.+?)(?: \(v\d+\))?\s*$")
_DEVICES = re.compile(r"^NET/IB ?: Using\s(.*?)(?:; OOB .*)?$")
_DEVICE = re.compile(r"\[\d+\]([^\s:]+):\d+/(?:RoCE|IB)")
_CHANNEL = re.compile(r"^Channel \S+ ?: .* via NET/(.+)")
_OFI_PLUGIN = re.compile(r"^NET/OFI (?:Initializing|Using) (aws-ofi-[nr]ccl [\w.]+)")
_LIBFABRIC = re.compile(r"^NET/OFI Using Libfabric version ([\d.]+)")
_AINIC = "AINIC RoCEv2 optimizations enabled"
_TROUBLE = re.compile(
    r"^(NET/IB ?: No device found|NET/IB ?: No IP interface found|Failed to open libibverbs|"
    r"Failed to initialize NET plugin|NET/Plugin ?: (?:Could not find|Plugin load|No plugin found|Failed to find)|"
    r"NET/OFI No eligible providers|GDRDMA not enabled)"
)
# Names of RCCL's transport for AMD's NICs, in the order of its versions.
_BUILT_IN = ("IB-CAST", "IB-ROCM", "ROCM-IB")
# Names of AWS's plugin: up to 1.11 the first one, then all, of which it takes the one that NCCL_NET asks for
# (aws/aws-ofi-nccl#530).
_LIBFABRIC_NAMES = ("AWS LIBFABRIC", "LIBFABRIC", "OFI")


@dataclass(frozen=True)
class Opened:
    """The network in a rank's log.

    Attributes:
        network: such as `IB`, `IB-CAST`, `RCCL-ANP`, `AWS Libfabric`, `Socket`; None if the log does not show it.
        plugin: the network plugin that was loaded.
        devices: RDMA devices in use.
        ainic: whether RCCL's own transport for AMD's NICs is on.
        gpu_direct: whether every channel through the network reaches GPU memory; None if there is no channel.
        trouble: lines that show why another network was not opened.
        ofi_plugin: name and version of the plugin for libfabric, such as `aws-ofi-nccl 1.19.0`.
        libfabric: its version; None if the plugin does not print it.
    """

    network: str | None = None
    plugin: str | None = None
    devices: tuple[str, ...] = ()
    ainic: bool = False
    gpu_direct: bool | None = None
    trouble: tuple[str, ...] = ()
    ofi_plugin: str | None = None
    libfabric: str | None = None


def read_log(log: str) -> Opened:
    """Read the log of one rank; if a line comes several times, the last one holds."""
    network = plugin = ofi_plugin = libfabric = None
    devices: tuple[str, ...] = ()
    ainic, channels = False, []
    trouble: dict[str, None] = {}
    for message in (matched[1].strip() for line in log.splitlines() if (matched := _MESSAGE.search(line))):
        if match := _NETWORK.match(message):
            network = match[1]
        elif match := _PLUGIN.match(message):
            plugin = match[1]
        elif match := _OFI_PLUGIN.match(message):
            ofi_plugin = match[1]
        elif match := _LIBFABRIC.match(message):
            libfabric = match[1]
        elif match := _DEVICES.match(message):
            devices = tuple(device for name in _DEVICE.findall(match[1]) for device in name.split("+"))
        elif match := _CHANNEL.match(message):
            channels.append("/GDRDMA" in f"/{match[1]}")
        elif _AINIC in message:
            ainic = True
        elif _TROUBLE.match(message):
            trouble[message] = None
    gpu_direct = all(channels) if channels else None
    return Opened(network, plugin, devices, ainic, gpu_direct, tuple(trouble), ofi_plugin, libfabric)


def expected(cluster: ClusterSection, given: Mapping[str, str]) -> str:
    """Return in words which network the profile's ranks should open."""
    if given.get("NCCL_NET", "").upper() not in ("", "SOCKET"):
        return f"NCCL_NET={given['NCCL_NET']}"
    if cluster.network == "slingshot":
        return "AWS's plugin for libfabric (AWS Libfabric)"
    return {
        "plugin": f"AMD's plugin {PLUGIN} (RCCL-ANP)",
        "builtin": "RCCL's own transport for AMD's NICs (IB-CAST)",
        "generic": "RDMA (IB)",
        None: "RDMA",
    }[ainic_transport(cluster)]


def problems(opened: Opened, cluster: ClusterSection, given: Mapping[str, str]) -> list[CheckOutcome]:
    """Return what is wrong with the network that a rank opened; nothing if it is the profile's.

    The profile has GPUs and names its network; `given` is the environment of the rank.
    """
    wanted_network = expected(cluster, given)
    why = f" ({'; '.join(opened.trouble)})" if opened.trouble else ""
    if opened.network is None:
        reason = f"RCCL's log does not show which network it opened{why}"
        return [failed(reason, "run it by hand with NCCL_DEBUG=INFO")]
    if not _is_right(opened, cluster, given):
        used_network = "TCP sockets" if opened.network == "Socket" else opened.network
        asked = "`zslurm cluster env --explain` shows what RCCL is asked for"
        remedy = f"see the checks nics, rdma-abi, environment; {asked}"
        return [failed(f"RCCL opened {used_network}, not {wanted_network}{why}", remedy)]
    found_problems = []
    if opened.devices and (missing := [nic for nic in cluster.nics if nic not in opened.devices]):
        used = f"{len(cluster.nics) - len(missing)} of {counted(len(cluster.nics), 'NIC')}"
        reason = f"RCCL uses {used}, without {', '.join(missing)}"
        found_problems.append(failed(reason, "see the checks nics and environment (NCCL_IB_HCA)"))
    if opened.gpu_direct is False:
        reason = f"RCCL opened {opened.network} without GPUDirect: messages go through host memory{why}"
        found_problems.append(warned(reason, "see the check peermem"))
    if (opened.ofi_plugin or "").startswith("aws-ofi-rccl") and _may_be_new(opened.libfabric):
        reason = (
            f"the plugin is {opened.ofi_plugin}: with libfabric 1.22 and newer its runs hang, or their weights "
            "differ between ranks (ROCm/aws-ofi-rccl#16)"
        )
        remedy = "take aws-ofi-nccl, as HPE advises, or an older libfabric (`fi_info --version` shows yours)"
        found_problems.append(warned(reason, remedy))
    return found_problems


def _may_be_new(libfabric: str | None) -> bool:
    return libfabric is None or in_range(libfabric, ">=1.22")


def _is_right(opened: Opened, cluster: ClusterSection, given: Mapping[str, str]) -> bool:
    name = (opened.network or "").upper()
    if name == "SOCKET":
        return False
    if (asked := given.get("NCCL_NET", "").upper()) in _LIBFABRIC_NAMES:
        return name in _LIBFABRIC_NAMES
    if asked:
        return name == asked or (asked == "ROCM-IB" and name in _BUILT_IN)
    transport = ainic_transport(cluster)
    if transport == "plugin":
        return "ANP" in name
    if transport == "builtin":
        return name in _BUILT_IN or (name == "IB" and opened.ainic)
    # With another plugin (UCX, libfabric) the site has chosen; without one RDMA is RCCL's own.
    return name.startswith("IB") or (opened.plugin or opened.ofi_plugin) is not None
