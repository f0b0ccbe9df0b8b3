"""Checkpoints offline: reshaping 4 GB against `cp` and fsync, and its memory; verifying them against `cat`.

Contenders in turn, medians. Reads from disk begin with the files out of the page cache.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.checkpoints.checkpoint import forget, save, timed
from benchmarks.checkpoints.checkpoint_ranks import STATES
from benchmarks.common import alternate, write_result
from zslurm.checkpoint_tools import Tensor, verify

BYTES = 4 * 10**9


def run() -> None:
    """Measure and write results/checkpoint_offline.json."""
    with tempfile.TemporaryDirectory() as folder:
        figures = _measure(Path(folder))
    write_result("checkpoint_offline", figures)


def _measure(root: Path) -> dict[str, Any]:
    elements = BYTES // 4 // len(STATES)
    rows = elements // 64 // 1024
    table = [Tensor(f"layers.{i}", (rows, 1024), dict.fromkeys(STATES, "F32")) for i in range(64)]
    source = save(root / "large", table, 8)
    size = sum(file.stat().st_size for file in source.iterdir())
    copies, reshapes, peaks = [], [], []
    for _ in range(5):
        copies.append(timed(lambda: _copy(source, root / "copy")))
        shutil.rmtree(root / "copy")
        program = (
            "import sys; from pathlib import Path; from zslurm.checkpoint_tools import reshape; "
            "reshape(Path(sys.argv[1]), Path(sys.argv[2]), 6); "
            # Not getrusage: after a fork, that begins with the memory of the parent.
            "print(Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0])"
        )
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", program, str(source), str(root / "reshaped")],
            check=True,
            capture_output=True,
            text=True,
        )
        reshapes.append(time.perf_counter() - started)
        peaks.append(int(done.stdout) / 1024)
        shutil.rmtree(root / "reshaped")
    cached = alternate(
        {
            "cat": lambda: _cat(source),
            "verify": lambda: _verified(source, 1),
            "verify_2": lambda: _verified(source, 2),
        },
        runs=3,
    )
    cold: dict[str, list[float]] = {"cat": [], "verify_2": []}
    for _ in range(5):
        for name, action in (("cat", lambda: _cat(source)), ("verify_2", lambda: _verified(source, 2))):
            forget(source)
            cold[name].append(timed(action))
    return {
        "bytes": size,
        "cp_and_fsync_s": round(statistics.median(copies), 2),
        "reshape_s": round(statistics.median(reshapes), 2),
        "reshape_rate_of_cp": round(statistics.median(copies) / statistics.median(reshapes), 2),
        "reshape_peak_rss_mib": round(max(peaks)),
        "verify_rate_of_cat": {
            "in the page cache, 1 thread": round(cached["cat"].median / cached["verify"].median, 2),
            "in the page cache, 2 threads": round(cached["cat"].median / cached["verify_2"].median, 2),
            "from disk, 2 threads": round(statistics.median(cold["cat"]) / statistics.median(cold["verify_2"]), 2),
        },
        "verify_gb_per_s": round(size / cached["verify_2"].median / 1e9, 2),
    }


def _copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    for file in target.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())


def _cat(path: Path) -> None:
    subprocess.run(["cat", *map(str, sorted(path.glob("shard-*")))], check=True, stdout=subprocess.DEVNULL)


def _verified(path: Path, threads: int) -> None:
    assert verify(path, threads=threads).sound
