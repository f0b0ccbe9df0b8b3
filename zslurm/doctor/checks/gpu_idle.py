"""Is anything left running on the GPUs, or left in their memory?"""

from __future__ import annotations

from zslurm.checkpoint_tools.quantities import counted, show_bytes
from zslurm.doctor.check import Check, Outcome, failed, passed, unavailable
from zslurm.hardware import ras
from zslurm.hardware.gpu_health import GpuProcess
from zslurm.hardware.job_processes import process
from zslurm.hardware.node_sources import Sources

_GIB = 1 << 30
_MOST_NAMED = 4


def check(sources: Sources) -> Outcome | None:
    """Processes that hold GPU memory, and memory that no process seems to hold; those of this job are fine."""
    if not sources.cluster.gpus_per_node and not sources.facts.gpus:
        return None
    holders = _holders(sources)
    used = {gpu.index: gpu.vram_used for gpu in sources.gpus.health if gpu.vram_used is not None}
    if holders is None and not used:
        return unavailable(f"no GPU tells what runs on it: {sources.gpus.why}", "run amd-smi process on the node")
    limit = sources.limits.vram_used_gib * _GIB
    foreign = {pid: name for pid, name in (holders or {}).items() if not _is_ours(sources, pid)}
    if foreign:
        named = [f"{pid} {name}" if name else str(pid) for pid, name in sorted(foreign.items())]
        more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
        return failed(
            f"{counted(len(foreign), 'process holds', 'processes hold')} GPU memory: "
            f"{', '.join(named[:_MOST_NAMED])}{more}",
            "end them (`zslurm doctor --only orphaned-processes` names your old jobs'), or exclude the node",
        )
    full = {index: held for index, held in used.items() if held >= limit}
    if full and not holders:
        listed = ", ".join(f"GPU {index}: {show_bytes(held)}" for index, held in full.items())
        return failed(
            f"memory is in use and nobody holds it: {listed}",
            "a process died badly, or one in a container cannot be seen: exclude the node until it is reset",
        )
    most = max(used.values(), default=0)
    return passed(
        f"nothing runs on {counted(len(used), 'GPU') if used else 'the GPUs'}; at most {show_bytes(most)} in use"
    )


def _holders(sources: Sources) -> dict[int, str | None] | None:
    """Processes that hold memory of a GPU, by pid; None where that is not known."""
    reported: list[GpuProcess] = []
    known = False
    for gpu in sources.gpus.health:
        if gpu.processes is not None:
            known = True
            reported += [held for held in gpu.processes if held.vram is None or held.vram > 0]
    if (kfd := ras.kfd_processes(sources)) is not None:
        known = True
        reported += ras.as_processes(kfd)
    names: dict[int, str | None] = {}
    for held in reported:
        names[held.pid] = names.get(held.pid) or held.name
    return names if known else None


def _is_ours(sources: Sources, pid: int) -> bool:
    job = sources.environ.get("SLURM_JOB_ID")
    found = process(sources.root, pid)
    return job is not None and found is not None and found.job == job


CHECK = Check("gpu-idle", "gpu", "nothing is left running on the GPUs or in their memory", "node", check)
