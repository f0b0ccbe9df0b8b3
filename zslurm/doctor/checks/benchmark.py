"""Are the GPUs as fast as healthy ones, and the links between them?

The thresholds are those of Primus' node_smoke: healthy MI300X reach 4,500 to 5,000 GB/s where 2,000 is the
threshold. Low figures on a good node are almost always too few cores for the step.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

from zslurm.checkpoint_tools.quantities import counted
from zslurm.doctor.check import Check, Outcome, failed, passed, warned, worst
from zslurm.hardware.command import CommandHung
from zslurm.hardware.node_sources import Sources

_TIME_FACTOR = 4
_CORES_PER_GPU = 4


def check(sources: Sources) -> Outcome:
    """Matrix product and memory traffic of each GPU, all-reduce among them; without GPUs, figures of the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ("-P", "-m", "zslurm.doctor.speed", folder)
        try:
            done = sources.run(sys.executable, *arguments, timeout_s=_TIME_FACTOR * sources.limits.check_s)
        except CommandHung as error:
            return failed(f"the benchmark hangs: {error}", "exclude the node")
    if done is None or done.code != 0:
        words = done.err.strip().splitlines() if done else []
        return failed(
            f"the benchmark cannot run: {words[-1] if words else 'no message'}", "see the check torch-import"
        )
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
    few = cores < _CORES_PER_GPU * len(figures["gemm_tflops"])
    cause = (
        f"only {counted(cores, 'core')} here: run with more, low figures are almost always that; "
        "else exclude the node"
    )
    problems = [
        (warned if few else failed)(
            f"GPU {index}: {value:.0f} {unit}, under {threshold:g}"
            if len(values) > 1
            else f"{value:.0f} {unit}, under {threshold:g}",
            cause if few else "exclude the node; look at its clocks and power limits",
        )
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


CHECK = Check(
    "benchmark", "benchmark", "speed of GPUs: matrix product, memory, all-reduce", "node", check, on_request=True
)
