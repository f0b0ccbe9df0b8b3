"""A killed rank: from SIGKILL to the first new step, in memory, by kill and start, and by torchrun.

Four ranks of a small model, one thread each, and one of them is killed, in turns:

    in memory         surviving ranks stay, a warm process takes the place (train/recovery); a controller in this
                      process plays the supervisor: it sees the exit, and publishes the next generation
    kill and start    the others are killed as well, and four new processes resume from the last checkpoint
    torchrun          `torchrun --max-restarts` does that by itself, with its own monitor (10 times a second)

The time ends with the line of metrics of the first step after the fault. Steps lost are those that were done, and
had to be done again. No contender's time has the supervisor's detection in it: the parent sees that a child died.
`parts` has where the seconds in memory went, as rank 0 measured them, with its processor time
(train/recovery/durations.py); `detect` is until the next generation was published, `first_step` until that line.
What the copies cost is measured by `recovery_copies`.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import TCPStore

from benchmarks.common import write_result
from tests.train.recovery.cluster import Cluster
from tests.train.runs import clean_environment, make_corpus, make_run, steps_of
from tests.waiting import wait_for

RANKS = 4
TURNS = int(os.environ.get("ZSLURM_BENCHMARK_TURNS", "3"))
STEPS_BEFORE = 12
SAVE_EVERY = 10
MODEL = {"hidden_size": 128, "layers": 4, "expert_hidden_size": 192, "router_hidden_size": 16}
PHASE = {"context": 64, "global_batch": 8, "micro_batch": 1}


def run() -> None:
    """Measure, and write the result."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        corpus = make_corpus(place / "corpus.h5")
        numbers = itertools.count()

        def new_run(steps: int) -> Path:
            phase = PHASE | {"tokens": steps * PHASE["context"] * PHASE["global_batch"]}
            checkpoint = {"every_steps": SAVE_EVERY, "background": True}
            return make_run(
                place / f"run-{next(numbers)}", corpus, model=MODEL, phase=phase, checkpoint=checkpoint
            )

        parts: list[dict[str, Any]] = []
        contenders: dict[str, Callable[[Path], tuple[float, int]]] = {
            "in memory": partial(in_memory, parts=parts),
            "kill and start": kill_and_start,
            "torchrun": by_torchrun,
        }
        found: dict[str, list[tuple[float, int]]] = {name: [] for name in contenders}
        for _ in range(TURNS):
            for name, measure in contenders.items():
                found[name].append(measure(new_run(100_000)))
                print(f"{name}: {found[name][-1][0]:.3f} s, {found[name][-1][1]} steps lost", flush=True)
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "seconds_median": round(statistics.median(seconds for seconds, _ in results), 3),
            "seconds": [round(seconds, 3) for seconds, _ in results],
            "steps_lost": [lost for _, lost in results],
        }
        for name, results in found.items()
    ]
    ours, started, torchrun = (row["seconds_median"] for row in rows)
    write_result(
        "recovery",
        {
            "what": "SIGKILL of one of four ranks to the first new step; steps that had to be done again",
            "contenders": rows,
            "parts": parts,
            "kill_and_start_takes_times": round(started / ours, 1),
            "torchrun_takes_times": round(torchrun / ours, 1),
            "load_average": round(os.getloadavg()[0], 1),
        },
    )


def last_step(run: Path) -> int:
    """The last step that a run has recorded."""
    rows = steps_of(run)
    return int(rows[-1]["step"]) if rows else 0


def first_after(run: Path, lines: int, killed: float) -> tuple[float, int]:
    """Seconds from the kill to the first step that is recorded after `lines`, and the steps that were lost."""
    before = max(row["step"] for row in steps_of(run)[:lines])
    wait_for(lambda: len(steps_of(run)) > lines, "a new step", every_s=0.005)
    row = steps_of(run)[lines]
    return float(row["time"]) - killed, before - (row["step"] - 1)


def in_memory(run: Path, parts: list[dict[str, Any]]) -> tuple[float, int]:
    """One fault of a run with recovery in memory; where its seconds went is added to `parts`."""
    cluster = Cluster(run, RANKS)
    try:
        cluster.wait_warm(1)
        wait_for(lambda: last_step(run) >= STEPS_BEFORE, "steps")
        killed = time.time()
        cluster.kill([1])
        cluster.replace(cluster.wait_lost(), ["w0"])
        published = time.time()
        outcome = cluster.outcome()
        recovered = time.time()
        assert outcome["event"] == "recovered", outcome
        first, lost = int(outcome["step"]) + 1, int(outcome["rolled_back"])

        def rows_of_first() -> list[dict[str, Any]]:
            rows = [row for row in steps_of(run) if row["step"] == first]
            return rows if len(rows) > min(1, lost) else []

        done = float(wait_for(rows_of_first, "a new step", every_s=0.005)[-1]["time"])
        parts.append({"detect": round(published - killed, 3)} | parts_of(cluster.output("0")))
        parts[-1]["first_step"] = round(done - recovered, 3)
        return done - killed, lost
    finally:
        cluster.stop()


def parts_of(log: str) -> dict[str, dict[str, float]]:
    """The parts of the recovery that a rank has written to its log: seconds by the clock, and of its processor."""
    line = next(line for line in log.splitlines() if "seconds (of the processor)" in line)
    found = re.findall(r"(\w+) ([\d.]+) \(([\d.]+)\)", line)
    return {name: {"s": float(wall), "cpu_s": float(processor)} for name, wall, processor in found}


class Processes:
    """Four processes of `python -m zslurm.train`, as kill and start has them."""

    def __init__(self, run: Path) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes = [self._start(run, rank) for rank in range(RANKS)]

    def _start(self, run: Path, rank: int) -> subprocess.Popen[bytes]:
        environment = clean_environment() | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }  # fmt: skip
        return subprocess.Popen(
            [sys.executable, "-m", "zslurm.train", str(run)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def kill(self) -> None:
        """End all of them."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()


def kill_and_start(run: Path) -> tuple[float, int]:
    """One fault of a run whose ranks are all started again."""
    ranks = Processes(run)
    try:
        wait_for(lambda: last_step(run) >= STEPS_BEFORE, "steps")
        killed = time.time()
        ranks.processes[1].kill()
        ranks.processes[1].wait()
        ranks.kill()
        lines = len(steps_of(run))
        ranks = Processes(run)
        return first_after(run, lines, killed)
    finally:
        ranks.kill()


def by_torchrun(run: Path) -> tuple[float, int]:
    """One fault of a run under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    agent = subprocess.Popen(
        [*command, "--max-restarts=3", "-m", "zslurm.train", str(run)],
        env=clean_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: last_step(run) >= STEPS_BEFORE, "steps")
        workers = psutil.Process(agent.pid).children()
        killed = time.time()
        workers[1].kill()
        wait_for(lambda: not any(worker.is_running() for worker in workers), "the workers' end", every_s=0.01)
        return first_after(run, len(steps_of(run)), killed)
    finally:
        agent.send_signal(signal.SIGTERM)
        agent.wait()
