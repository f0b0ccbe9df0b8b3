"""Does the GPU driver answer?"""

from __future__ import annotations

from zslurm.doctor.check import Check, Outcome, failed, passed, unavailable
from zslurm.hardware.node_sources import Sources


def check(sources: Sources) -> Outcome | None:
    """A question with a time limit: a driver that is wedging answers late or never, minutes before GPUs stop."""
    if not sources.cluster.gpus_per_node and not sources.facts.gpus:
        return None
    gpus = sources.gpus
    if gpus.hung:
        return failed(f"{gpus.hung}: the driver is wedged", "exclude the node; it needs a reboot")
    if gpus.source not in ("amd-smi", "nvidia-smi"):
        return unavailable(gpus.why, "install amd-smi or nvidia-smi, or load its module in cluster.setup")
    return passed(f"{gpus.source} answers")


CHECK = Check("gpu-driver", "gpu", "the GPU driver answers in time", "node", check)
