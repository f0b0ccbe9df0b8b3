"""What the copies of recovery in memory cost: the time of a step with them, and without.

Four ranks of the small model of `recovery`, one thread each, runs in turn. It is measured twice: with ranks
that fill the cores, so that copies have none free, and with a wait of DEVICE_S seconds in each forward pass, in
which a GPU would compute and its host's core is free. The figure is the median over turns of the ratio of both
medians.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.aegis.recovery import MODEL, PHASE, RANKS, SAVE_EVERY
from benchmarks.common import write_result
from tests.train.recovery.cluster import Cluster
from tests.train.runs import make_corpus, make_run, steps_of
from zslurm.train.config import load_train_config
from zslurm.train.plan.memory import plan_memory

TURNS = int(os.environ.get("ZSLURM_BENCHMARK_TURNS", "5"))
STEPS, FIRST = 25, 5
DEVICE_S = 0.25


def run() -> None:
    """Measure, and write the result."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        corpus = make_corpus(place / "corpus.h5")
        numbers = itertools.count()

        def new_run() -> Path:
            phase = PHASE | {"tokens": STEPS * PHASE["context"] * PHASE["global_batch"]}
            checkpoint = {"every_steps": SAVE_EVERY, "background": True}
            return make_run(
                place / f"run-{next(numbers)}", corpus, model=MODEL, phase=phase, checkpoint=checkpoint
            )

        free, shared = (cost(new_run, device_s) for device_s in (DEVICE_S, 0.0))
        plan = plan_memory(load_train_config(new_run() / "config.json"), RANKS, on_cpu=True)
    write_result(
        "recovery_copies",
        {
            "what": f"median time of a step of {RANKS} ranks with copies after each step, over that without",
            "where_cores_are_free": {"device_s": DEVICE_S} | free,
            "where_ranks_fill_the_cores": shared,
            "copies_bytes_per_rank": plan.copies,
            "load_average": round(os.getloadavg()[0], 1),
        },
    )


def cost(new_run: Callable[[], Path], device_s: float) -> dict[str, Any]:
    """Measure steps with and without copies, in turns."""
    found: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(TURNS):
        for copies in found:
            found[copies].append(step_time(new_run(), copies=copies, device_s=device_s))
            print(f"a step {'with' if copies else 'without'} copies: {found[copies][-1]:.4f} s", file=sys.stderr)
    ratios = [more / less for more, less in zip(found[True], found[False], strict=True)]
    return {
        "step_s_with_copies": round(statistics.median(found[True]), 5),
        "step_s_without": round(statistics.median(found[False]), 5),
        "copies_cost_percent": round(100 * (statistics.median(ratios) - 1), 1),
        "of_turns": [round(100 * (ratio - 1), 1) for ratio in ratios],
    }


def step_time(run: Path, *, copies: bool, device_s: float) -> float:
    """The median time of a step."""
    cluster = Cluster(run, RANKS, warm=0, recovery="memory" if copies else "restart", device_s=device_s)
    try:
        codes = cluster.finish()
        assert set(codes.values()) == {0}, codes
    finally:
        cluster.stop()
    return float(statistics.median(row["step_time_s"] for row in steps_of(run)[FIRST:]))
