"""Checks of storage: room in /tmp, a runs directory that all nodes share, and the route to it."""

from __future__ import annotations

import ipaddress
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from zslurm.checkpoint_tools.quantities import counted, show_bytes
from zslurm.cluster.rails.map import rail_map
from zslurm.cluster.rccl.environment import variables_of
from zslurm.core.files import read_text
from zslurm.doctor.check import (
    CheckOutcome,
    NodeData,
    Status,
    check,
    failed,
    first_few,
    passed,
    unavailable,
    warned,
    worst,
)
from zslurm.hardware.compiler_caches import directories, stale_locks
from zslurm.hardware.mounts import mount_of
from zslurm.hardware.node_sources import Sources
from zslurm.hardware.routes import addresses, interface_to

TOKEN = "from-login"
_GIB, _MIB = 1 << 30, 1 << 20
_LARGE = 16 * _MIB


@check("storage", "room in /tmp", "both")
def disk(sources: Sources) -> CheckOutcome:
    """Look at the free space and the free inodes for this user."""
    try:
        space = os.statvfs(sources.path("/tmp"))
    except OSError as error:
        return unavailable(f"/tmp: {error.strerror}")
    free, remedy = space.f_bavail * space.f_frsize, "remove old files from /tmp of these nodes"
    if not free or (space.f_files and not space.f_favail):
        return failed(f"/tmp is full ({counted(space.f_favail, 'inode')} free)", remedy)
    if free < sources.limits.tmp_gib * _GIB:
        return warned(f"/tmp has {show_bytes(free)} free, {sources.limits.tmp_gib:g} GiB wanted", remedy)
    return passed(f"{show_bytes(free)} free")


def compare_files(nodes: Mapping[str, NodeData], sources: Sources) -> Mapping[str, CheckOutcome]:
    """Check that what each node wrote is visible on the login node."""
    probe = Path(sources.task.probe)
    reason = f"{sources.task.directory}: what the node wrote is not visible here"
    return {
        name: failed(reason, "the file system is not shared, or its caches are stale")
        for name, node in nodes.items()
        if (written := node.data.get("file")) and read_text(probe / written) != sources.task.token
    }


@check("storage", "the runs directory is shared, writable and fast", "node", compare=compare_files)
def shared_files(sources: Sources) -> CheckOutcome:
    """Read the file of the login node, write a small file and fsync it, then a larger one.

    All nodes do so at the same time, as they do when they save a checkpoint.
    """
    directory, probe = sources.task.directory, sources.task.probe
    if not probe:
        return failed(f"{directory}: the login node cannot write there", "name another directory with --directory")
    probe_directory = Path(probe)
    try:
        seen = (probe_directory / TOKEN).read_text()
    except OSError as error:
        reason = f"{directory}: what the login node wrote is not visible: {error.strerror}"
        return failed(reason, "name a directory that all nodes share with --directory")
    if seen != sources.task.token:
        return failed(f"{directory}: another text is read than the login node wrote", "is the file system stale?")
    try:
        small = _write(probe_directory / f"{sources.node}.small", sources.task.token.encode())
        large = _write(probe_directory / f"{sources.node}.large", os.urandom(_MIB) * (_LARGE // _MIB))
    except OSError as error:
        return failed(f"{directory}: cannot be written: {error.strerror}", "look at the quota and at permissions")
    finally:
        with suppress(OSError):
            (probe_directory / f"{sources.node}.large").unlink()
    rate, limits = _LARGE / large, sources.limits  # bytes/s
    shown = f"{show_bytes(rate)}/s"
    remedy = "put runs on a faster file system; nodes that are slower than the others have a bad route"
    problems = []
    if small > limits.fsync_s:
        problems.append(warned(f"fsync of a small file took {small:.2g} s, over {limits.fsync_s:g}", remedy))
    if rate < limits.write_mib_s * _MIB:
        problems.append(warned(f"{shown} written, {limits.write_mib_s:g} MiB/s wanted", remedy))
    return worst(problems, f"fsync in {1000 * small:.0f} ms, {shown}", data={"file": f"{sources.node}.small"})


def _write(path: Path, content: bytes) -> float:
    """Write and fsync a file; returns the seconds it took."""
    began = time.monotonic()
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return max(time.monotonic() - began, 1e-6)


@check("storage", "mounts of runs and data are reached over the storage network, not a rail", "node")
def storage_route(sources: Sources) -> CheckOutcome:
    """Look at mount, server, route and interface of the runs directory and of every further directory.

    A mount that is routed over a rail's NIC takes bandwidth from the gradients: steps are slow for no visible
    reason.
    """
    directories = dict.fromkeys([sources.task.directory, *sources.task.paths])
    outcomes = [_route_to(str(Path(directory).resolve()), sources) for directory in directories]
    problems = [outcome for outcome in outcomes if outcome.status is not Status.PASS]
    return worst(problems, "; ".join(dict.fromkeys(outcome.reason for outcome in outcomes)))


def _route_to(directory: str, sources: Sources) -> CheckOutcome:
    mount = mount_of(directory, sources.root)
    if mount is None:
        return unavailable(f"{directory}: /proc/self/mounts cannot be read", "look whether /proc is mounted")
    if not mount.is_networked:
        return passed(f"{directory} is on {mount.kind}")
    remedy = "see `findmnt` and `ip route get SERVER`"
    if mount.server is None:
        return unavailable(f"{directory} is on {mount.kind} of {mount.source}, which names no server", remedy)
    servers = [mount.server] if _is_address(mount.server) else addresses(mount.server, sources.root)
    interfaces = {interface_to(address, sources.root) for address in servers}
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
    storage_interface = sources.cluster.storage_interface
    way = f"{directory} ({mount.kind} of {mount.server}) is reached over {interface}"
    if interface in rails and interface != storage_interface:
        return failed(f"{way}, which is {rails[interface]}", "add a route to the server over the storage network")
    if storage_interface and interface != storage_interface:
        return warned(
            f"{way}, not {storage_interface}", "add a route, or correct cluster.storage_interface in the profile"
        )
    return passed(way)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


@check("storage", "compilers of kernels write to the node, and no lock of them is stale", "node")
def compiler_caches(sources: Sources) -> CheckOutcome | None:
    """Look at the directories of Triton, AITER, torch, Inductor and MIOpen that a job on this node gets."""
    if not sources.has_gpus:
        return None
    environ = dict(sources.environ) | variables_of(sources.cluster)
    problems = []
    for name, directory in directories(environ).items():
        mount = mount_of(str(directory.resolve()), sources.root)
        if mount is not None and mount.is_networked:
            reason = f"{name}: {directory} is on {mount.kind}: the ranks of all nodes wait for each other's locks"
            problems.append(warned(reason, f"name a directory on the nodes for {name} in cluster.env"))
    if locks := stale_locks(environ, sources.root / "proc"):
        listed = first_few([str(lock) for lock in locks])
        reason = f"{counted(len(locks), 'lock')} that no process here holds: {listed}"
        problems.append(warned(reason, "remove them, unless a job on another node compiles there now"))
    return worst(problems, "no directory is shared, no lock is stale")
