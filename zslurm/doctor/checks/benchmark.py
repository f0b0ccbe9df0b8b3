"""Checks that load the machine, and run only if they are asked for: the GPUs' speed, and torch."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

from zslurm.checkpoint_tools.quantities import counted
from zslurm.doctor.check import CheckOutcome, check, failed, passed, warned, worst
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


@check("benchmark", "speed of GPUs: matrix product, memory, all-reduce", "node", on_request=True)
def benchmark(sources: Sources) -> CheckOutcome:
    """Measure matrix product and memory traffic of each GPU, and all-reduce; without GPUs, the same of the CPU.

    The thresholds are from Primus' node_smoke: healthy MI300X reach 4,500 to 5,000 GB/s where 2,000 is the
    threshold. Low figures on a good node are almost always too few cores for the step.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = ("-P", "-m", "zslurm.doctor.speed", folder)
        try:
            done = sources.run(sys.executable, *arguments, timeout_s=_TIME_FACTOR * sources.limits.check_s)
        except CommandHung as error:
            return failed(f"the benchmark hangs: {error}", "exclude the node")
    if done is None or done.code != 0:
        message = (done and done.message) or "no message"
        return failed(f"the benchmark cannot run: {message}", "see the check torch-import")
    figures: dict[str, Any] = json.loads(done.out.splitlines()[-1])
    shown = _shown(figures)
    if figures["device"] == "cpu":
        return passed(f"on the CPU, without a threshold: {shown}", data=figures)
    limits = sources.limits
    thresholds = (
        ("TFLOPS", figures["gemm_tflops"], limits.gemm_tflops),
        ("GB/s of memory", figures["memory_gb_s"], limits.hbm_gb_s),
        ("GB/s of all-reduce", [figures["all_reduce_gb_s"]], limits.all_reduce_gb_s),
    )
    cores = len(os.sched_getaffinity(0))
    outcome, remedy = failed, "exclude the node; look at its clocks and power limits"
    if cores < _CORES_PER_GPU * len(figures["gemm_tflops"]):
        few = f"only {counted(cores, 'core')} here: run with more, low figures are almost always that"
        outcome, remedy = warned, f"{few}; else exclude the node"
    problems = [
        outcome(f"{f'GPU {index}: ' if len(values) > 1 else ''}{value:.0f} {unit}, under {threshold:g}", remedy)
        for unit, values, threshold in thresholds
        for index, value in enumerate(values)
        if value is not None and value < threshold
    ]
    return worst(problems, shown, data=figures)


def _shown(figures: dict[str, Any]) -> str:
    product, memory = (_figure(min(figures[name])) for name in ("gemm_tflops", "memory_gb_s"))
    slowest = f"{product} TFLOPS, {memory} GB/s of memory"
    reduced = figures["all_reduce_gb_s"]
    return slowest if reduced is None else f"{slowest}, {_figure(reduced)} GB/s of all-reduce"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


@check("benchmark", "torch can be imported and sees all GPUs", "node", on_request=True)
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
