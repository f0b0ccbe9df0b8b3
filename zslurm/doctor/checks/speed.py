"""Checks that load the machine, and run only if they are asked for: the GPUs' speed, and torch."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zslurm.checkpoint_tools.quantities import counted
from zslurm.config.software import is_card
from zslurm.doctor.check import CheckOutcome, check, failed, passed, unavailable, warned, worst
from zslurm.hardware.command import CommandHung
from zslurm.hardware.node_sources import Sources

_TIME_FACTOR = 4
_CORES_PER_GPU = 4

_TORCH = """
import json, torch
hip, cuda = torch.version.hip, torch.version.cuda
kind = f"ROCm {hip}" if hip else f"CUDA {cuda}" if cuda else "the CPU"
print(json.dumps([torch.__version__, kind, torch.cuda.device_count()]))
"""

_UNITS = {"product": "TFLOPS", "memory": "GB/s of memory", "all_reduce": "GB/s of all-reduce"}


@check("speed", "speed of GPUs against the cluster's measurements", "node", on_request=True)
def speed(sources: Sources) -> CheckOutcome:
    """Measure this node by `zslurm bench speed`, and compare it with what the cluster's other nodes reached.

    The limits are those that `zslurm calibrate` measured, 90 % of the median; without it, those of Primus'
    node_smoke for MI300X. Low figures on a good node are almost always too few cores for the step.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "speed.json")
        arguments = ("-P", "-m", "zslurm", "bench", "speed", "--out", str(file))
        try:
            done = sources.run(sys.executable, *arguments, timeout_s=_TIME_FACTOR * sources.limits.check_s)
        except CommandHung as error:
            return failed(f"the measurement hangs: {error}", "exclude the node")
        if done is None or not file.exists():
            message = (done and done.message) or "no message"
            return failed(f"nothing could be measured: {message}", "see the check torch-import")
        result: dict[str, Any] = json.loads(file.read_text())
    rows = {row["what"]: row for row in result["rows"]}
    wrong = [what for what, row in rows.items() if row["wrong"]]
    if wrong or not result["complete"]:
        why = f"wrong data in {', '.join(wrong)}" if wrong else "; ".join(result["notes"])
        return failed(why, "exclude the node")
    device = result["machine"]["gpu"]
    data = {"device": device or "cpu"} | {what: row["ranks_rate"] for what, row in rows.items()}
    shown = ", ".join(f"{_figure(row['least_rate'])} {_UNITS[what]}" for what, row in rows.items())
    card = sources.cluster.gpu_family or sources.cluster.gpu_type
    if device is None and sources.cluster.gpus_per_node:
        gpus = counted(sources.cluster.gpus_per_node, "GPU")
        return unavailable(f"torch sees none of the {gpus} (see torch-import); on the CPU: {shown}", data=data)
    if device is None:
        return passed(f"on the CPU, without a threshold: {shown}", data=data)
    if not is_card(card, device):
        remedy = "give these nodes a profile of their own, and measure it with `zslurm calibrate`"
        return warned(f"{device}, not the profile's {card}: no threshold; {shown}", remedy, data=data)
    return worst(_below_limits(rows, sources), shown, data=data)


def _below_limits(rows: Mapping[str, Mapping[str, Any]], sources: Sources) -> Sequence[CheckOutcome]:
    """Return an outcome for each GPU, and for the all-reduce, that is below its limit."""
    limits = sources.limits
    least = {"product": limits.gemm_tflops, "memory": limits.hbm_gb_s, "all_reduce": limits.all_reduce_gb_s}
    cores = len(os.sched_getaffinity(0))
    outcome, remedy = failed, "exclude the node; look at its clocks and power limits"
    if cores < _CORES_PER_GPU * len(rows["product"]["ranks_rate"]):
        few = f"only {counted(cores, 'core')} here: run with more, low figures are almost always that"
        outcome, remedy = warned, f"{few}; else exclude the node"
    problems = []
    for what, row in rows.items():
        values = row["ranks_rate"][:1] if what == "all_reduce" else row["ranks_rate"]  # one figure for all GPUs
        for index, value in enumerate(values):
            if value < least[what]:
                whose = f"GPU {index}: " if len(values) > 1 else ""
                problems.append(outcome(f"{whose}{value:.0f} {_UNITS[what]}, under {least[what]:g}", remedy))
    return problems


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


@check("speed", "torch can be imported and sees all GPUs", "node", on_request=True)
def torch_import(sources: Sources) -> CheckOutcome:
    """Import torch in a separate process: a missing library ends that one, not the doctor."""
    try:
        done = sources.run(sys.executable, "-c", _TORCH, timeout_s=sources.limits.check_s)
    except CommandHung as error:
        remedy = "look whether its file system is slow (srun -w NODE python -X importtime)"
        return failed(f"importing torch: {error}", remedy)
    if done is None or done.code != 0:
        message = (done and done.message) or "no message"
        return failed(f"torch cannot be imported: {message}", "load ROCm in cluster.setup")
    version, kind, devices = json.loads(done.out.splitlines()[-1])
    facts = {"torch's build": f"{version} for {kind}"}
    if devices < sources.cluster.gpus_per_node:
        gpus = counted(sources.cluster.gpus_per_node, "GPU")
        remedy = "install the torch of these GPUs; look at /dev/kfd's group and at ROCR_VISIBLE_DEVICES"
        return failed(f"torch {version} ({kind}) sees {devices} of {gpus}", remedy, must_match=facts)
    return passed(f"torch {version} ({kind}), {counted(devices, 'GPU')}", must_match=facts)
