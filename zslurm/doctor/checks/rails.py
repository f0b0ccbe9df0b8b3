"""Does GPU i use NIC i, on every node?"""

from __future__ import annotations

from zslurm.checkpoint_tools.quantities import counted
from zslurm.cluster.rails.map import rail_map
from zslurm.cluster.rails.types import Rail
from zslurm.doctor.check import Check, Outcome, failed, unavailable, warned, worst
from zslurm.hardware.node_sources import Sources


def check(sources: Sources) -> Outcome | None:
    """The pairing of GPUs and NICs on this node; that it is the same elsewhere is found by comparing."""
    if not sources.facts.gpus or not sources.facts.nics:
        return None
    rails = rail_map(sources.facts, sources.cluster)
    paired = [rail for rail in rails.rails if rail.nic_pci and rail.gpus]
    if not paired:
        return unavailable("no GPU can be paired with a NIC", "list cluster.nics in the profile")
    remedy = "see `zslurm doctor --json`; list cluster.nics and gpu_nics in the profile as the cables run"
    problems = [
        (failed if problem.incomplete else warned)(problem.message, remedy)
        for problem in rails.problems_of("no-near-nic", "shared-nic", "permuted", "different")
    ]
    return worst(
        problems,
        f"{counted(len(paired), 'rail')}, by {'the profile' if rails.source == 'profile' else 'PCIe'}",
        must_match={f"rail {rail.index}": _drawn(rail) for rail in paired},
    )


def _drawn(rail: Rail) -> str:
    gpus = "+".join(map(str, rail.gpus))
    return f"GPU {gpus} ({rail.gpu_pci[0]}) - {rail.nic} ({rail.nic_pci})"


CHECK = Check("rails", "network", "GPU i uses the NIC of rail i, on every node must_match", "node", check)
