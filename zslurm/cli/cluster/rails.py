"""`zslurm cluster rails`: rail maps and the fabric as pictures for the terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Annotated, Any

from typer import Option

from zslurm.checkpoint_tools.quantities import counted
from zslurm.cli.options import Cluster, Json
from zslurm.cli.terminal.screen import Line, columns_of_terminal, print_styled
from zslurm.cluster.rails.fabric import Fabric, fabric_of
from zslurm.cluster.rails.map import rail_map
from zslurm.cluster.rails.placement import place
from zslurm.cluster.rails.read_nodes import RailReadings, identical, read_rails
from zslurm.cluster.rails.types import Rail, RailMap
from zslurm.cluster.site import load_site
from zslurm.config.fabric import FabricSection, SliceSection
from zslurm.config.spec import ClusterSection
from zslurm.core.console import print_json
from zslurm.core.errors import CheckFailed, ConfigError, NotFound
from zslurm.hardware.facts import read_facts
from zslurm.slurm.hostlist import compress, compress_ranges, expand, split_hostlist
from zslurm.submit.checks.fabric import missing_slices


def rails(
    cluster: Cluster = None,
    nodes: Annotated[int | None, Option(metavar="N", min=1, help="Ask so many nodes of Slurm's choice.")] = None,
    nodelist: Annotated[str | None, Option(metavar="HOSTLIST", help="Ask exactly these nodes.")] = None,
    here: Annotated[bool, Option("--here", help="Look at this machine, without Slurm.")] = False,
    fabric: Annotated[
        bool, Option("--fabric", help="Draw the profile's leaf slices and the ring of ranks only; ask no node.")
    ] = False,
    timeout: Annotated[
        float, Option(metavar="SECONDS", min=1, help="Wait no longer for nodes, the queue included.")
    ] = 300,
    json: Json = False,
) -> None:
    """Draw which GPU sends through which NIC, and what is wrong.

    Rails that are incomplete or differ between nodes are marked; the switches behind are drawn, too.

    A short job on one node, unless --nodes or --nodelist name more. Exit code 5 if a rail is incomplete or a
    node does not answer.

    Example: zslurm cluster rails --nodes 4
    """
    if sum((nodes is not None, nodelist is not None, here, fabric)) > 1:
        raise ConfigError("--nodes, --nodelist, --here and --fabric exclude each other")
    names = None if nodelist is None else expand(nodelist)
    if names == []:
        raise ConfigError("--nodelist: names no node")
    site = load_site(cluster)
    section = site.cluster.fabric
    if fabric:
        if not section.summary and not section.slices:
            raise NotFound(
                f"{site.cluster.name}: the profile describes no fabric (cluster.fabric); docs/rails.md shows how"
            )
        if json:
            print_json({"fabric": fabric_as_json(section)})
        else:
            print_styled(_fabric(site.cluster))
        return
    if here or site.cluster.launcher == "local":
        facts = read_facts()
        readings = RailReadings((rail_map(facts, site.cluster),), {}, ())
    else:
        options = [*site.submit_options(), "--time=5"]
        readings = read_rails(
            site.cluster, nodes=names or (), count=nodes or 1, options=options, timeout_s=timeout
        )
    if json:
        print_json(as_json(readings) | {"fabric": fabric_as_json(section)})
    else:
        print_styled(draw(readings, columns_of_terminal()))
        if section.slices:
            print_styled([[], *_fabric(site.cluster)])
    if faulty := [*readings.incomplete, *readings.unanswered]:
        raise CheckFailed(f"rails are incomplete or unknown on {compress(faulty)}")


_GOOD, _WARN, _BAD, _QUIET, _BOLD = "green", "yellow", "bold red", "dim", "bold"


def _fabric(cluster: ClusterSection) -> Iterator[Line]:
    """Draw the profile's fabric, and what its slices leave out."""
    yield from draw_fabric(cluster.fabric, columns_of_terminal())
    if cluster.fabric.slices:
        yield from ([(f"  warning: {line}", _WARN)] for line in missing_slices(cluster))


