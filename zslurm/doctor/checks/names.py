"""Do the nodes' names resolve, here and on every node?

A name that does not makes c10d's store try again for minutes. One that resolves to the loopback address on its own
node (Debian's `127.0.1.1`) makes rank 0 publish an address that the others cannot reach.
"""

from __future__ import annotations

import ipaddress

from zslurm.doctor.check import Check, Outcome, failed, passed, warned, worst
from zslurm.hardware.node_sources import Sources
from zslurm.hardware.routes import addresses
from zslurm.slurm.hostlist import compress

_REMEDY = "add them to DNS or /etc/hosts"


def check(sources: Sources) -> Outcome | None:
    """The names of the nodes that are checked together."""
    peers = sources.task.peers
    if not peers:
        return None
    found = {peer: addresses(peer, sources.root) for peer in peers}
    problems = []
    if unknown := [peer for peer, addresses in found.items() if not addresses]:
        problems.append(
            failed(f"{len(unknown)} of {len(peers)} names do not resolve: {compress(unknown)}", _REMEDY)
        )
    own = found.get(sources.node, [])
    if len(peers) > 1 and own and all(ipaddress.ip_address(address).is_loopback for address in own):
        remedy = "take the loopback line of the node's name out of /etc/hosts, or set cluster.interface"
        problems.append(warned(f"its own name resolves to {own[0]} here", remedy))
    return worst(problems, f"{len(peers)} names resolve") if problems else passed(f"{len(peers)} names resolve")


CHECK = Check("names", "network", "names of nodes resolve, and not to the loopback address", "both", check)
