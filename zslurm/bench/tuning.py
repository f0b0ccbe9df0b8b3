"""Solutions of BLAS libraries for a run's matrix products, by torch's TunableOp on one GPU.

Rank 0 tunes. The rows of a call have the rates before and after, and what TunableOp found, from which
results/tables.py makes the table that runs look up.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from zslurm.bench.measurement import CannotMeasure, MeasurementPlan, Options, Point, Row
from zslurm.bench.ranks import BenchRanks
from zslurm.bench.result import MeasuredMachine, Skipped
from zslurm.kernels.tunable_op import agrees, tune
from zslurm.train.parallel.world import DTYPES

_PASS_S = 5.0
"""An estimate: hundreds of solutions of some milliseconds each."""


def points(options: Options, machine: MeasuredMachine) -> MeasurementPlan:
    """Return a point for each call of `F.linear` (train/plan/tunable.py), the largest first."""
    if machine.device != "cuda":
        raise CannotMeasure(
            f"torch sees no GPU on {machine.nodes[0]}; --nodes 1 or --nodelist tunes on a node that has one"
        )
    planned: list[Point] = []
    skipped: list[Skipped] = []
    for call in sorted(options["calls"], key=lambda call: -call["rows"] * call["outputs"]):
        elements = call["rows"] * (2 * call["inputs"] + 3 * call["outputs"]) + 3 * call["inputs"] * call["outputs"]
        if elements * DTYPES[call["dtype"]].itemsize > machine.gpu_memory:
            skipped.append(Skipped(point=call, reason="its operands do not fit the GPU's memory"))
            continue
        values = {**call, "solution_ms": options["solution_ms"]}
        planned.append(Point(values, _PASS_S * len(call["passes"])))
    return MeasurementPlan(planned, skipped)


def run(point: Point, ranks: BenchRanks) -> list[Row] | None:
    """Tune a call on rank 0."""
    if not ranks.is_first:
        return None
    os.environ.pop("PYTORCH_TUNABLEOP_FILENAME", None)
    return tuned_rows(point.values, torch.cuda.tunable, str(ranks.device))


def tuned_rows(call: dict[str, Any], tunable: Any, device: str) -> list[Row]:
    """Return a row for each pass of a call; the first one has TunableOp's results of all."""
    tunable.set_filename(os.devnull)  # else torch writes a file next to the command
    tunable.set_max_tuning_duration(call["solution_ms"])
    before = {row[:2] for row in tunable.get_results()}
    figures = tune(call, tunable, device)
    kept = agrees(figures)
    solutions = [list(row) for row in tunable.get_results() if row[:2] not in before] if kept else []
    tflop = 2.0 * call["rows"] * call["outputs"] * call["inputs"] / 1e12
    rows = []
    for number, name in enumerate(call["passes"]):
        default, tuned = figures[f"default.{name}"], figures[f"tuned.{name}"]
        rows.append({
            "product": call["name"], "pass": name, "dtype": call["dtype"],
            "m": call["rows"], "n": call["outputs"], "k": call["inputs"],
            "default_tflops": tflop / default, "tflops": tflop / (tuned if kept else default),
            "gain": default / tuned if kept else 1.0, "kept": kept,
            "seconds": tuned, "spread": 0.0, "samples": 1,
            "solutions": [] if number else solutions, "validators": dict(tunable.get_validators()),
        })  # fmt: skip
    return rows