def draw(found: RailReadings, width: int | None = None) -> Iterator[Line]:
    """Draw every distinct map once, with its nodes; then what differs, and which nodes did not answer.

    With `width` no list of nodes has more columns.
    """
    for number, group in enumerate(identical(found.maps)):
        if number:
            yield []
        yield from _draw_group(group, width)
    if found.differences or found.unanswered:
        yield []
    for difference in found.differences:
        yield [(str(difference), _WARN)]
    for node, why in found.unanswered.items():
        yield [(f"{node}: no answer: ", _BAD), (why, "")]


def _draw_group(group: Sequence[RailMap], width: int | None) -> Iterator[Line]:
    first_map = group[0]
    source = "by the profile" if first_map.source == "profile" else "by PCIe distance"
    *before, nodes = split_hostlist((host_names.node for host_names in group), width)
    for hosts in before:
        yield [(hosts, _BOLD)]
    yield [
        (nodes, _BOLD),
        (f": {counted(len(group), 'node')}, {counted(len(first_map.rails), 'rail')} {source}", ""),
    ]
    widths = _widths(first_map.rails, width)
    bad = {problem.rail for problem in first_map.problems if problem.incomplete}
    odd = {problem.rail for problem in first_map.problems}
    by_numa = sorted(first_map.rails, key=lambda rail: (rail.numa is None, rail.numa or 0, rail.index))
    for numa, rails in groupby(by_numa, key=lambda rail: rail.numa):
        yield [("  NUMA node unknown" if numa is None else f"  NUMA node {numa}", _QUIET)]
        for rail in rails:
            style = _BAD if rail.index in bad else _WARN if rail.index in odd else _GOOD
            yield _draw_rail(rail, widths, style)
    if first_map.others:
        yield [(f"  no rail: {', '.join(first_map.others)}", _QUIET)]
    for problem in first_map.problems:
        yield [("  incomplete: " if problem.incomplete else "  warning: ", _BAD if problem.incomplete else _WARN),
               (problem.message, "")]  # fmt: skip


def _cells(rail: Rail) -> list[str]:
    gpus = ",".join(map(str, rail.gpus))
    rate = f"{rail.rate_gbps:g} Gb/s" if rail.rate_gbps is not None else ""
    return [
        f"rail {rail.index}",
        f"GPU {gpus}" if gpus else "no GPU",
        " ".join(pci for pci in rail.gpu_pci if pci),
        f"{rail.near} {rail.bridge or ''}".strip() if rail.near else "",
        rail.nic or "no NIC",
        rail.nic_pci or "",
        rail.netdev or "",
        rail.state or ("missing" if rail.nic_pci is None else "unknown"),
        rate,
        f"GID {rail.gid_index}" if rail.gid_index is not None else "",
    ]


def _draw_rail(rail: Rail, widths: Sequence[int], style: str) -> Line:
    """Draw `rail 0  GPU 0 0000:05:00.0 ──[switch 0000:00:01.1]── ionic_0 0000:06:00.0 eth1  ACTIVE  400 Gb/s`."""
    name, gpu, gpu_pci, near, nic, nic_pci, netdev, state, rate, gid = (
        cell.ljust(size) if size else "" for cell, size in zip(_cells(rail), widths, strict=True)
    )
    length = widths[_NEAR] + 6 if widths[_NEAR] else 2
    wire = f"──[{near.rstrip()}]──" if near.strip() else "──"
    wire = wire.ljust(length, "─") if rail.near else ("─ " * length)[:length]
    return [
        (f"    {name}  ", _QUIET),
        (f"{gpu} ", _BOLD),
        (f"{gpu_pci} " if gpu_pci else "", _QUIET),
        (f"{wire} ", style),
        (f"{nic} ", _BOLD),
        (f"{nic_pci} " if nic_pci else "", _QUIET),
        (f"{netdev}  " if netdev else " ", _QUIET),
        (f"{state}  ", style),
        (f"{rate}  {gid}".rstrip(), ""),
    ]


