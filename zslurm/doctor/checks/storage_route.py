"""Do data and checkpoints go over the storage network, and not over a rail?

A mount that is routed over a rail's NIC takes bandwidth from the gradients: steps are slow for no visible reason.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path

from zslurm.cluster.rails.map import rail_map
from zslurm.doctor.check import Check, Outcome, Status, failed, passed, unavailable, warned, worst
from zslurm.hardware.mounts import mount_of
from zslurm.hardware.node_sources import Sources
from zslurm.hardware.routes import addresses, interface_to


def check(sources: Sources) -> Outcome:
    """The runs directory and every further directory: mount, its server, the route there, the interface."""
    directories = dict.fromkeys([sources.task.directory, *sources.task.paths])
    outcomes = [_of(str(Path(directory).resolve()), sources) for directory in directories]
    problems = [outcome for outcome in outcomes if outcome.status is not Status.PASS]
    return worst(problems, "; ".join(dict.fromkeys(outcome.reason for outcome in outcomes)))


def _of(directory: str, sources: Sources) -> Outcome:
    mount = mount_of(directory, sources.root)
    if mount is None:
        return unavailable(f"{directory}: /proc/self/mounts cannot be read", "look whether /proc is mounted")
    if not mount.is_networked:
        return passed(f"{directory} is on {mount.kind}")
    remedy = "see `findmnt` and `ip route get SERVER`"
    if mount.server is None:
        return unavailable(f"{directory} is on {mount.kind} of {mount.source}, which names no server", remedy)
    found = [mount.server] if _is_address(mount.server) else addresses(mount.server, sources.root)
    interfaces = {interface_to(address, sources.root) for address in found}
    interface = min(interfaces - {None}, key=str, default=None)
    if interface is None:
        return unavailable(f"{directory}: no route to {mount.server} is known", remedy)
    rails = {
        netdev: f"rail {rail.index} ({nic.device})"
        for rail in rail_map(sources.facts, sources.cluster).rails
        for nic in sources.facts.nics
        if nic.device == rail.nic
        for netdev in nic.netdevs
    }
    wanted = sources.cluster.storage_interface
    way = f"{directory} ({mount.kind} of {mount.server}) is reached over {interface}"
    if interface in rails and interface != wanted:
        return failed(f"{way}, which is {rails[interface]}", "add a route to the server over the storage network")
    if wanted and interface != wanted:
        return warned(f"{way}, not {wanted}", "add a route, or correct cluster.storage_interface in the profile")
    return passed(way)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


CHECK = Check(
    "storage-route",
    "storage",
    "mounts of runs and data are reached over the storage network, not a rail",
    "node",
    check,
)
