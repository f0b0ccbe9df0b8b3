"""The fabric below a run, for `zslurm submit --dry-run`: hops and oversubscription of its nodes."""

from __future__ import annotations

from typing import Any

from zslurm.checkpoint_tools.quantities import counted
from zslurm.cluster.rails.fabric import fabric_of
from zslurm.cluster.rails.placement import placements
from zslurm.config.spec import RunSpec
from zslurm.slurm.hostlist import expand


def fabric_json(spec: RunSpec, start: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return what the run's nodes cost, with what chose them; None where the cluster has no such fabric.

    Chosen are the nodes of slurm.nodelist, or else those on which Slurm would start the job now (`start`).
    """
    cluster, slurm = spec.cluster, spec.slurm
    fabric = fabric_of(cluster.fabric)
    if cluster.launcher != "slurm" or (fabric is None and not cluster.rails_only):
        return None
    if fabric is None:
        return {"chosen_by": None, "rails": None, "known_nodes": 0, "placements": {}}
    named = expand(slurm.nodelist or "")
    estimated = expand((start or {}).get("nodes") or "")
    by, nodes = ("slurm.nodelist", named) if len(named) >= slurm.nodes else ("Slurm's estimate", estimated)
    found = placements(cluster.fabric, slurm.nodes, chosen=nodes, excluded=expand(slurm.exclude or ""))
    return {
        "chosen_by": by if "chosen" in found else None,
        "rails": fabric.rails,
        "known_nodes": len(fabric.slices),
        "placements": {name: {**placed.as_json(), "line": placed.line()} for name, placed in found.items()},
    }


def fabric_lines(seen: dict[str, Any] | None, nodes: int) -> list[str]:
    """Return `fabric_json` in lines."""
    if seen is None:
        return []
    if not seen["known_nodes"]:
        return ["fabric: hops are not known: the profile lists no leaf slices (cluster.fabric.slices)"]
    found = seen["placements"]
    if not found:
        known = counted(seen["known_nodes"], "node")
        return [f"fabric: hops are not known: the profile lists slices of {known}, and the run needs {nodes}"]
    step = f"a step of the ring over {counted(seen['rails'], 'rail')}"
    if "chosen" in found:
        placed = found["chosen"]
        return [
            f"fabric: {placed['nodes']} in the order of ranks (nodes by {seen['chosen_by']}), in {step}",
            f"  {placed['line']}",
        ]
    which = f"{counted(nodes, 'node')} of the {seen['known_nodes']} on slices of the profile"
    return [
        f"fabric: no nodes are chosen yet; {which}, in {step}",
        *(f"  {name} case, {placed['nodes']}: {placed['line']}" for name, placed in found.items()),
    ]
