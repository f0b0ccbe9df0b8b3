"""The fabric of a profile as a picture for the terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zslurm.checkpoint_tools.quantities import counted
from zslurm.cli.terminal.screen import Line
from zslurm.cluster.rails.fabric import Fabric, fabric_of
from zslurm.cluster.rails.placement import place
from zslurm.config.fabric import FabricSection, SliceSection
from zslurm.slurm.hostlist import compress, compress_ranges, expand, split_hostlist

_GOOD, _QUIET, _BOLD = "green", "dim", "bold"


def draw_fabric(section: FabricSection, width: int | None) -> Iterator[Line]:
    """Draw spines, leaf slices and their nodes, and the ring of ranks over all nodes.

    Args:
        section: of the profile.
        width: columns that a line may have; None for as many as it needs. Names are never broken.
    """
    fabric = fabric_of(section)
    if fabric is None:
        unknown = "which nodes are on which slice is not listed (cluster.fabric.slices)"
        yield [("fabric by the profile", _BOLD), (f": {section.summary}; {unknown}", "")]
        return
    leaves = {part.leaf for part in section.slices}
    counts = [
        counted(len(fabric.slices), "node"),
        counted(fabric.rails, "rail"),
        counted(sum(len(part.rails) for part in section.slices), "slice"),
        counted(len(leaves), "leaf switch", "leaf switches"),
    ]
    yield [("fabric by the profile", _BOLD), (f": {', '.join(counts[:-1])} of {counts[-1]}", "")]
    if section.summary:
        yield [(f"  {section.summary}", _QUIET)]
    yield [(f"  {counted(section.spines, 'spine')}" if section.spines else "  spines", _BOLD)]
    yield from _draw_slices(section.slices, width)
    yield from _draw_ring(fabric, section, width)


def _draw_slices(parts: tuple[SliceSection, ...], width: int | None) -> Iterator[Line]:
    rails = [f"{'rail' if len(part.rails) == 1 else 'rails'} {compress_ranges(part.rails)}" for part in parts]
    wide, wider = max(len(part.leaf) for part in parts), max(map(len, rails))
    for number, (part, carried) in enumerate(zip(parts, rails, strict=True)):
        last = number == len(parts) - 1
        before = f"  {'└' if last else '├'}─ {part.leaf:<{wide}} ── {carried:<{wider}} ── "
        room = None if width is None else max(width - len(before), 1)
        first, *others = split_hostlist(expand(part.nodes), room)
        yield [(before[:5], _QUIET), (part.leaf.ljust(wide), _BOLD), (before[5 + wide :], _GOOD), (first, "")]
        for other in others:
            yield [((" " if last else "│").rjust(3).ljust(len(before)), _QUIET), (other, "")]


def _draw_ring(fabric: Fabric, section: FabricSection, width: int | None) -> Iterator[Line]:
    whole = place(fabric, section, list(fabric.slices))
    yield [("  ring of ranks over all nodes, with the rails that pass a spine on the way", _BOLD)]
    groups: list[list[str]] = []
    for node in whole.nodes:
        if groups and fabric.apart(groups[-1][-1], node) == 0:
            groups[-1].append(node)
        else:
            groups.append([node])
    for number, group in enumerate(groups):
        following = groups[(number + 1) % len(groups)][0]
        crossing = fabric.apart(group[-1], following) if len(groups) > 1 else 0
        for line in split_hostlist(group, None if width is None else max(width - 4, 1)):
            yield [(f"    {line}", "")]
        if len(groups) > 1:
            back = " back to the first" if number == len(groups) - 1 else ""
            yield [(f"    │ {counted(crossing, 'rail')} of {fabric.rails}{back}", _GOOD)]
    yield [(f"  {whole.line()}", "")]
    if section.oversubscription is not None:
        yield [(f"  a full slice is oversubscribed {section.oversubscription:.3g}:1", "")]


def fabric_as_json(section: FabricSection) -> dict[str, Any] | None:
    """Return the fabric and the ring over all nodes; None where the profile lists no slices."""
    fabric = fabric_of(section)
    if fabric is None:
        return None
    groups = [compress(members) for members in fabric.groups(list(fabric.slices)).values()]
    ring = place(fabric, section, list(fabric.slices)).as_json()
    return {**section.model_dump(mode="json"), "rails": fabric.rails, "groups": groups, "ring": ring}
