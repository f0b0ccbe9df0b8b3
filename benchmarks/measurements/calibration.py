"""`zslurm calibrate` on eight nodes: a tuned first step, the same values again, and a node that is slowed.

On the real Slurm of the tests (needs root), whose ranks are CPUs of this machine, as an ordinary user:

    first_step    the commands from no profile to the first step of a run, and the minutes of each; calibrate gets
                  MINUTES, as its time is what a user gives it
    repeated      three calibrations of the same two nodes: how far each value is from the median of the three, and
                  the spread that is stored with it. A value is found again if it is within twice that spread. Rows
                  of the results are compared with those of the first run as `zslurm bench compare` does
    slowed        one of three nodes has 80 % of the speed (tests/bench/slow_rank.py), in turn: runs that name it
                  and no other; and runs with no slowed node that name none

The load of the machine before each is in the result: all nodes share its cores.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.common import write_result
from tests.bench.slow_rank import slowed
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.on_slurm.cluster.user import User
from zslurm.bench.result import BenchResult, read_result
from zslurm.bench.results.compare import compare
from zslurm.cluster.measurements import Measurements, StoredValue, read_measurements, results_folder
from zslurm.slurm.hostlist import expand

MINUTES, REPEATS, SLOWED, UNDISTURBED, NODES = 5.0, 3, 10, 5, 3
EXTRA = 0.25
_SIGMAS = 2.0
_NAME = "lab"
_ON_CPUS = {"dtype": "fp32", "threads": 1, "device": "cpu"}
_STEP_EVERY_S = 0.1
_PARTS = ("memory", "collectives", "storage")


def run() -> None:
    """Measure and write results/calibration.json."""
    with SlurmCluster() as cluster:
        lab = _Lab(cluster)
        figures = {"first_step": lab.first_step(), "repeated": lab.repeated(), "slowed": lab.slow_nodes()}
    write_result("calibration", figures)


class _Lab:
    """An ordinary user of a new cluster, who has no profile yet."""

    def __init__(self, cluster: SlurmCluster) -> None:
        self.cluster = cluster
        self.directory = cluster.user_dir("calibration")
        self.user = User(cluster, self.directory, forks=False)
        self.config = {"XDG_CONFIG_HOME": str(self.directory / "config"), "OMP_NUM_THREADS": "1"}

    def zslurm(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a command as the user; 5 (nodes that fail) and 75 (something is left to measure) are answers too."""
        done = self.cluster.zslurm(*words, env=self.config | environ, cwd=self.directory, check=False)
        if done.returncode not in (0, 5, 75):
            raise RuntimeError(f"zslurm {' '.join(words)}: {done.returncode}: {done.stderr}")
        return done

    def first_step(self) -> dict[str, Any]:
        """Type the commands of docs/bring-up.md."""
        load = os.getloadavg()[0]
        self.user.write_run("first", steps=1000, trainer="real", forked_ranks=False, parallel=_ON_CPUS)
        commands = [
            ["init", "--yes", "--name", _NAME],
            ["doctor", "--nodes", "2", "--quiet"],
            ["calibrate", "first.yaml", "--nodes", "2", "--ranks", "1", "--time", f"{MINUTES:g}"],
            ["submit", "first.yaml"],
        ]
        began, minutes = time.monotonic(), []
        for command in commands:
            at = time.monotonic()
            self.zslurm(*command)
            minutes.append(round((time.monotonic() - at) / 60, 2))
        while not any(True for _ in self._steps()):
            time.sleep(_STEP_EVERY_S)
        whole = (time.monotonic() - began) / 60
        shown = self.zslurm("submit", "first.yaml", "--dry-run", "--json", "--set", "run.name=second")
        self.zslurm("cancel", "first", "--wait")
        stored = self._store(self.directory / "config" / "zslurm" / "clusters" / f"{_NAME}.measured.json")
        return {
            "load_before": round(load, 1),
            "commands": [f"zslurm {' '.join(command)}" for command in commands],
            "minutes": minutes,
            "minutes_to_first_step": round(whole, 2),
            "values_measured": sorted(stored.values),
            "parts_measured": sorted(name for name, part in stored.parts.items() if part.complete),
            "run_takes": [
                {**row, "source": row["source"].partition(", /")[0]} for row in json.loads(shown.stdout)["sources"]
            ],
        }

    def _steps(self) -> list[dict[str, Any]]:
        try:
            return self.user.steps("first")
        except FileNotFoundError:
            return []

    def repeated(self) -> dict[str, Any]:
        """Calibrate the same nodes again and again; returns each value with its distances and its spread."""
        load, stores, results = os.getloadavg()[0], [], []
        for number in range(REPEATS):
            store = self.directory / f"again-{number}.json"
            self.zslurm(
                "calibrate", "first.yaml", "--nodelist", ",".join(self.cluster.node_names[:2]), "--ranks", "1",
                "--time", f"{MINUTES:g}", "--path", ".", *(word for part in _PARTS for word in ("--only", part)),
                "--out", str(store),
            )  # fmt: skip
            stores.append(self._store(store))
            results.append([read_result(results_folder(store) / f"{part}.json") for part in _PARTS])
        keys = sorted(set.intersection(*(set(store.values) for store in stores)))
        values = {key: _agreement([store.values[key] for store in stores]) for key in keys}
        return {
            "load_before": round(load, 1),
            "runs": REPEATS,
            "values": values,
            "found_again": sum(value["within"] for value in values.values()),
            "of": len(values),
            "not_in_all_runs": sorted(set().union(*(store.values for store in stores)) - set(keys)),
            "rows": {part: _outcomes([of_run[index] for of_run in results]) for index, part in enumerate(_PARTS)},
        }

    def slow_nodes(self) -> dict[str, Any]:
        """Slow one node after the other, and count how often it is named."""
        load = os.getloadavg()[0]
        slow = [self._named(number, number % NODES) for number in range(SLOWED)]
        undisturbed = [self._named(SLOWED + number, None) for number in range(UNDISTURBED)]
        return {
            "load_before": round(load, 1),
            "nodes": NODES,
            "slowed_by": round(1 - 1 / (1 + EXTRA), 3),
            "runs": SLOWED,
            "named_rightly": sum(row["named"] == [row["slow"]] for row in slow),
            "undisturbed_runs": UNDISTURBED,
            "false_names": sum(bool(row["named"]) for row in undisturbed),
            "runs_found": [*slow, *undisturbed],
        }

    def _named(self, number: int, slow: int | None) -> dict[str, Any]:
        folder = self.directory / f"slow-{number}"
        folder.mkdir()
        environ = slowed("zslurm.bench.mlp", "Stack.step", slow, folder, EXTRA)
        self.cluster.run_as_root(["chmod", "-R", "a+rX", str(folder)])
        nodes = self.cluster.node_names[:NODES]
        store = self.directory / f"slow-{number}.json"
        self.zslurm(
            "calibrate", "first.yaml", "--nodelist", ",".join(nodes), "--ranks", "1", "--only", "nodes",
            "--time", f"{MINUTES:g}", "--out", str(store), **environ,
        )  # fmt: skip
        part = self._store(store).parts["nodes"]
        return {"slow": None if slow is None else expand(part.nodes)[slow], "named": sorted(part.exclude)}

    @staticmethod
    def _store(path: Path) -> Measurements:
        found = read_measurements(path, _NAME)
        assert found is not None
        return found


def _outcomes(results: list[BenchResult]) -> dict[str, int]:
    """Return how many rows of the later results are as in the first, to the noise of their repetitions."""
    counts: Counter[str] = Counter()
    for result in results[1:]:
        counts.update(change.outcome for change in compare(results[0], result).changes)
    return dict(counts)


def _agreement(values: list[StoredValue]) -> dict[str, Any]:
    """Return how far the values are from their median, next to the spread that is stored with them."""
    numbers = [value.value for value in values]
    if not all(isinstance(number, float | int) for number in numbers):
        return {"values": [str(number) for number in numbers], "within": len(set(map(str, numbers))) == 1}
    median = statistics.median(float(number) for number in numbers)  # type: ignore[arg-type]
    furthest = max(abs(math.log(float(number) / median)) for number in numbers)  # type: ignore[arg-type]
    spread = max(value.spread or 0.0 for value in values)
    return {
        "values": numbers,
        "furthest": round(furthest, 3),
        "spread": round(spread, 3),
        "within": furthest <= _SIGMAS * spread,
    }
