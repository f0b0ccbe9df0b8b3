"""Whether the knee of a collective's bandwidth is the same in five runs of `zslurm bench collectives`.

Two ranks on gloo, reduce_scatter, 4 KiB to 16 MiB. The peer is the definition taken literally: the smallest
measured size with 95 % of the highest bandwidth. What counts is the largest knee of the five runs over the
smallest; a power of two is asked for.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.common import write_result
from zslurm.bench.result import read_result
from zslurm.bench.results.knee import SHARE, Sample, knee_of

RUNS = 5
_OPTIONS = "--ranks 2 --operation reduce_scatter --scope node --min 4KiB --max 16MiB".split()


def curve(folder: Path, number: int) -> list[Sample]:
    """Measure once."""
    path = folder / f"{number}.json"
    command = [sys.executable, "-m", "zslurm", "bench", "collectives", *_OPTIONS, "--out", str(path)]
    subprocess.run(
        command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"XDG_STATE_HOME": str(folder)}
    )
    rows = read_result(path).rows
    return [Sample(row["bytes"], row["seconds"], row["spread"], row["samples"]) for row in rows]


def literal(samples: list[Sample]) -> int:
    """Return the smallest measured size with 95 % of the highest bandwidth."""
    highest = max(each.bytes / each.seconds for each in samples)
    return min(each.bytes for each in samples if each.bytes / each.seconds >= SHARE * highest)


def run() -> None:
    """Measure and write results/bench_knee.json."""
    with tempfile.TemporaryDirectory() as folder:
        curves = [curve(Path(folder), number) for number in range(RUNS)]
    knees = [knee for samples in curves if (knee := knee_of(samples)) is not None]
    fitted, read_off = [knee.bytes for knee in knees], [literal(samples) for samples in curves]
    load = os.getloadavg()[0]
    write_result(
        "bench_knee",
        {
            "runs": RUNS,
            "load_average": round(load, 1),
            "fitted": {
                "knees_kib": [round(size / 1024) for size in fitted],
                "largest_over_smallest": round(max(fitted) / min(fitted), 2),
                "median_misfit": [round(knee.error, 3) for knee in knees],
            },
            "read_off": {
                "knees_kib": [round(size / 1024) for size in read_off],
                "largest_over_smallest": round(max(read_off) / min(read_off), 2),
            },
        },
    )
