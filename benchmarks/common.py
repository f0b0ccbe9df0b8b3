"""What every benchmark needs: alternating measurements, a description of the machine, and the result file."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Timing:
    """Wall times of one contender, in seconds."""

    name: str
    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def row(self) -> dict[str, Any]:
        """Median and spread."""
        return {
            "name": self.name,
            "median_s": round(self.median, 4),
            "min_s": round(min(self.seconds), 4),
            "max_s": round(max(self.seconds), 4),
            "runs": len(self.seconds),
        }


def ratio(slower: Timing, faster: Timing) -> float:
    """How many times as long one takes as the other, by their medians."""
    return round(slower.median / faster.median, 2)


def alternate(
    contenders: Mapping[str, Callable[[], object]],
    *,
    runs: int,
    warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time contenders in turn, so that a slow minute of the machine hits all of them.

    For what runs on one thread, `clock` can be `time.process_time`, which others on the machine hardly change.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(warm_up + runs):
        for name, action in contenders.items():
            started = clock()
            action()
            seconds = clock() - started
            if turn >= warm_up:
                times[name].append(seconds)
    return {name: Timing(name, seconds) for name, seconds in times.items()}


def export(commit: str, folder: str | Path, *paths: str) -> None:
    """Put what a commit holds at `paths`, by default everything, into a folder."""
    archive = subprocess.run(["git", "archive", commit, *paths], cwd=ROOT, check=True, capture_output=True)
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)


def machine() -> dict[str, Any]:
    """The kind of machine, without names of hosts or paths."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def write_result(name: str, figures: dict[str, Any]) -> Path:
    """Write results/NAME.json with the command, the date and the machine; print it as well."""
    body = {
        "benchmark": name,
        "command": f"python -m benchmarks {name}",
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        **figures,
    }
    text = json.dumps(body, indent=2) + "\n"
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(text)
    sys.stdout.write(text)
    return path
