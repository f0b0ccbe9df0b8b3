"""Random schedules on 4 to 64 nodes in the simulated world of Aegis: how many were played, and what they violated.

Each call plays on from the result, in as many processes as there are cores, for `SOAK_S` seconds (600 by default).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, ROOT, write_result

SEEDS, EACH = 1_000_000, 250_000
"""Schedules that `make soak` plays, and how many of them a process plays."""
FEWEST_NODES, MOST_NODES = 4, 64


def run() -> None:
    """Play on in as many processes as there are cores, and write the result."""
    seconds = float(os.environ.get("SOAK_S", "600"))
    with tempfile.TemporaryDirectory() as folder:
        tallies = [Path(folder) / f"{first}.json" for first in range(0, SEEDS, EACH)]
        for row in _rows():
            (Path(folder) / f"{row['first']}.json").write_text(json.dumps(row))
        open_tallies = [tally for tally in tallies if _played(tally) < EACH][: os.cpu_count()]
        played_on = [subprocess.Popen(_command(tally), cwd=ROOT) for tally in open_tallies]
        for process in played_on:
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.terminate()  # the tally has all but the last schedules
                process.wait()
        record([tally for tally in tallies if tally.exists()])


def record(tallies: Sequence[Path]) -> None:
    """Write the result from tallies, as `python -m tests.aegis.simulation --tally` keeps them."""
    rows = [json.loads(tally.read_text()) for tally in tallies]
    played, processor_s = sum(row["played"] for row in rows), sum(row["processor_s"] for row in rows)
    total = {
        "played": played,
        "processor_s": round(processor_s),
        "a_processor_second": round(played / processor_s, 1),
        "violations": sum(len(row["violations"]) for row in rows),
    }
    print(total)
    write_result("simulated_soak", {**total, "rows": rows})


def _rows() -> list[dict[str, Any]]:
    result = RESULTS / "simulated_soak.json"
    return list(json.loads(result.read_text())["rows"]) if result.exists() else []


def _played(tally: Path) -> int:
    return int(json.loads(tally.read_text())["played"]) if tally.exists() else 0


def _command(tally: Path) -> list[str]:
    sizes = ["--fewest-nodes", str(FEWEST_NODES), "--nodes", str(MOST_NODES)]
    seeds = ["--first", tally.stem, "--runs", str(EACH)]
    return [sys.executable, "-m", "tests.aegis.simulation", *seeds, *sizes, "--tally", str(tally)]
