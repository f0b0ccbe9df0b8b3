"""Does `zslurm bench mlp` name a rank that is slowed by a fifth, and no rank if none is?

Three ranks on this machine. The slowed rank spends a quarter of each call's processor time again
(tests/bench/slow_rank.py), so it has 80 % of the speed; which rank it is changes from run to run. Runs with and
without take turns. Peer: the truth, which is known. The two cores are shared by three ranks and by whatever else
runs here, which is why ranks on CPUs are compared by their processor time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import write_result
from tests.bench.slow_rank import slowed

RUNS, RANKS, EXTRA = 10, 3, 0.25


def run() -> None:
    """Measure and write results/slow_mlp_rank.json."""
    with tempfile.TemporaryDirectory() as folder:
        found = [
            {"slowed": _named(Path(folder), number % RANKS), "undisturbed": _named(Path(folder), None)}
            for number in range(RUNS)
        ]
    write_result(
        "slow_mlp_rank",
        {
            "runs": RUNS,
            "ranks": RANKS,
            "slowed_by": round(1 - 1 / (1 + EXTRA), 3),
            "named_rightly": sum(each["slowed"]["named"] == [each["slowed"]["slow"]] for each in found),
            "false_names": sum(bool(each["undisturbed"]["named"]) for each in found),
            "runs_found": found,
        },
    )


def _named(folder: Path, slow: int | None) -> dict[str, Any]:
    out = folder / "mlp.json"
    arguments = ["bench", "mlp", "--ranks", str(RANKS), "--tokens", "128", "--out", str(out)]
    environ = {**os.environ, **slowed("zslurm.bench.mlp", "Stack.step", slow, folder, EXTRA)}
    subprocess.run([sys.executable, "-m", "zslurm", *arguments], env=environ, check=True, capture_output=True)
    rows = json.loads(out.read_text())["rows"]
    return {
        "slow": slow,
        "named": [row["rank"] for row in rows if row["slower"]],
        "slower": [round(row["slower"], 3) for row in rows],
        "visible": round(rows[0]["visible"], 3),
        "spread_of_wall_time": [round(row["spread"], 3) for row in rows],
    }
