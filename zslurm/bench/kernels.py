"""Times of every implementation of the kernels' operations on one GPU, or on a CPU with small operands.

Rank 0 measures; the implementations of a case take turns. What follows from the rows, which implementation a run
takes for which sizes, is in results/tables.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from zslurm.bench.measurement import CannotMeasure, MeasurementPlan, Options, Point, Row
from zslurm.bench.ranks import BenchRanks
from zslurm.bench.result import MeasuredMachine
from zslurm.kernels.arch import arch_of
from zslurm.kernels.case import Case, benchmarks_of
from zslurm.kernels.dispatch import REFERENCE, Operation, failed_to_start, operations
from zslurm.kernels.harness.timing import medians, triad

WORTH = 0.98
"""Another implementation is taken if it needs less than this share of the reference's time."""

_CASE_S = 1.0


def points(options: Options, machine: MeasuredMachine) -> MeasurementPlan:
    """Return a point for each case of the operations whose folders are in `only`, of all if it is empty."""
    folders = dict.fromkeys(name.partition(".")[0] for name in operations())
    if unknown := [name for name in options["only"] if name not in folders]:
        raise CannotMeasure(f"--only {unknown[0]}: no such operation, expected one of {', '.join(folders)}")
    planned = [
        Point({"operation": name, "case": number, "small": machine.device == "cpu"}, _CASE_S)
        for name in operations()
        if not options["only"] or name.partition(".")[0] in options["only"]
        for number in range(len(benchmarks_of(name, small=machine.device == "cpu")))
    ]
    return MeasurementPlan(planned)


def run(point: Point, ranks: BenchRanks) -> Row | None:
    """Measure a case on rank 0."""
    if not ranks.is_first:
        return None
    values = point.values
    case = benchmarks_of(values["operation"], small=values["small"])[values["case"]]
    return measure(operations()[values["operation"]], case, ranks.device)


def measure(operation: Operation, case: Case, device: torch.device) -> Row:
    """Time the reference and every other implementation that takes the operands and can start."""
    call = case.make(device)
    runs, missing = {}, {}
    for implementation in operation.all():
        lacks = implementation.supports(*call.args(), **call.kwargs)
        if lacks is not None:
            missing[implementation.name] = f"does not take {lacks}"
            continue
        run_once = partial(_call, implementation.run, call)
        try:
            run_once()
        except Exception as error:
            if not failed_to_start(error):
                raise
            missing[implementation.name] = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            runs[implementation.name] = run_once
    seconds = medians(runs, device)
    fastest = min(seconds, key=lambda name: seconds[name])
    if seconds[fastest] >= WORTH * seconds[REFERENCE]:
        fastest = REFERENCE
    best = seconds[fastest]
    return {
        "operation": operation.name,
        "case": case.name,
        "architecture": arch_of(device).name,
        "axis": case.axis,
        "sizes": dict(operation.sizes(*call.args(), **call.kwargs)),
        "fastest": fastest,
        "us": 1e6 * best,
        "of_reference": best / seconds[REFERENCE],
        "tflops": case.flops / best / 1e12 if case.flops else None,
        "of_triad": case.bytes / best / triad(device),
        "seconds": best,
        "spread": 0.0,
        "samples": 1,
        "seconds_of": seconds,
        "missing": missing,
    }


def _call(run_once: Any, call: Any) -> None:
    run_once(*call.args(), **call.kwargs)
