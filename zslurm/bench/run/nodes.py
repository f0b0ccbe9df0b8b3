"""Which nodes of a cluster a benchmark asks for, and with which options of srun."""

from __future__ import annotations

import math

from zslurm.bench.run.request import BenchRequest
from zslurm.checkpoint_tools.quantities import counted
from zslurm.cluster.site import Site
from zslurm.core.errors import ConfigError, NotFound
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.hostlist import compress, expand

_DEFAULT_LIMIT_MIN, _START_MIN = 60, 5


def named_nodes(request: BenchRequest, site: Site) -> list[str]:
    """Return the nodes of the list, after looking whether Slurm has them; none if Slurm is to choose.

    Raises:
        NotFound: a named node does not exist.
        ConfigError: there are fewer usable nodes.
    """
    shown = SlurmClient().nodes_if_shown()
    if shown is None:  # Slurm answers for names and numbers when the job is submitted
        return expand(request.nodelist) if request.nodelist is not None else []
    nodes = {node.name: node for node in shown}
    if request.nodelist is not None:
        names = list(dict.fromkeys(expand(request.nodelist)))
        if unknown := [name for name in names if name not in nodes]:
            raise NotFound(f"{compress(unknown)}: Slurm has no such node; its nodes: {compress(nodes)}")
        return names
    partition = site.slurm.partition
    members = [node for node in nodes.values() if partition is None or partition in node.partitions]
    usable = sum(node.is_usable for node in members)
    if (request.nodes or 0) > usable:
        raise ConfigError(
            f"--nodes {request.nodes}: of the {counted(len(members), 'node')} of {partition or 'the cluster'} "
            f"{usable} {'is' if usable == 1 else 'are'} usable"
        )
    return []


def srun_options(request: BenchRequest, site: Site, *, inside: bool) -> list[str]:
    """Return options of srun: whole nodes with all their GPUs."""
    options = site.cluster.srun_gpu_options()
    if inside:
        return options
    limit = math.ceil(request.minutes) + _START_MIN if request.minutes else _DEFAULT_LIMIT_MIN
    options += ["--exclusive", "--mem=0", f"--time={limit}", *site.submit_options()]
    if reservation := site.slurm.flags.get("reservation"):
        options.append(f"--reservation={reservation}")
    return options
