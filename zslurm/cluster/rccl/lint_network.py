"""Check the variables of RCCL and NCCL that decide over the network: rails, GIDs, NICs, transport, GPUDirect."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from zslurm.cluster.rccl.finding import FindingFields, is_on, number
from zslurm.cluster.rccl.rules import (
    BUILT_IN_ROCM,
    PLUGIN,
    ROCE,
    ainic_transport,
    in_range,
    rccl_version,
    rules,
    vendor_of,
)
from zslurm.config.spec import ClusterSection

_ADDRESS = re.compile(r"\d+\.\d+\.\d+\.\d+(/\d+)?|[0-9a-fA-F]*:[0-9a-fA-F:]+")
_RAIL_TREES = "2.22.3"
"""The first RCCL with trees that stay on a rail."""


def rails(given: Mapping[str, str], cluster: ClusterSection) -> Iterator[FindingFields]:
    """Whatever sends from one rail to another, if no path leads there."""
    if not cluster.rails_only:
        return
    no_path = "there is no path from one rail to another"
    if is_on(given, "NCCL_PXN_DISABLE"):
        message = f"{no_path}: without PXN an all-to-all cannot reach the GPUs of other rails; set 0"
        yield "fault", "NCCL_PXN_DISABLE", message
    if number(given.get("NCCL_P2P_PXN_LEVEL")) == 0:
        yield "fault", "NCCL_P2P_PXN_LEVEL", f"{no_path}: 0 is send and receive without PXN; leave it unset"
    if is_on(given, "NCCL_P2P_DISABLE"):
        yield "fault", "NCCL_P2P_DISABLE", f"{no_path}, and PXN needs the GPUs of a node to reach each other"
    if is_on(given, "NCCL_CROSS_NIC"):
        yield "fault", "NCCL_CROSS_NIC", f"{no_path}; set 0"
    have = rccl_version(cluster)
    if is_on(given, "RCCL_DISABLE_RAIL_TREES") and (have is None or in_range(have, f">={_RAIL_TREES}")):
        message = f"{no_path}: without rail trees RCCL builds trees that cross rails on MI300X; leave it unset"
        yield "fault", "RCCL_DISABLE_RAIL_TREES", message


def gid(given: Mapping[str, str], cluster: ClusterSection) -> Iterator[FindingFields]:
    """Yield a GID that is not RoCE v2's."""
    index = given.get("NCCL_IB_GID_INDEX")
    if index is None or cluster.rdma_network not in ROCE or index == "-1":
        return
    usual = rules().gid_index[cluster.rdma_network]
    if cluster.gid_index is not None and index != str(cluster.gid_index):
        message = f"by the profile RoCE v2 has GID index {cluster.gid_index} (cluster.gid_index)"
        yield "fault", "NCCL_IB_GID_INDEX", message
    elif cluster.gid_index is None and index != str(usual):
        message = (
            f"RoCE v2 usually has GID index {usual} on {cluster.rdma_network}; if it is {index} here, set "
            f"cluster.gid_index: {index} (`zslurm cluster rails` shows it)"
        )
        yield "warning", "NCCL_IB_GID_INDEX", message


def devices(given: Mapping[str, str], cluster: ClusterSection) -> Iterator[FindingFields]:
    """NICs that are not the profile's, or too many or too few of them."""
    text = given.get("NCCL_IB_HCA", "")
    if not text or text.startswith("^"):
        return
    names = [entry.partition(":")[0] for entry in text.removeprefix("=").split(",") if entry]
    if not text.startswith("="):
        # A name without a number is meant as a prefix; `ionic_1` hardly ever is.
        numbered = [name for name in names if name[-1:].isdigit()]
        for name in numbered:
            others = [nic for nic in cluster.nics if nic.startswith(name) and nic not in names]
            if others:
                yield "fault", "NCCL_IB_HCA", f"{name} also takes {others[0]}; write ={text} for exactly these"
                return
        if numbered:
            also = f"{numbered[0]} also takes {numbered[0]}0 if there is one"
            yield "warning", "NCCL_IB_HCA", f"{also}; write ={text}"
            return
        names = [nic for nic in cluster.nics if nic.startswith(tuple(names))]
    unknown = [name for name in names if cluster.nics and name not in cluster.nics]
    missing = [nic for nic in cluster.nics if nic not in names]
    if unknown:
        message = f"{', '.join(unknown)}: not among the profile's NICs ({', '.join(cluster.nics)})"
        yield "fault", "NCCL_IB_HCA", message
    elif missing:
        yield "warning", "NCCL_IB_HCA", f"leaves out {', '.join(missing)} of the profile's NICs"