_GPU_PCI, _NEAR, _NIC_PCI, _NETDEV, _GID = 2, 3, 5, 6, 9
_DROPPED = (
    (),
    (_GPU_PCI, _NIC_PCI),
    (_GPU_PCI, _NIC_PCI, _NETDEV, _GID),
    (_GPU_PCI, _NEAR, _NIC_PCI, _NETDEV, _GID),
)
"""Cells of a rail that are left out, the first of these that fits the terminal; the last if none does."""
_AROUND = 24
"""Columns of a rail that are not its cells."""


def _widths(rails: Sequence[Rail], width: int | None) -> list[int]:
    """Return the width of each cell of a rail; 0 for one that is left out."""
    natural = [max(map(len, column)) for column in zip(*map(_cells, rails), strict=True)]
    widths = natural
    for dropped in _DROPPED:
        widths = [0 if index in dropped else size for index, size in enumerate(natural)]
        if width is None or sum(widths) + _AROUND <= width:
            break
    return widths


def as_json(found: RailReadings) -> dict[str, Any]:
    """Return everything, node by node."""
    return {
        "nodes": [node.as_json() for node in found.maps],
        "groups": [[node.node for node in group] for group in identical(found.maps)],
        "differences": [asdict(difference) for difference in found.differences],
        "silent": dict(found.unanswered),
        "incomplete": sorted(found.incomplete),
    }


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
    leaves = {slice_.leaf for slice_ in section.slices}
    counts = [
        counted(len(fabric.slices), "node"),
        counted(fabric.rails, "rail"),
        counted(sum(len(slice_.rails) for slice_ in section.slices), "slice"),
        counted(len(leaves), "leaf switch", "leaf switches"),
    ]
    yield [("fabric by the profile", _BOLD), (f": {', '.join(counts[:-1])} of {counts[-1]}", "")]
    if section.summary:
        yield [(f"  {section.summary}", _QUIET)]
    yield [(f"  {counted(section.spines, 'spine')}" if section.spines else "  spines", _BOLD)]
    yield from _draw_slices(section.slices, width)
    yield from _draw_ring(fabric, section, width)


def _draw_slices(parts: tuple[SliceSection, ...], width: int | None) -> Iterator[Line]:
    rails = [
        f"{'rail' if len(slice_.rails) == 1 else 'rails'} {compress_ranges(slice_.rails)}" for slice_ in parts
    ]
    wide, wider = max(len(slice_.leaf) for slice_ in parts), max(map(len, rails))
    for number, (slice_, carried) in enumerate(zip(parts, rails, strict=True)):
        last = number == len(parts) - 1
        before = f"  {'└' if last else '├'}─ {slice_.leaf:<{wide}} ── {carried:<{wider}} ── "
        room = None if width is None else max(width - len(before), 1)
        first, *others = split_hostlist(expand(slice_.nodes), room)
        yield [(before[:5], _QUIET), (slice_.leaf.ljust(wide), _BOLD), (before[5 + wide :], _GOOD), (first, "")]
        for host_line in others:
            yield [((" " if last else "│").rjust(3).ljust(len(before)), _QUIET), (host_line, "")]


def _draw_ring(fabric: Fabric, section: FabricSection, width: int | None) -> Iterator[Line]:
    placement = place(fabric, section, list(fabric.slices))
    yield [("  ring of ranks over all nodes, with the rails that pass a spine on the way", _BOLD)]
    groups: list[list[str]] = []
    for node in placement.nodes:
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
    yield [(f"  {placement.line()}", "")]
    if section.oversubscription is not None:
        yield [(f"  a full slice is oversubscribed {section.oversubscription:.3g}:1", "")]


def fabric_as_json(section: FabricSection) -> dict[str, Any] | None:
    """Return the fabric and the ring over all nodes; None if the profile lists no slices."""
    fabric = fabric_of(section)
    if fabric is None:
        return None
    groups = [compress(members) for members in fabric.groups(list(fabric.slices)).values()]
    ring = place(fabric, section, list(fabric.slices)).as_json()
    return {**section.model_dump(mode="json"), "rails": fabric.rails, "groups": groups, "ring": ring}
