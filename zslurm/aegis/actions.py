"""Put the job back into the queue, from inside it, with the nodes that it must not use."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping

from zslurm.aegis.evidence import Decision
from zslurm.config.spec import RunSpec
from zslurm.errors import ZslurmError
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.commands import Retries
from zslurm.slurm.exclusion import Size, requeue_excluding, wait_until_down

_PATIENT = Retries(attempts=8, first_pause_s=0.5)
"""A minute in all: long enough for a controller that is being restarted. Once the job is requeued, KillWait ends
it earlier than that."""


def requeue_job(
    spec: RunSpec,
    job_id: str,
    decision: Decision,
    environ: Mapping[str, str],
    *,
    excluded: Collection[str] = (),
    forgiven: Collection[str] = (),
    dead: Collection[str] = (),
) -> str:
    """Requeue the job that this process runs in; returns the nodes that it excludes from now on, as a hostlist.

    Slurm then sends SIGTERM to every process of the job. This one is deaf to that from here on, and so is what it
    starts. On a site whose compute nodes have no scontrol, a successor that waits takes the requeue's part: then
    nothing is done here.

    Args:
        spec: the run.
        job_id: its job.
        decision: what was decided.
        environ: of the job.
        excluded: nodes that it must not use from now on.
        forgiven: nodes that it may use again.
        dead: nodes of the job that died while it ran.

    Raises:
        ZslurmError: Slurm refused, or did not answer.
    """
    client = SlurmClient(environ, retries=_PATIENT)
    if not client.can_control():
        if spec.wants_successor:
            return ""
        raise ZslurmError("there is no scontrol on this node, and no successor was submitted (slurm.successor)")
    for signum in (signal.SIGTERM, signal.SIGCONT, signal.SIGINT, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    if spec.cluster.gpus_per_node:
        excluded = set(excluded) - wait_until_down(client, dead)
    if not excluded and decision.n_nodes is None and not forgiven:
        client.requeue(job_id)
        return ""
    size = Size(decision.n_nodes, spec.ranks_per_node, spec.cpus_per_task) if decision.n_nodes else None
    return requeue_excluding(client, job_id, excluded, forgiven=forgiven, size=size)