def network(given: Mapping[str, str], cluster: ClusterSection) -> Iterator[FindingFields]:
    """Yield what leads off the fast network."""
    if cluster.rdma_network and is_on(given, "NCCL_IB_DISABLE"):
        yield "fault", "NCCL_IB_DISABLE", "everything between nodes goes over TCP sockets"
    if cluster.rdma_network and given.get("NCCL_NET", "").lower() == "socket":
        yield "fault", "NCCL_NET", "everything between nodes goes over TCP sockets"
    interface = given.get("NCCL_SOCKET_IFNAME", "").removeprefix("^").removeprefix("=")
    if _ADDRESS.fullmatch(interface):
        yield "fault", "NCCL_SOCKET_IFNAME", "is an address; name an interface, such as =eth0"


def transport(given: Mapping[str, str], cluster: ClusterSection) -> Iterator[FindingFields]:
    """Another transport for Pollara NICs than the profile's RCCL has."""
    if ainic_transport(cluster) != "plugin":
        return
    before = f"RCCL before ROCm {BUILT_IN_ROCM}"
    if given.get("NCCL_NET_PLUGIN") == "none":
        message = (
            f"{before} has no built-in transport for Pollara, and falls back to generic RDMA; set {PLUGIN}, or "
            "cluster.rocm_version if the nodes have a newer ROCm"
        )
        yield "warning", "NCCL_NET_PLUGIN", message
    if is_on(given, "RCCL_AINIC_ROCE"):
        yield "note", "RCCL_AINIC_ROCE", f"{before} does not read it"


def gpu_direct(given: Mapping[str, str], cluster: ClusterSection) -> Iterator[FindingFields]:
    """Neither peermem nor dma-buf: NICs cannot reach the memory of GPUs."""
    if vendor_of(cluster) != "amd" or not cluster.rdma_network or cluster.peermem is not False:
        return
    through = "the nodes have no peermem, and every message between nodes goes through host memory; set 1"
    if number(given.get("NCCL_DMABUF_ENABLE")) == 0:
        yield "fault", "NCCL_DMABUF_ENABLE", f"without dma-buf there is no GPUDirect: {through}"
    elif "NCCL_DMABUF_ENABLE" not in given and not dmabuf_by_default(cluster):
        yield "fault", "NCCL_DMABUF_ENABLE", f"is off in RCCL before ROCm 7.12: {through}"


def dmabuf_by_default(cluster: ClusterSection) -> bool:
    """Return whether the profile's RCCL takes dma-buf without being asked; False if its version is unknown."""
    if cluster.rocm_version:
        return in_range(cluster.rocm_version, ">=7.12")
    return in_range(cluster.rccl_version, ">2.28.3")


def slingshot(given: Mapping[str, str], cluster: ClusterSection) -> Iterator[FindingFields]:
    """Yield what hangs, corrupts or slows a run on HPE Slingshot."""
    if cluster.network != "slingshot":
        return
    if given.get("FI_MR_CACHE_MONITOR") == "memhooks":
        yield "fault", "FI_MR_CACHE_MONITOR", "with memhooks, a second process group hangs; set userfaultfd"
    if _may_use_ll128(given.get("NCCL_PROTO")) and given.get("NCCL_NET_GDR_LEVEL") not in ("LOC", "0"):
        message = "LL128 with GPUDirect has delivered wrong numbers on this network; set ^LL128"
        yield "fault", "NCCL_PROTO", message
    if given.get("NCCL_CROSS_NIC") == "0":
        yield (
            "warning",
            "NCCL_CROSS_NIC",
            "0 is for rails that nothing joins; here every NIC reaches every other: set 1",
        )
    if given.get("NCCL_NET", "").lower() in ("socket", "ib"):
        yield "fault", "NCCL_NET", "the network is used through the plugin only: set AWS Libfabric"
    proto, minimum = given.get("FI_CXI_RDZV_PROTO"), given.get("FI_CXI_RDZV_GET_MIN")
    if proto == "alt_read" and minimum not in (None, "0"):
        yield "warning", "FI_CXI_RDZV_GET_MIN", "alt_read needs 0"


def _may_use_ll128(protocols: str | None) -> bool:
    """Return whether a value of NCCL_PROTO lets LL128 be used; unset, the library may."""
    if not protocols:
        return True
    names = {name.strip().upper() for name in protocols.removeprefix("^").split(",")}
    return ("LL128" in names) != protocols.startswith("^")


CHECKS = (rails, gid, devices, network, transport, gpu_direct, slingshot)
