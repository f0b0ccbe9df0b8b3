"""The nodes that a start of the job has, and which of them the ranks may use."""

from __future__ import annotations

import socket
import time
from collections.abc import Collection, Mapping, Sequence

from zslurm.aegis.types import Resources, WorkLeft
from zslurm.cluster.rails.fabric import Fabric, fabric_of
from zslurm.config.spec import ClusterSection, RunSpec
from zslurm.core.errors import SlurmUnavailable, ZslurmError
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.environment import job_nodes, own_job_id, partition_of_job
from zslurm.slurm.hostlist import expand
from zslurm.slurm.inventory import usable_nodes
from zslurm.slurm.run_command import Retries
from zslurm.slurm.topology import order_by_leaf

_ANSWER_S = 5.0


class Nodes:
    """The nodes of the job that this process runs in.

    Attributes:
        every: all of them, spares included, in the order in which ranks are numbered.
        by_leaf: true if that order was chosen, by the fabric or by leaf switch; false if it is Slurm's.
        fabric: which slices of leaf switches the nodes are on; None if the profile does not list them.
        dead: those that died since the job started here.
    """

    def __init__(self, spec: RunSpec, environ: Mapping[str, str]) -> None:
        """Ask for the order of the nodes."""
        self._spec, self._environ, self._job_id = spec, environ, own_job_id(environ) or ""
        self.on_slurm = spec.cluster.launcher == "slurm"
        nodes = job_nodes(environ) if self.on_slurm else [socket.gethostname()]
        self.fabric = fabric_under(spec.cluster, nodes) if self.on_slurm else None
        partition = partition_of_job(environ)
        ordered = rank_order(spec.cluster, nodes, SlurmClient(), partition) if self.on_slurm else None
        self.by_leaf = ordered is not None
        self.every = tuple(ordered or nodes)
        self.dead: set[str] = set()

    def in_rank_order(self, nodes: Sequence[str]) -> tuple[str, ...]:
        """Return some of the nodes, given in the order of `every`, in the order of their ranks."""
        return tuple(nodes if self.fabric is None else self.fabric.order(nodes))

    def nearest(self, nodes: Sequence[str]) -> tuple[str, ...]:
        """Return as many of these nodes as the ranks need: those that share slices if slices are known."""
        if self.fabric is None or len(nodes) <= self.needed:
            return tuple(nodes[: self.needed])
        return tuple(self.fabric.nearest(nodes, self.needed))

    def usable(self, excluded: Collection[str]) -> tuple[str, ...]:
        """Return those that live and are not excluded."""
        return tuple(node for node in self.every if node not in self.dead and node not in excluded)

    def taken_back(self) -> set[str]:
        """Return nodes that Slurm took from the job because they failed; none if that is unknown."""
        if not self.on_slurm:
            return set()
        job_id = self._job_id
        try:
            job = self._client().queue([job_id]).get(job_id)
            nodes_now = expand(job.nodes) if job is not None else []
        except ZslurmError:
            return set()
        return set(self.every).difference(nodes_now) if nodes_now else set()

    @property
    def needed(self) -> int:
        """Nodes that the ranks are meant to have: fewer than the run asks for if its job was shrunk."""
        return min(self._spec.slurm.nodes, len(self.every)) if self.on_slurm else 1

    @property
    def can_requeue(self) -> bool:
        """Whether the job can come back later, with other nodes."""
        return self.on_slurm and (SlurmClient(self._environ).can_control() or self._spec.wants_successor)

    def slurm_is_away(self) -> str | None:
        """Return why no step can be started now, because the controller does not answer; None if it does."""
        client = self._client()
        if not self.on_slurm or not client.can_control():
            return None
        try:
            client.queue([self._job_id])
        except SlurmUnavailable as error:
            return str(error)
        except ZslurmError:
            return None
        return None

    def job_left_s(self) -> float | None:
        """Return the seconds until the job's time limit; None if it has none, or Slurm does not answer."""
        job_id = self._job_id
        try:
            job = self._client().queue([job_id]).get(job_id) if self.on_slurm else None
        except ZslurmError:
            return None
        return job.end_time.timestamp() - time.time() if job is not None and job.end_time is not None else None

    def resources(
        self,
        excluded: Collection[str],
        in_use: tuple[str, ...],
        *,
        look_elsewhere: bool,
        work: WorkLeft | None = None,
    ) -> Resources:
        """Return what there is to continue with.

        Args:
            excluded: nodes that must not be used now.
            in_use: nodes of the attempt that ended.
            look_elsewhere: ask Slurm for usable nodes outside of the job as well.
            work: what is left to train, if that is to be weighed.
        """
        usable = self.usable(excluded)
        if not self.on_slurm:
            return Resources(usable, in_use, 1, can_requeue=False)
        return Resources(
            usable,
            in_use,
            self.needed,
            outlives_nodes=self._spec.outlives_nodes,
            can_requeue=self.can_requeue,
            elsewhere=self.elsewhere(excluded) if look_elsewhere else None,
            demanded=frozenset(expand(self._spec.slurm.nodelist or "")),
            asked=len(self.every),
            work=work,
            slices=self.fabric.slices if self.fabric is not None and len(self.every) > self.needed else None,
        )

    def elsewhere(self, excluded: Collection[str]) -> int | None:
        """Return how many nodes of its partition the job could run on, now or later; None if unknown."""
        try:
            usable = usable_nodes(self._client().nodes(), partition_of_job(self._environ) or "")
        except ZslurmError:
            return None
        return len(usable.difference(excluded, self.dead))

    def _client(self) -> SlurmClient:
        """Return a client that asks once: each question is repeated, or may stay open."""
        return SlurmClient(self._environ, timeout_s=_ANSWER_S, retries=Retries(attempts=1))


def fabric_under(cluster: ClusterSection, nodes: Sequence[str]) -> Fabric | None:
    """Return the slices of these nodes; None if the profile lists none of them, or there is one node."""
    complete_fabric = fabric_of(cluster.fabric) if len(nodes) > 1 else None
    fabric = complete_fabric.part(nodes) if complete_fabric is not None else None
    return fabric if fabric is not None and fabric.slices else None


def rank_order(
    cluster: ClusterSection, nodes: Sequence[str], client: SlurmClient, partition: str | None = None
) -> list[str] | None:
    """Return the nodes along the shortest ring over the slices of the profile's fabric, or else leaf by leaf.

    None if neither is known, and Slurm's own order does as well as any. The profile's `leaf_switches` win over
    Slurm's topology, which may be another one for each partition.
    """
    if len(nodes) < 2:
        return None
    if (fabric := fabric_under(cluster, nodes)) is not None:
        return fabric.order(nodes)
    leaves: Mapping[str, Sequence[str]] = {leaf: expand(hosts) for leaf, hosts in cluster.leaf_switches.items()}
    if not leaves:
        try:
            leaves = client.topology_of(partition).leaves
        except ZslurmError:
            return None  # a compute node without scontrol: the order only matters for speed
    nodes_of_leaves = {node for members in leaves.values() for node in members}
    return order_by_leaf(nodes, leaves) if nodes_of_leaves.intersection(nodes) else None
