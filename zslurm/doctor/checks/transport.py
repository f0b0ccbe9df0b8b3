"""Check that RCCL opens the network of the profile, between this node and another.

The nodes form pairs (the last three are one group if their number is odd); each starts one
rank with RCCL's log on. A single node starts two.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from zslurm.cluster.rccl.environment import variables_of
from zslurm.doctor.check import CheckOutcome, check, failed, passed, unavailable, worst
from zslurm.doctor.transport import expected, problems, read_log
from zslurm.doctor.transport_rank import NO_GPU
from zslurm.hardware.command import CommandHung, CommandResult, run
from zslurm.hardware.node_sources import Sources
from zslurm.slurm.environment import own_job_id, step_id, step_nodes

RANK_VARIABLE = "ZSLURM_DOCTOR_RANK"
"""Environment variable that names another program for a rank, for tests on machines without GPUs."""


@check("network", "RCCL opens the profile's network between two ranks", "node", uses_gpus=True, time_factor=3)
def transport(sources: Sources) -> CheckOutcome | None:
    """Start the ranks of this node, and compare the network in their logs with the profile's."""
    cluster = sources.cluster
    if not cluster.gpus_per_node:
        return passed("no GPUs: ranks talk by gloo over TCP, RCCL is not used")
    if cluster.network is None:
        return unavailable("not checked: the profile does not give cluster.network")
    if cluster.network == "other":
        return unavailable("not checked: the profile names a network (other) that RCCL's rules do not know")
    if cluster.container is not None:
        return unavailable("not checked: ranks run in a container, with another RCCL than this machine's")
    group, variables = group_of(sources), _environment(sources)
    others = [node for node in group if node != sources.node]
    patience_s = sources.limits.check_s / 2
    with ExitStack() as stack:
        folder = sources.task.probe
        if not folder and others:
            return unavailable("not checked: the ranks cannot meet, as the runs directory is not writable here")
        directory = Path(folder if others else stack.enter_context(tempfile.TemporaryDirectory()))
        # A doctor that asks again does so as another job, in the same folder.
        step = f"{own_job_id(sources.environ) or ''}.{step_id(sources.environ) or ''}"
        file = directory / f"transport-{step}-{group[0]}"
        if missing := _missing(file, group, sources.node, patience_s):
            who = ", ".join(missing)
            return unavailable(f"not checked: {who} did not come to test it with within {patience_s:g} s")
        try:
            results = _run_ranks(sources, group, file, variables, limit_s := 4 * patience_s)
        except CommandHung:
            who = ", ".join(others) or "the other rank"
            remedy = f"is {who} well? Else RCCL hangs between them: see the checks nics, rails and gid-index"
            return failed(f"RCCL connected no ranks with {who} within {limit_s:g} s", remedy, node_fault=False)
    return _outcome(sources, f" with {', '.join(others)}" if others else "", variables, results)


def group_of(sources: Sources) -> tuple[str, ...]:
    """Return the nodes that test their network together, with this one; only this one if Slurm names no others."""
    nodes = step_nodes(sources.environ)
    if sources.node not in nodes:
        return (sources.node,)
    first = nodes.index(sources.node) // 2 * 2
    if first == len(nodes) - 1 and len(nodes) > 1:
        first -= 2
    odd = len(nodes) % 2 and first >= len(nodes) - 3
    return tuple(nodes[first : first + (3 if odd else 2)])


def _environment(sources: Sources) -> dict[str, str]:
    """Return what a rank of a job would have, with RCCL's log on stdout."""
    variables = variables_of(sources.cluster) | dict(sources.environ)
    variables |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
    variables.pop("NCCL_DEBUG_FILE", None)
    if sources.cluster.interface:
        variables["ZSLURM_INTERFACE"] = sources.cluster.interface
    return variables


def _missing(file: Path, group: Sequence[str], node: str, patience_s: float) -> list[str]:
    """Announce this node, and wait for the others of its group; returns those that never came (a dead node)."""
    file.with_name(f"{file.name}.{node}").touch()
    deadline = time.monotonic() + patience_s
    while True:
        arrived = {entry.name for entry in file.parent.iterdir()}  # makes an NFS client look again
        missing = [node for node in group if f"{file.name}.{node}" not in arrived]
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(0.05)


def _run_ranks(
    sources: Sources, group: Sequence[str], file: Path, given: Mapping[str, str], limit_s: float
) -> list[CommandResult]:
    """Run the ranks of this node: one of the group's, or all of them if it is the only node.

    Raises:
        CommandHung: one did not end in time.
    """
    alone = len(group) == 1
    world = min(2, sources.cluster.gpus_per_node) if alone else len(group)
    ranks = range(world) if alone else [group.index(sources.node)]
    program_override = given.get(RANK_VARIABLE)
    program = (
        [program_override]
        if program_override
        else [sys.executable, "-P", "-u", "-m", "zslurm.doctor.transport_rank"]
    )

    def start(rank: int) -> CommandResult:
        arguments = [str(file), str(rank), str(world), str(rank if alone else 0), f"{limit_s:g}"]
        return run([*program, *arguments], given, limit_s)

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(start, ranks))


def _outcome(
    sources: Sources, with_others: str, given: Mapping[str, str], results: Sequence[CommandResult]
) -> CheckOutcome:
    if any(rank.code == NO_GPU for rank in results):
        return unavailable("not checked: torch sees no GPU here (see torch-import)")
    opened = [read_log(rank.out) for rank in results]
    broken = next((rank for rank in results if rank.code != 0), None)
    # A network that opened is this node's; what failed later may be the other's.
    used = opened if broken is None else [opened_network for opened_network in opened if opened_network.network]
    outcomes = [problem for opened_network in used for problem in problems(opened_network, sources.cluster, given)]
    outcomes = list(
        {outcome.reason: outcome for outcome in outcomes}.values()
    )  # two ranks of a node find the same
    if broken is not None:
        message = (broken.err and broken.message) or f"a rank ended with {broken.code}"
        trouble = dict.fromkeys(line for rank in opened for line in rank.trouble)
        why = f" ({'; '.join(trouble)})" if trouble and not outcomes else ""  # else they are in an outcome
        remedy = "see the checks nics, rails and gid-index"
        if any("No eligible providers" in line for line in trouble):
            remedy = (
                "the plugin's libfabric has no provider for the NICs: `fi_info -p cxi` on the node must list them"
            )
        late = failed(f"RCCL failed{with_others}: {message}{why}", remedy)
        return worst([*outcomes, late], "", node_fault=bool(outcomes))
    network = opened[0].network
    direct = ", with GPUDirect" if opened[0].gpu_direct else ""
    if opened[0].ofi_plugin:
        direct += f", by {opened[0].ofi_plugin}"
        direct += f" and libfabric {opened[0].libfabric}" if opened[0].libfabric else ""
    fine = f"RCCL opened {network}{with_others}{direct}: {expected(sources.cluster, given)}"
    return worst(outcomes, fine, must_match={"RCCL's network": network})
