"""Ask all nodes at once, as one short job, and report why it waits while it waits."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from zslurm.cluster.rccl.environment import variables_of
from zslurm.cluster.site import Site
from zslurm.core.errors import SlurmRefused, SlurmUnavailable
from zslurm.doctor.node import TASK_VARIABLE
from zslurm.doctor.nodes import Chosen
from zslurm.hardware.node_sources import NodeTask
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.environment import own_job_id
from zslurm.slurm.hostlist import compress
from zslurm.slurm.on_nodes.run_on_nodes import NodeAnswer, run_on_nodes
from zslurm.slurm.on_nodes.srun_output import CANNOT_START

_LOG = logging.getLogger(__name__)

_LAUNCH_TRIES = 4
_REPORTED_EVERY_S = 10.0


def ask(
    site: Site, chosen: Chosen, task: NodeTask, timeout_s: float, *, inside: bool = False
) -> dict[str, NodeAnswer]:
    """Give the chosen nodes a task; those on which no task can be started are left out the next time.

    All of it takes `timeout_s` at most, the wait in the queue included. With `inside` they are asked in a step of
    the job that this runs in. `sent` in an answer is the last moment at which the job still waited: the clocks of
    nodes are compared with it.

    Raises:
        SlurmUnavailable, SlurmRefused: none could be asked.
    """
    deadline = time.monotonic() + timeout_s
    answered: dict[str, NodeAnswer] = {}
    lost: dict[str, NodeAnswer] = {}
    names, count = chosen.names, chosen.count
    report, waited_until = report_waiting(), 0.0

    def waiting(job_id: str) -> None:
        nonlocal waited_until
        waited_until = time.time()
        report(job_id)

    for _ in range(_LAUNCH_TRIES):
        task = replace(task, sent=time.time())
        exclude = [f"--exclude={compress(lost)}"] if lost and not names else []
        answers = run_on_nodes(
            "zslurm.doctor.node",
            nodes=names,
            count=count,
            options=[*_options(site, timeout_s, inside=inside), *exclude],
            job_id=own_job_id() if inside else None,
            setup=site.cluster.setup,
            timeout_s=max(1.0, deadline - time.monotonic()),
            environ={**os.environ, **variables_of(site.cluster), TASK_VARIABLE: json.dumps(task.to_json())},
            waiting=waiting,
        )
        refused = {name: answer for name, answer in answers.items() if CANNOT_START in (answer.error or "")}
        new = {
            name: replace(answer, value={**answer.value, "sent": max(answer.value["sent"], waited_until)})
            for name, answer in answers.items()
            if answer.error is None
        }
        answered |= new
        lost |= refused
        # One node that takes no task ends the whole step: what had no time to answer is asked again.
        names = tuple(name for name in names if name not in answered and name not in lost)
        count = None if count is None or new else count - len(refused)
        if not refused or not (names or count) or time.monotonic() > deadline:
            break
        _LOG.info("%s: tasks cannot be started there; asking the others", compress(refused))
    return answers | lost | answered


def _options(site: Site, timeout_s: float, *, inside: bool) -> Iterator[str]:
    """Options of srun: whole nodes with all their GPUs, for as short as possible."""
    cluster = site.cluster
    if inside or cluster.gpu_option != "gres" or not cluster.gpu_request:
        yield from cluster.srun_gpu_options()
    else:
        yield from (f"--gres=gpu:{cluster.gpu_request}", "--gpu-bind=none")
    if inside:
        return
    yield from ("--exclusive", "--mem=0", f"--time={math.ceil(timeout_s / 60) + 1}")
    yield from site.submit_options()
    if request := cluster.network_request(site.slurm.flags):
        yield f"--network={request}"
    if reservation := site.slurm.flags.get("reservation"):
        yield f"--reservation={reservation}"


def report_waiting() -> Callable[[str], None]:
    """Return what reports at intervals why the job has not started."""
    report_at = 0.0

    def report(job_id: str) -> None:
        nonlocal report_at
        if time.monotonic() < report_at:
            return
        report_at = time.monotonic() + _REPORTED_EVERY_S
        try:
            job = SlurmClient().queue([job_id]).get(job_id)
        except (SlurmUnavailable, SlurmRefused):
            job = None
        reason = job.reason if job and job.reason else "no reason yet"
        _LOG.info("job %s waits in the queue (%s); Ctrl-C cancels it", job_id, reason)

    return report
