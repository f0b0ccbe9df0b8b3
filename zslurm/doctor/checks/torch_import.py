"""Can torch be imported, and does it see the GPUs?"""

from __future__ import annotations

import json
import sys

from zslurm.checkpoint_tools.quantities import counted
from zslurm.doctor.check import Check, Outcome, failed, passed
from zslurm.hardware.command import CommandHung
from zslurm.hardware.node_sources import Sources

_PROGRAM = """
import json, torch
hip, cuda = torch.version.hip, torch.version.cuda
kind = f"ROCm {hip}" if hip else f"CUDA {cuda}" if cuda else "the CPU"
print(json.dumps([torch.__version__, kind, torch.cuda.device_count()]))
"""


def check(sources: Sources) -> Outcome:
    """In a process of its own: a missing library ends it, not the doctor."""
    try:
        said = sources.run(sys.executable, "-c", _PROGRAM, timeout_s=sources.limits.check_s)
    except CommandHung as error:
        return failed(
            f"importing torch: {error}", "look whether its file system is slow (srun -w NODE python -X importtime)"
        )
    if said is None or said.code != 0:
        words = said.err.strip().splitlines() if said else []
        return failed(
            f"torch cannot be imported: {words[-1] if words else 'no message'}", "load ROCm in cluster.setup"
        )
    version, kind, devices = json.loads(said.out.splitlines()[-1])
    facts = {"torch's build": f"{version} for {kind}"}
    if devices < sources.cluster.gpus_per_node:
        return failed(
            f"torch {version} ({kind}) sees {devices} of {counted(sources.cluster.gpus_per_node, 'GPU')}",
            "install the torch of these GPUs; look at /dev/kfd's group and at ROCR_VISIBLE_DEVICES",
            must_match=facts,
        )
    return passed(f"torch {version} ({kind}), {counted(devices, 'GPU')}", must_match=facts)


CHECK = Check(
    "torch-import", "benchmark", "torch can be imported and sees all GPUs", "node", check, on_request=True
)
