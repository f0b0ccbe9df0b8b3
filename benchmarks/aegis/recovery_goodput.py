"""Goodput of ten minutes with a killed rank every 30 s: in memory, by kill and start, and by torchrun.

The contenders of `recovery`, one after the other on the same machine, each with four ranks of the same small model
and a save every SAVE_EVERY steps. Which rank is killed is drawn once, the same for all. The clock starts with a
run's first step, and runs for SECONDS (`ZSLURM_BENCHMARK_SECONDS` shortens it, to try the script).

Goodput is the share of this time that became kept steps: the highest step that was reached, times the median time
of a step over all contenders. It leaves out what faults cost, and nothing else: what copies and saves cost is in
the steps' time of who makes them, and shows in `step_s`.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.aegis.recovery import MODEL, PHASE, RANKS, Processes, last_step
from benchmarks.common import write_result
from tests.train.recovery.cluster import Cluster
from tests.train.runs import clean_environment, make_corpus, make_run, steps_of
from tests.waiting import wait_for

SECONDS = float(os.environ.get("ZSLURM_BENCHMARK_SECONDS", "600"))
EVERY_S = 30.0
SAVE_EVERY = 100
STEPS = 1_000_000

Fault = Callable[[int], None]
"""Kills a rank, and does what its contender does then."""


def run() -> None:
    """Measure, and write the result."""
    victims = random.Random(3).choices(range(RANKS), k=int(SECONDS / EVERY_S) + 1)
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        corpus = make_corpus(place / "corpus.h5")
        rows = []
        for name, measure in {
            "in memory": in_memory, "kill and start": kill_and_start, "torchrun": by_torchrun,
        }.items():  # fmt: skip
            phase = PHASE | {"tokens": STEPS * PHASE["context"] * PHASE["global_batch"]}
            checkpoint = {"every_steps": SAVE_EVERY, "background": True, "keep_last": 2}
            path = make_run(
                place / name.replace(" ", "-"), corpus, model=MODEL, phase=phase, checkpoint=checkpoint
            )
            rows.append({"name": name} | measure(path, victims))
            print(rows[-1], file=sys.stderr, flush=True)
    step_s = statistics.median(row["step_s"] for row in rows)
    for row in rows:
        row["goodput_percent"] = round(100 * row["steps"] * step_s / row["seconds"], 1)
    write_result(
        "recovery_goodput",
        {
            "what": f"{SECONDS:g} s of training, in which a rank is killed every {EVERY_S:g} s",
            "contenders": rows,
            "step_s": round(step_s, 5),
            "save_every_steps": SAVE_EVERY,
            "load_average": round(os.getloadavg()[0], 1),
        },
    )


def _watch(run: Path, victims: list[int], fault: Fault) -> dict[str, Any]:
    """Let a run train for the time, with its faults; its figures."""
    wait_for(lambda: last_step(run) >= 1, "the first step", deadline_s=600, every_s=0.01)
    began, first, faults = time.time(), last_step(run), 0
    while (until := began + (faults + 1) * EVERY_S) <= began + SECONDS:
        time.sleep(max(0.0, until - time.time()))
        fault(victims[faults])
        faults += 1
    time.sleep(max(0.0, began + SECONDS - time.time()))
    rows = [row for row in steps_of(run) if began < row["time"] <= began + SECONDS]
    seen = {row["step"] for row in rows}
    return {
        "seconds": SECONDS,
        "faults": faults,
        "steps": max(seen) - first,
        "steps_made_again": len(rows) - len(seen),
        "step_s": round(statistics.median(row["step_time_s"] for row in rows), 5),
    }


def in_memory(run: Path, victims: list[int]) -> dict[str, Any]:
    """Survivors stay, a warm process takes the place, and another one gets ready."""
    cluster = Cluster(run, RANKS)

    def fault(rank: int) -> None:
        cluster.wait_warm(cluster.warm_made)
        cluster.kill([rank])
        cluster.replace(cluster.wait_lost(), [f"w{cluster.warm_made - 1}"])
        outcome = cluster.outcome()
        assert outcome["event"] == "recovered", outcome
        cluster.add_warm()

    try:
        return _watch(run, victims, fault)
    finally:
        cluster.stop()


def kill_and_start(run: Path, victims: list[int]) -> dict[str, Any]:
    """All ranks are ended and started again from the newest checkpoint."""
    ranks = [Processes(run)]

    def fault(rank: int) -> None:
        ranks[0].processes[rank].kill()
        ranks[0].processes[rank].wait()
        ranks[0].kill()
        ranks[0] = Processes(run)

    try:
        return _watch(run, victims, fault)
    finally:
        ranks[0].kill()


def by_torchrun(run: Path, victims: list[int]) -> dict[str, Any]:
    """`torchrun --max-restarts` does that by itself."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    agent = subprocess.Popen(
        [*command, f"--max-restarts={2 * len(victims)}", "-m", "zslurm.train", str(run)],
        env=clean_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def fault(rank: int) -> None:
        workers = wait_for(lambda: _ranks(agent.pid), "the workers")
        workers[rank].kill()

    try:
        return _watch(run, victims, fault)
    finally:
        agent.send_signal(signal.SIGTERM)
        agent.wait()


def _ranks(agent: int) -> list[psutil.Process]:
    """The workers of torchrun, once all of them are there."""
    workers = [child for child in psutil.Process(agent).children() if "zslurm.train" in child.cmdline()]
    return workers if len(workers) == RANKS else []
