"""Whether a node's page cache has room for what it reads from the storage: token bundles, and checkpoints."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from zslurm.checkpoint_tools.quantities import show_bytes
from zslurm.doctor.check import CheckOutcome, NodeData, check, passed, unavailable, warned
from zslurm.hardware import page_cache as cache
from zslurm.hardware.node_sources import Sources

_LITTLE = 0.5
"""Of the median room of the nodes: a node with less differs from them."""


def compare_room(nodes: Mapping[str, NodeData], _sources: Sources) -> Mapping[str, CheckOutcome]:
    """Find nodes with much less room than the others: something holds their memory."""
    rooms = {name: node.data["room"] for name, node in nodes.items() if "room" in node.data}
    if len(rooms) < 2:
        return {}
    usual = statistics.median(rooms.values())
    remedy = "look which processes, and which files in /dev/shm, hold memory of these nodes"
    return {
        name: warned(f"room for {show_bytes(room)}, half of the nodes have {show_bytes(usual)} or more", remedy)
        for name, room in rooms.items()
        if room < _LITTLE * usual
    }


@check("storage", "room in the page cache for bundles and the newest checkpoint", "node", compare=compare_room)
def page_cache(sources: Sources) -> CheckOutcome:
    """Compare available memory with the bundles in the data's directories and with the newest checkpoint.

    A cache that is smaller than the data is usual; reads then go to the storage, which `zslurm plan io` weighs.
    """
    room = cache.room(sources.root)
    if room is None:
        return unavailable(f"{sources.root / 'proc/meminfo'} cannot be read", "look whether /proc is mounted")
    stored, data = sources.task.stored, {"room": room}
    parts = [f"room for {show_bytes(room)}"]
    if size := stored.bundle_bytes:
        if size <= room:
            parts.append(f"the bundles ({show_bytes(size)}) fit: a second epoch reads memory")
        else:
            percent = 100 * (1 - room / size)
            parts.append(
                f"of the bundles ({show_bytes(size)}) {percent:.2g} % do not fit: they are read from storage"
            )
    if size := stored.checkpoint_bytes:
        parts.append(f"{stored.checkpoint} ({show_bytes(size)}) {'fits' if size <= room else 'does not fit'}")
    if not stored.bundle_bytes and not stored.checkpoint_bytes:
        parts.append("no bundles (--path) and no checkpoints (--directory) to compare it with")
    return passed("; ".join(parts), data=data)
