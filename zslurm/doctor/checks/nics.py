"""Are all network cards there and up?"""

from __future__ import annotations

from zslurm.checkpoint_tools.quantities import counted
from zslurm.cluster.rails.map import rail_map
from zslurm.doctor.check import Check, Outcome, Status, failed, unavailable, warned, worst
from zslurm.hardware.node_sources import Sources

_REMEDY = "look at the cable and the switch port (rdma link; ethtool); exclude the node meanwhile"


def check(sources: Sources) -> Outcome | None:
    """State and rate of each RDMA device that is a rail's, and firmware and driver of all."""
    cluster, nics = sources.cluster, sources.facts.nics
    if not cluster.nics and not cluster.network and not nics:
        return None
    firmware = sorted({f"{nic.driver or '?'} {nic.firmware or '?'}" for nic in nics})
    facts = {"NIC driver and firmware": ", ".join(firmware) or None}
    if not nics:
        place = sources.path("/sys/class/infiniband")
        if not sources.path("/sys/class").is_dir():
            return unavailable(f"{place} cannot be read", "look whether /sys is mounted", must_match=facts)
        return failed("no RDMA device is there", "look whether the NICs' driver is loaded", must_match=facts)
    found = rail_map(sources.facts, cluster).problems_of("missing-nic", "nic-down", "slow")
    problems = [(failed if problem.incomplete else warned)(problem.message, _REMEDY) for problem in found]
    rails = len(cluster.nics) or sum(nic.state == "ACTIVE" for nic in nics)
    return worst(problems, f"{counted(rails, 'NIC is', 'NICs are')} up", must_match=facts)


CHECK = Check(
    "nics", "network", "NICs of all rails are there, up and at full rate", "node", check, inconsistent=Status.WARN
)
