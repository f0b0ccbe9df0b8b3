"""Are all GPUs there?"""

from __future__ import annotations

from collections import Counter

from zslurm.checkpoint_tools.quantities import counted
from zslurm.doctor.check import Check, Outcome, Status, failed, passed, unavailable
from zslurm.hardware.node_sources import Sources


def check(sources: Sources) -> Outcome | None:
    """The GPUs that the kernel and their tool show, against the profile's number."""
    expected, facts = sources.cluster.gpus_per_node, sources.facts
    if not expected and not facts.gpus:
        return None
    models = Counter(gpu.model or gpu.pci_id or "unknown model" for gpu in facts.gpus)
    must_match = {"GPUs": ", ".join(f"{count} x {model}" for model, count in sorted(models.items())) or None}
    tool, reported = sources.gpus.source, len(sources.gpus.health)
    found = len(facts.gpus)
    if not found and not reported:
        if not (sources.path("/sys/bus/pci/devices").is_dir() or sources.path("/sys/class/kfd").is_dir()):
            return unavailable(
                "neither sysfs nor a tool shows any GPU", "look whether /sys is mounted", must_match=must_match
            )
        return failed(
            f"no GPU is there, {expected} expected",
            "look whether the driver is loaded (lsmod | grep amdgpu) and for errors in the kernel log",
            must_match=must_match,
        )
    if found < expected:
        return failed(
            f"{found} of {counted(expected, 'GPU is', 'GPUs are')} there",
            "one has fallen off the bus: exclude the node and have it reset",
            must_match=must_match,
        )
    if tool in ("amd-smi", "nvidia-smi") and reported < found:
        return failed(
            f"{tool} shows {reported} of {counted(found, 'GPU')}",
            "the driver has lost one: exclude the node and have it reset",
            must_match=must_match,
        )
    return passed(counted(found, "GPU"), must_match=must_match)


CHECK = Check(
    "gpu-count",
    "gpu",
    "all GPUs are there, by sysfs and by their tool",
    "node",
    check,
    inconsistent=Status.WARN,
)
