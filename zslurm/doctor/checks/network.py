"""Checks of the network: names, NICs and rails, the way to GPU memory, and the variables of RCCL."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import replace

from zslurm.checkpoint_tools.quantities import counted, show_duration
from zslurm.cluster.rails.map import rail_map
from zslurm.cluster.rails.types import Rail
from zslurm.cluster.rccl.conf_files import read_conf
from zslurm.cluster.rccl.environment import FIND_OUT, left_out_lines, variables_of
from zslurm.cluster.rccl.finding import RcclFinding
from zslurm.cluster.rccl.lint import concerns_us, lint, overridden
from zslurm.cluster.rccl.lint_network import dmabuf_by_default
from zslurm.cluster.rccl.rules import ROCE, vendor_of
from zslurm.core.files import read_text
from zslurm.doctor.check import CheckOutcome, Status, check, failed, passed, unavailable, warned, worst
from zslurm.hardware.command import CommandHung
from zslurm.hardware.lossless import read_classes
from zslurm.hardware.node_sources import Sources
from zslurm.hardware.routes import addresses, reverse_lookup_s
from zslurm.slurm.hostlist import compress

# Of libibverbs (rdma-core, libibverbs/init.c), and of ibv_devices.
_REFUSED = re.compile(r"Driver (\S+) does not support the kernel ABI of (\d+) \(supports (\d+) to (\d+)\)")
_LISTED = re.compile(r"^\s+(\S+)\s+[0-9a-f]{16}\s*$", re.MULTILINE)


@check("network", "names of nodes resolve, and not to the loopback address", "both")
def names(sources: Sources) -> CheckOutcome | None:
    """Look up the names of the nodes that are checked together.

    A name that does not resolve makes c10d's store try again for minutes. One that resolves to the loopback
    address on the node itself (Debian's `127.0.1.1`) makes rank 0 publish an address that others cannot reach.
    """
    peers = sources.task.peers
    if not peers:
        return None
    by_peer = {peer: addresses(peer, sources.root) for peer in peers}
    problems = []
    if unknown := [peer for peer, addresses in by_peer.items() if not addresses]:
        reason = f"{len(unknown)} of {len(peers)} names do not resolve: {compress(unknown)}"
        problems.append(failed(reason, "add them to DNS or /etc/hosts"))
    own_addresses = by_peer.get(sources.node, [])
    if (
        len(peers) > 1
        and own_addresses
        and all(ipaddress.ip_address(address).is_loopback for address in own_addresses)
    ):
        remedy = "take the loopback line of the node's name out of /etc/hosts, or set cluster.interface"
        problems.append(warned(f"its own name resolves to {own_addresses[0]} here", remedy))
    return worst(problems, f"{len(peers)} names resolve")


_LOOKED_UP, _LOOKUP_LIMIT_S = 4, 3.0
_SLOW_LOOKUP_S = 0.1
"""Longest time in which the name of an address should be known."""


@check("network", "the names of nodes' addresses are looked up at once", "node")
def reverse_names(sources: Sources) -> CheckOutcome | None:
    """Time reverse look-ups of some other nodes' addresses.

    torch's store on rank 0 makes one for each connection that it accepts, in the only thread that answers ranks. A
    look-up counts as slow if it is so twice: a packet may be lost.
    """
    if not sources.path("/etc/resolv.conf").exists():  # no DNS is asked
        return None
    others = [peer for peer in sources.task.peers if peer != sources.node]
    found_addresses = [address for peer in others for address in addresses(peer, sources.root)[:1]]
    asked = [address for address in found_addresses if not ipaddress.ip_address(address).is_loopback][:_LOOKED_UP]
    if not asked:
        return None
    for address in asked:
        seconds = _LOOKUP_LIMIT_S
        for _ in range(2):
            seconds = min(seconds, reverse_lookup_s(address, _LOOKUP_LIMIT_S))
            if seconds <= _SLOW_LOOKUP_S:
                break
        else:
            ranks = len(sources.task.peers) * (sources.task.ranks_per_node or sources.cluster.gpus_per_node or 1)
            least = "more than " if seconds == _LOOKUP_LIMIT_S else ""
            reason = (
                f"looking up the name of {address} takes {least}{seconds:.1f} s; rank 0's store does so for "
                f"each connection, one after the other: {least}{show_duration(ranks * seconds)} for "
                f"{counted(ranks, 'rank')}"
            )
            remedy = (
                "have DNS answer at once for the nodes' addresses, with a name or that there is none; until then "
                "set RES_OPTIONS: timeout:1 attempts:1 in cluster.env"
            )
            return warned(reason, remedy)
    return passed(f"{counted(len(asked), 'address is', 'addresses are')} looked up at once")


@check("network", "NICs of all rails are there, up and at full rate", "node", inconsistent=Status.WARN)
def nics(sources: Sources) -> CheckOutcome | None:
    """Look at state and rate of each RDMA device that is a rail's, and at firmware and driver of all."""
    cluster, present = sources.cluster, sources.facts.nics
    if not cluster.nics and not cluster.rdma_network and not present:
        return None
    firmware = sorted({f"{nic.driver or '?'} {nic.firmware or '?'}" for nic in present})
    facts = {"NIC driver and firmware": ", ".join(firmware) or None}
    if not present:
        if not sources.path("/sys/class").is_dir():
            reason = f"{sources.path('/sys/class/infiniband')} cannot be read"
            return unavailable(reason, "look whether /sys is mounted", must_match=facts)
        return failed("no RDMA device is there", "look whether the NICs' driver is loaded", must_match=facts)
    remedy = "look at the cable and the switch port (rdma link; ethtool); exclude the node meanwhile"
    listed = rail_map(sources.facts, cluster).problems_of("missing-nic", "nic-down", "slow")
    problems = [(failed if problem.incomplete else warned)(problem.message, remedy) for problem in listed]
    rails = len(cluster.nics) or sum(nic.state == "ACTIVE" for nic in present)
    return worst(problems, f"{counted(rails, 'NIC is', 'NICs are')} up", must_match=facts)


@check("network", "NICs have a RoCE v2 address at the GID index in use", "node")
def gid_index(sources: Sources) -> CheckOutcome | None:
    """Look for RoCE v2 at the GID index that ranks use: a wrong one is `status 4`, or a hang at the start."""
    ethernet = [nic for nic in sources.facts.nics if nic.link_layer == "Ethernet"]
    if not ethernet or sources.cluster.network == "infiniband":
        return None
    if not any(gid.type for nic in ethernet for gid in nic.gids.values()):
        return unavailable("no NIC shows the types of its GIDs", "look at gid_attrs below /sys/class/infiniband")
    remedy = "give the interface an address; or set cluster.gid_index in the profile (`show_gids` lists them)"
    rails = rail_map(sources.facts, sources.cluster)
    problems = [failed(problem.message, remedy) for problem in rails.problems_of("no-roce-v2")]
    indexes = sorted({rail.gid_index for rail in rails.rails if rail.gid_index is not None})
    listed = ", ".join(map(str, indexes))
    return worst(problems, f"RoCE v2 at GID index {listed}", must_match={"GID index of RoCE v2": listed or None})


@check("network", "RCCL sends in the class in which the RoCE fabric drops nothing", "node")
def lossless(sources: Sources) -> CheckOutcome | None:
    """Read the lossless class from the NICs' tools; in another class a run is slow, and nothing says why."""
    if sources.cluster.network not in ROCE or not sources.facts.nics:
        return None
    classes = read_classes(sources.run, sources.facts.nics, sources.limits.canary_s)
    used = (variables_of(sources.cluster) | dict(sources.environ)).get("NCCL_IB_TC")
    facts = {"lossless class": ", ".join(sorted({str(read) for read in classes.values()})) or None}
    if not classes:
        reason = "neither nicctl nor dcb nor mlnx_qos shows a user the class"
        return unavailable(reason, "ask the site, and set cluster.traffic_class: 4 x DSCP", must_match=facts)
    problems = []
    for name, read in classes.items():
        if read is None:
            remedy = "have flow control turned on for the priority of RoCE"
            problems.append(warned(f"{name}: every class may be dropped", remedy))
        elif used != str(read):
            sends = f"NCCL_IB_TC is {used or 'not set'}"
            remedy = f"set cluster.traffic_class: {read} in the profile"
            problems.append(warned(f"{name}: the lossless class is {read}, and {sends}", remedy))
    return worst(problems, f"NCCL_IB_TC={used} is lossless", must_match=facts)


@check("network", "GPU i uses the NIC of rail i, on every node", "node")
def rails(sources: Sources) -> CheckOutcome | None:
    """Look at the pairing of GPUs and NICs on this node; that it is the same elsewhere is found by comparing."""
    if not sources.facts.gpus or not sources.facts.nics:
        return None
    rail_readings = rail_map(sources.facts, sources.cluster)
    paired = [rail for rail in rail_readings.rails if rail.nic_pci and rail.gpus]
    if not paired:
        return unavailable("no GPU can be paired with a NIC", "list cluster.nics in the profile")
    remedy = "see `zslurm doctor --json`; list cluster.nics and gpu_nics in the profile as the cables run"
    problems = [
        (failed if problem.incomplete else warned)(problem.message, remedy)
        for problem in rail_readings.problems_of("no-near-nic", "shared-nic", "permuted", "different")
    ]
    fine = f"{counted(len(paired), 'rail')}, by {'the profile' if rail_readings.source == 'profile' else 'PCIe'}"
    return worst(problems, fine, must_match={f"rail {rail.index}": _drawn(rail) for rail in paired})


def _drawn(rail: Rail) -> str:
    gpus = "+".join(map(str, rail.gpus))
    return f"GPU {gpus} ({rail.gpu_pci[0]}) - {rail.nic} ({rail.nic_pci})"


@check("network", "NICs reach GPU memory by peermem or dma-buf", "node")
def peermem(sources: Sources) -> CheckOutcome | None:
    """Look at the kernel's peer memory and RCCL's switch for dma-buf, if AMD GPUs have a fast network.

    If neither works RCCL trains all the same, and copies every message between nodes through host memory.
    """
    cluster, has_peermem = sources.cluster, sources.facts.peermem
    if vendor_of(cluster) != "amd" or not cluster.rdma_network or not sources.facts.gpus:
        return None
    if has_peermem is None:
        return unavailable("neither memory_peers in sysfs nor /proc/kallsyms shows whether there is peermem")
    facts = {"peermem": "there" if has_peermem else "missing"}
    if has_peermem and cluster.peermem is False:
        return warned("peermem is there, cluster.peermem is false", "set cluster.peermem: true", must_match=facts)
    if has_peermem:
        return passed("peermem is there", must_match=facts)
    dmabuf = (variables_of(cluster) | dict(sources.environ)).get("NCCL_DMABUF_ENABLE")
    stated = cluster.rocm_version or cluster.rccl_version
    cluster_known = cluster if stated else cluster.model_copy(update={"rocm_version": sources.facts.rocm})
    if dmabuf == "0" or (dmabuf is None and not dmabuf_by_default(cluster_known)):
        shown = "not set" if dmabuf is None else dmabuf
        reason = f"no peermem, and NCCL_DMABUF_ENABLE is {shown}: messages go through host memory"
        remedy = "set cluster.peermem: false (the rules then turn dma-buf on), or have amdgpu's peermem loaded"
        return failed(reason, remedy, must_match=facts)
    return passed("no peermem; RCCL takes dma-buf", must_match=facts)


@check("network", "NICs of Slingshot leave rendezvous to the protocol of the ranks", "node")
def slingshot(sources: Sources) -> CheckOutcome | None:
    """Look at each NIC's rdzv_get_en, which must be off for alt_read: libfabric says nothing if it is on.

    Slurm turns it off for a job with --network=disable_rdzv_get (SchedMD/slurm, switch_hpe_slingshot.h).
    """
    cluster, present = sources.cluster, sources.facts.cxi
    if cluster.network != "slingshot":
        return None
    if not present:
        remedy = "look whether the NICs' driver is loaded (cxi_ss1), and whether the nodes have this network"
        return failed("no NIC of Slingshot is there (/sys/class/cxi)", remedy)
    fine = f"{counted(len(present), 'NIC is', 'NICs are')} there"
    if (variables_of(cluster) | dict(sources.environ)).get("FI_CXI_RDZV_PROTO") != "alt_read":
        return passed(fine)
    state = {
        nic.device: read_text(sources.path(f"/sys/class/cxi/{nic.device}/device/properties/rdzv_get_en"))
        for nic in present
    }
    default = "FI_CXI_RDZV_PROTO: default in cluster.env"
    if unknown := sorted(device for device, value in state.items() if value is None):
        reason = f"{', '.join(unknown)}: the driver shows no rdzv_get_en, which must be off for alt_read"
        return warned(reason, f"ask the site for newer software of HPE for its hosts, or set {default}")
    if on := sorted(device for device, value in state.items() if value != "0"):
        reason = f"{', '.join(on)}: rdzv_get_en is on, and alt_read is not used"
        remedy = f"start the job with --network=disable_rdzv_get; if it was, ask the site, or set {default}"
        return warned(reason, remedy)
    return passed(f"{fine}, with rdzv_get_en off")


@check("network", "the RDMA library fits the kernel's driver", "both", inconsistent=Status.WARN)
def rdma_abi(sources: Sources) -> CheckOutcome | None:
    """Compare the devices that libibverbs lists with the kernel's.

    A library that is older than the driver rejects every device, RCCL falls back to a socket, and the job dies of
    "Connection refused" (AMD-AGI/Primus#887). libibverbs prints one warning, and lists no device.
    """
    devices = sources.facts.nics
    if not devices:
        return None
    abis = sorted({f"{nic.driver or nic.device} {nic.abi}" for nic in devices if nic.abi is not None})
    facts = {"RDMA ABI": ", ".join(abis) or None}
    try:
        done = sources.run("ibv_devices", timeout_s=sources.limits.canary_s)
    except CommandHung as error:
        remedy = "exclude the node; it needs a reboot"
        return failed(f"{error}: an RDMA driver is wedged", remedy, must_match=facts)
    if done is None:
        kernel = f" (the kernel has {', '.join(abis)})" if abis else ""
        reason = f"ibv_devices is not on PATH, so the library cannot be asked{kernel}"
        return unavailable(reason, "install rdma-core's ibverbs-utils", must_match=facts)
    if refused := _REFUSED.search(done.err + done.out):
        driver, kernel, low, high = refused.groups()
        reason = (
            f"the library's {driver} has ABI {low} to {high}, the kernel's {kernel}: no {driver} NIC is usable"
        )
        remedy = "install the RDMA library that came with the driver, in the container too"
        return failed(reason, remedy, must_match=facts)
    listed = _LISTED.findall(done.out)
    if missing := [nic.device for nic in devices if nic.device not in listed]:
        listed_share = f"{len(devices) - len(missing)} of {len(devices)}"
        reason = f"the library lists {listed_share} RDMA devices: not {', '.join(missing)}"
        return failed(reason, "install the provider library of these NICs", must_match=facts)
    return passed(f"the library knows all {len(devices)} RDMA devices", must_match=facts)


@check("network", "dead, misspelt or contradictory variables of RCCL", "login")
def environment(sources: Sources) -> CheckOutcome | None:
    """Check the variables that a job would get from here: from this shell and from the profile's rules."""
    if not sources.cluster.gpus_per_node:
        return None
    job = variables_of(sources.cluster)
    variables = {**sources.environ, **job}
    conf = read_conf(variables, sources.cluster, sources.root)
    findings = [*lint(variables, sources.cluster, conf), *overridden(sources.environ, job)]
    remedy = f"complete the profile {FIND_OUT}; or set it in cluster.env"
    problems = _of_findings(findings, "`zslurm cluster env --explain` shows what a job gets")
    problems += [warned(line, remedy) for line in left_out_lines(sources.cluster)]
    return worst(problems, f"{counted(len(job), 'variable is', 'variables are')} set, none is wrong")


@check("network", "files that set variables of RCCL behind the environment", "node", inconsistent=Status.WARN)
def rccl_conf(sources: Sources) -> CheckOutcome | None:
    """Read ~/.rccl.conf, /etc/rccl.conf and NCCL_CONF_FILE; what they set must be the same on all nodes."""
    if not sources.cluster.gpus_per_node:
        return None
    variables = {**sources.environ, **variables_of(sources.cluster)}
    conf = read_conf(variables, sources.cluster, sources.root)
    conf = replace(conf, settings=tuple(setting for setting in conf.settings if concerns_us(setting.name)))
    if not conf.settings and conf.unreadable is None:
        return passed("no file sets variables of RCCL", must_match={"files of RCCL": "none"})
    looked_at = {setting.name for setting in conf.settings} | {"NCCL_CONF_FILE"}
    findings = [finding for finding in lint(variables, sources.cluster, conf) if finding.name in looked_at]
    problems = _of_findings(findings, "move what is wanted to cluster.env, where a dry run shows it")
    listed = ", ".join(f"{setting.name}={setting.value}" for setting in conf.settings)
    return worst(problems, f"files set {listed}", must_match={"files of RCCL": listed})


def _of_findings(findings: Iterable[RcclFinding], remedy: str) -> list[CheckOutcome]:
    return [(failed if finding.level == "fault" else warned)(finding.line, remedy) for finding in findings]
