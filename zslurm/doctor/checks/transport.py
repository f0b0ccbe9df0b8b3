"""Does RCCL open the network that the profile says, between this node and another?

The nodes form pairs (the last three are one group where their number is odd); each starts one
rank with RCCL's log on. A node that is alone starts two.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from zslurm.cluster.rccl.environment import environment
from zslurm.doctor.check import Check, Outcome, failed, passed, unavailable, worst
from zslurm.doctor.transport import expected, problems, read_log
from zslurm.doctor.transport_rank import NO_GPU
from zslurm.hardware.command import CommandHung, CommandOutput, run
from zslurm.hardware.node_sources import Sources
from zslurm.slurm.hostlist import expand

RANK_VARIABLE = "ZSLURM_DOCTOR_RANK"
"""Environment variable that names another program for a rank, for tests on machines without GPUs."""

_MODULE = "zslurm.doctor.transport_rank"


def check(sources: Sources) -> Outcome | None:
    """Start the ranks of this node, and check their logs."""
    cluster = sources.cluster
    if not cluster.gpus_per_node:
        return passed("no GPUs: ranks talk by gloo over TCP, RCCL is not used")
    if cluster.network is None:
        return unavailable("not checked: the profile does not give cluster.network")
    if cluster.container is not None:
        return unavailable("not checked: ranks run in a container, with another RCCL than this machine's")
    group = _group(sources)
    given = _environment(sources)
    with ExitStack() as stack:
        folder = sources.task.probe
        if not folder and len(group) > 1:
            return unavailable("not checked: the ranks cannot meet, as the runs directory is not writable here")
        place = Path(folder) if len(group) > 1 else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # A doctor that asks again does so as another job, in the same folder.
        step = f"{sources.environ.get('SLURM_JOB_ID', '')}.{sources.environ.get('SLURM_STEP_ID', '')}"
        file = place / f"transport-{step}-{group[0]}"
        if missing := _missing(file, group, sources):
            who = ", ".join(missing)
            return unavailable(f"not checked: {who} did not come to test it with within {_wait(sources):g} s")
        try:
            said = _run_ranks(sources, group, file, given)
        except CommandHung:
            others = ", ".join(node for node in group if node != sources.node) or "the other rank"
            remedy = f"is {others} well? Else RCCL hangs between them: see the checks nics, rails and gid-index"
            return failed(
                f"RCCL connected no ranks with {others} within {_time(sources):g} s", remedy, blames=False
            )
    return _checked(sources, group, given, said)


def _group(sources: Sources) -> tuple[str, ...]:
    """The nodes that test their network together, this one among them; alone where Slurm names no others."""
    listed = sources.environ.get("SLURM_STEP_NODELIST") or sources.environ.get("SLURM_JOB_NODELIST")
    nodes = expand(listed) if listed and "SLURM_STEP_ID" in sources.environ else []
    if sources.node not in nodes:
        return (sources.node,)
    first = nodes.index(sources.node) // 2 * 2
    if first == len(nodes) - 1 and len(nodes) > 1:
        first -= 2
    odd = len(nodes) % 2 and first >= len(nodes) - 3
    return tuple(nodes[first : first + (3 if odd else 2)])


def _environment(sources: Sources) -> dict[str, str]:
    """What a rank of a job would have, with RCCL's log on stdout."""
    given = {setting.name: setting.value for setting in environment(sources.cluster)} | dict(sources.environ)
    given |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
    given.pop("NCCL_DEBUG_FILE", None)
    if sources.cluster.interface:
        given["ZSLURM_INTERFACE"] = sources.cluster.interface
    return given


def _missing(file: Path, group: tuple[str, ...], sources: Sources) -> list[str]:
    """Announce this node, and wait for the others of its group; returns those that never came (a dead node)."""
    file.with_name(f"{file.name}.{sources.node}").touch()
    deadline = time.monotonic() + _wait(sources)
    while True:
        there = {entry.name for entry in file.parent.iterdir()}  # makes an NFS client look again
        missing = [node for node in group if f"{file.name}.{node}" not in there]
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(0.05)


def _wait(sources: Sources) -> float:
    return sources.limits.check_s / 2


def _time(sources: Sources) -> float:
    return 2 * sources.limits.check_s


def _run_ranks(
    sources: Sources, group: tuple[str, ...], file: Path, given: Mapping[str, str]
) -> list[CommandOutput]:
    """The ranks of this node: one of the group's, or all of them where it is alone.

    Raises:
        CommandHung: one did not end in time.
    """
    alone = len(group) == 1
    world = min(2, sources.cluster.gpus_per_node) if alone else len(group)
    ranks = range(world) if alone else [group.index(sources.node)]
    other = given.get(RANK_VARIABLE)
    program = [other] if other else [sys.executable, "-P", "-m", _MODULE]
    limit = _time(sources)

    def start(rank: int) -> CommandOutput:
        words = [str(file), str(rank), str(world), str(rank if alone else 0), f"{limit:g}"]
        return run([*program, *words], given, limit)

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(start, ranks))


def _checked(
    sources: Sources, group: tuple[str, ...], given: Mapping[str, str], said: list[CommandOutput]
) -> Outcome:
    if any(rank.code == NO_GPU for rank in said):
        return unavailable("not checked: torch sees no GPU here (see torch-import)")
    opened = [read_log(rank.out) for rank in said]
    broken = [rank for rank in said if rank.code != 0]
    if broken:
        words = [line.strip() for line in broken[0].err.splitlines() if line.strip()]
        last = words[-1] if words else f"a rank ended with {broken[0].code}"
        # A network that opened is this node's; what failed later may be the other's.
        own = [problem for one in opened if one.network for problem in problems(one, sources.cluster, given)]
        late = failed(f"RCCL failed{_with(sources, group)}: {last}", "see the checks nics, rails and gid-index")
        return worst([*_each_once(own), late], "", blames=bool(own))
    found = [problem for one in opened for problem in problems(one, sources.cluster, given)]
    first = opened[0]
    direct = {True: ", with GPUDirect", False: "", None: ""}[first.gpu_direct]
    fine = f"RCCL opened {first.network}{_with(sources, group)}{direct}: {expected(sources.cluster, given)}"
    return worst(_each_once(found), fine, must_match={"RCCL's network": first.network})


def _each_once(outcomes: list[Outcome]) -> list[Outcome]:
    """Two ranks of a node say the same."""
    return list({outcome.reason: outcome for outcome in outcomes}.values())


def _with(sources: Sources, group: tuple[str, ...]) -> str:
    others = [node for node in group if node != sources.node]
    return f" with {', '.join(others)}" if others else ""


CHECK = Check(
    "transport", "network", "RCCL opens the profile's network between two ranks", "node", check,
    uses_gpus=True, time_factor=3,
)  # fmt: skip
