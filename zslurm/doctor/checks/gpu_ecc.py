"""Have the GPUs seen memory errors?

Uncorrectable: any is too many (SaFE). Correctable: more than 10,000 (SaFE). Deferred errors are damaged data that
has not been read yet; the page is retired when it is.
"""

from __future__ import annotations

from zslurm.checkpoint_tools.quantities import counted
from zslurm.doctor.check import Check, Outcome, failed, unavailable, warned, worst
from zslurm.hardware.gpu_health import GpuHealth
from zslurm.hardware.node_sources import Sources

_EXCLUDE = "exclude the node and have the GPU reset; if it comes back, have it replaced"


def check(sources: Sources) -> Outcome | None:
    """Error counters of every GPU."""
    if not sources.cluster.gpus_per_node and not sources.facts.gpus:
        return None
    health = sources.gpus.health
    known = [gpu for gpu in health if gpu.uncorrectable is not None]
    problems = [outcome for gpu in known for outcome in _of(gpu, sources.limits.correctable_ecc)]
    unknown = [gpu.index for gpu in health if gpu.uncorrectable is None]
    if not known or (unknown and not problems):
        who = f"GPUs {', '.join(map(str, unknown))} do not tell" if unknown else sources.gpus.why or "no GPU tells"
        return unavailable(f"ECC counters: {who}", "run amd-smi metric --ecc on the node to see why")
    corrected = sum(gpu.correctable or 0 for gpu in known)
    return worst(problems, f"no uncorrectable error on {counted(len(known), 'GPU')} ({corrected} correctable)")


def _of(gpu: GpuHealth, limit: float) -> list[Outcome]:
    found = []
    if gpu.uncorrectable:
        where = f" ({', '.join(sorted(gpu.blocks))})" if gpu.blocks else ""
        found.append(
            failed(f"GPU {gpu.index}: {counted(gpu.uncorrectable, 'uncorrectable error')}{where}", _EXCLUDE)
        )
    if (gpu.correctable or 0) > limit:
        found.append(
            failed(
                f"GPU {gpu.index}: {counted(gpu.correctable or 0, 'correctable error')}, over {limit:g}", _EXCLUDE
            )
        )
    if gpu.deferred:
        remedy = "have the GPU reset when the node is free"
        found.append(warned(f"GPU {gpu.index}: {counted(gpu.deferred, 'deferred error')}", remedy))
    return found


CHECK = Check("gpu-ecc", "gpu", "uncorrectable, deferred and correctable memory errors of GPUs", "node", check)
