"""What a submission would do: script, environment with origins, placement, memory, start, and changes."""

from __future__ import annotations

import difflib
from typing import Any

from zslurm.cli.plan import trains_on_cpus
from zslurm.cluster.rccl.environment import RULES
from zslurm.config.load import Resolved
from zslurm.config.spec import RunSpec
from zslurm.core.errors import SlurmRefused, SlurmUnavailable, ZslurmError
from zslurm.core.redact import redact, redact_value
from zslurm.job.numa_bind import cores_of
from zslurm.run.state import last_job
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.commands import Retries
from zslurm.slurm.jobs import time_limit
from zslurm.submit.continuation import changed_keys, last_spec
from zslurm.submit.script.render import job_settings
from zslurm.submit.submit import Prepared
from zslurm.train.plan.memory import plan_memory

_PATIENCE_S = 15.0


def preview(resolved: Resolved, prepared: Prepared) -> dict[str, Any]:
    """Return what submitting a prepared run would do, as `--dry-run --json` prints it; nothing is written.

    Secrets are not in it. `start` is null where there is no Slurm to ask, `changes` for a run that was never
    submitted.
    """
    spec = prepared.spec
    settings = job_settings(spec, lambda name: str(resolved.layers.leaf_origin(("cluster", "env", name))))
    return {
        "environment": {setting.name: redact_value(setting.name, setting.value) for setting in settings},
        "environment_origins": {
            setting.name: f"rule: {setting.reason}" if setting.origin == RULES else setting.origin
            for setting in settings
        },
        "placement": _placement(spec),
        "memory": _memory(spec),
        "start": _start(spec, prepared.script.text),
        "changes": _changes(prepared),
    }


def _placement(spec: RunSpec) -> list[dict[str, Any]]:
    """Return GPU, NIC and cores of each local rank, as far as the profile names them; the same on every node."""
    cluster = spec.cluster
    places = []
    for local_rank in range(spec.ranks_per_node):
        gpu = local_rank if local_rank < cluster.gpus_per_node else None
        nic = None
        if gpu is not None and cluster.nics:
            nic = cluster.nics[cluster.gpu_nics[gpu] if cluster.gpu_nics else gpu]
        places.append({"local_rank": local_rank, "gpu": gpu, "nic": nic, "cores": cores_of(spec, gpu)})
    return places


def _memory(spec: RunSpec) -> dict[str, Any]:
    """Return what each rank's memory will hold at most, in bytes."""
    on_cpu = trains_on_cpus(spec)
    plan = plan_memory(spec, spec.world_size, on_cpu=on_cpu)
    return {
        "device": "cpu" if on_cpu else "gpu",
        "peak_bytes": plan.peak,
        "peak_moment": plan.peak_moment,
        "host_staging_bytes": plan.staging,
    }


def _start(spec: RunSpec, script: str) -> dict[str, Any] | None:
    """Ask Slurm when and where the job would start, without submitting it."""
    client = SlurmClient(timeout_s=_PATIENCE_S, retries=Retries(attempts=1))
    if spec.cluster.launcher != "slurm" or not client.available():
        return None
    try:
        estimate = client.estimate_start(script)
    except SlurmRefused as error:
        return {"refused": str(error), "words": f"never; {error}"}
    except SlurmUnavailable as error:
        return {"words": f"unknown; {error}"}
    if (why := _beyond_partition(spec, client)) is not None:
        return {"refused": why, "words": f"never; {why}"}
    if estimate is None:
        return {"words": "unknown; Slurm names no time"}
    when = estimate.time.isoformat(timespec="seconds")
    words = f"about {estimate.time:%Y-%m-%d %H:%M:%S} UTC on {estimate.nodes}"
    return {"time": when, "nodes": estimate.nodes, "partition": estimate.partition, "words": words}


def _beyond_partition(spec: RunSpec, client: SlurmClient) -> str | None:
    """Return why a job would wait for ever in its partition, which `sbatch --test-only` does not report."""
    limit = time_limit(spec.slurm.time) if spec.slurm.time else None
    try:
        partitions = client.partitions()
    except ZslurmError:
        return None
    for partition in partitions:
        named = partition.name == spec.slurm.partition or (spec.slurm.partition is None and partition.is_default)
        if named and limit is not None and partition.max_time is not None and limit > partition.max_time:
            return f"partition {partition.name} allows at most {partition.max_time}, slurm.time is {limit}"
    return None


def _changes(prepared: Prepared) -> dict[str, Any] | None:
    """Return what differs from the last submission."""
    run = prepared.run
    job = last_job(run)
    if job is None or not run.exists:
        return None
    before = run.script.read_text(encoding="utf-8") if run.script.is_file() else ""
    lines = difflib.unified_diff(
        before.splitlines(), prepared.script.text.splitlines(), "script before", "script", "", "", 0, ""
    )
    return {
        "job_id": job.job_id,
        "keys": changed_keys(last_spec(run), prepared.spec),
        "script": [redact(line) for line in lines],
    }
