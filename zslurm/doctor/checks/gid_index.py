"""Is there an address of RoCE v2 where the ranks will look for it?"""

from __future__ import annotations

from zslurm.cluster.rails.map import rail_map
from zslurm.doctor.check import Check, Outcome, failed, unavailable, worst
from zslurm.hardware.node_sources import Sources


def check(sources: Sources) -> Outcome | None:
    """GID of each rail's NIC at the index that ranks use: a wrong one is `status 4`, or a hang at the start."""
    ethernet = [nic for nic in sources.facts.nics if nic.link_layer == "Ethernet"]
    if not ethernet or sources.cluster.network == "infiniband":
        return None
    if not any(gid.type for nic in ethernet for gid in nic.gids.values()):
        return unavailable("no NIC tells the types of its GIDs", "look at gid_attrs below /sys/class/infiniband")
    remedy = "give the interface an address; or set cluster.gid_index in the profile (`show_gids` lists them)"
    rails = rail_map(sources.facts, sources.cluster)
    problems = [failed(problem.message, remedy) for problem in rails.problems_of("no-roce-v2")]
    indexes = sorted({rail.gid_index for rail in rails.rails if rail.gid_index is not None})
    listed = ", ".join(map(str, indexes))
    return worst(problems, f"RoCE v2 at GID index {listed}", must_match={"GID index of RoCE v2": listed or None})


CHECK = Check("gid-index", "network", "NICs have a RoCE v2 address at the GID index in use", "node", check)
