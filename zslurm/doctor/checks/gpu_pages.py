"""Have the GPUs lost pages of their memory?

A retired page is out of the way. One that is pending will be retired by a reset, and one that could not be
reserved is still in use, damaged as it is. Rows that NVIDIA GPUs remap are counted in the same way.
"""

from __future__ import annotations

from zslurm.checkpoint_tools.quantities import counted
from zslurm.doctor.check import Check, Outcome, failed, unavailable, warned, worst
from zslurm.hardware.node_sources import Sources


def check(sources: Sources) -> Outcome | None:
    """Bad pages of every GPU, by kind."""
    if not sources.cluster.gpus_per_node and not sources.facts.gpus:
        return None
    known = [(gpu.index, gpu.bad_pages) for gpu in sources.gpus.health if gpu.bad_pages is not None]
    if not known or len(known) < len(sources.gpus.health):
        why = f": {sources.gpus.why}" if sources.gpus.why else ""
        return unavailable(
            f"{len(known)} of {counted(len(sources.facts.gpus), 'GPU')} tell their bad pages{why}",
            "run amd-smi bad-pages on the node; some sites let only root see them",
        )
    problems = []
    for index, pages in known:
        waiting = {name: pages.get(name, 0) for name in ("pending", "unreservable") if pages.get(name)}
        if waiting:
            listed = ", ".join(f"{count} {name}" for name, count in waiting.items())
            problems.append(failed(f"GPU {index}: bad pages: {listed}", "exclude the node until the GPU is reset"))
        elif pages.get("retired"):
            text = f"GPU {index}: {counted(pages['retired'], 'retired page')}"
            problems.append(warned(text, "have the GPU replaced if the number grows"))
    return worst(problems, f"no bad pages on {counted(len(known), 'GPU')}")


CHECK = Check("gpu-pages", "gpu", "bad pages of GPU memory: retired, pending, not reservable", "node", check)
