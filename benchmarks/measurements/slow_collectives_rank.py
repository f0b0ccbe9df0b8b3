"""Does `zslurm bench collectives` name a rank that is slowed by a fifth, and no rank if none is?

Whole runs of the command's sweep of pairs with four ranks of this machine, one of which has 0.8 of the others'
rate: its link, or all that it does for an exchange (slowed_python.py states both); which rank it is changes from
run to run. They take turns with runs in which none is slow. Peer: the truth, which is known. The two cores are
shared by four ranks and by whatever else runs here; the load at each run's end is recorded. What the comparison
can see for which noise, and how often it names an equal peer, is drawn in slow_peers.py. The result is written
after each round.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, write_result
from benchmarks.measurements import slowed_python

RUNS, RANKS = 10, 4
_RUN_LIMIT_S = 900


def run(runs: int = RUNS) -> None:
    """Measure and write results/slow_collectives_rank.json."""
    slow: dict[str, list[dict[str, Any]]] = {way: [] for way in slowed_python.WAYS}
    undisturbed: list[dict[str, Any]] = []
    for number in range(runs):
        for way in slowed_python.WAYS:
            slow[way].append(_run(way, number % RANKS))
        undisturbed.append(_run("host", None))
        write_result(
            "slow_collectives_rank",
            {
                "ranks": RANKS,
                "rate_of_the_slow_rank": slowed_python.RATE,
                "slow": {way: _summary(found) for way, found in slow.items()},
                "undisturbed": {
                    "runs": len(undisturbed),
                    "false_names": sum(bool(each["named"]) for each in undisturbed),
                    "false_pairs": sum(each["slow_pairs"] for each in undisturbed),
                    "runs_found": undisturbed,
                },
            },
        )


def _summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    rightly = sum(each["named"] == [each["slow"]] for each in found)
    false = sum(bool(set(each["named"]) - {each["slow"]}) for each in found)
    return {"runs": len(found), "named_rightly": rightly, "false_names": false, "runs_found": found}


def _run(way: str, slow: int | None) -> dict[str, Any]:
    """Run the command with one rank slow in this way, or none; return whom it named."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out, program = Path(folder, "result.json"), Path(folder, "python")
        python = shlex.join([sys.executable, str(Path(slowed_python.__file__))])
        program.write_text(f"#!/bin/sh\nexec {python}\n")
        program.chmod(0o755)
        environ = {
            **os.environ,
            "ZSLURM_BENCH_PYTHON": str(program),
            slowed_python.RANK: "none" if slow is None else str(slow),
            slowed_python.WAY: way,
            "PYTHONPATH": str(ROOT),
        }
        command = ["bench", "collectives", "--ranks", str(RANKS), "--scope", "gpu_pair", "--out", str(out)]
        subprocess.run(
            [sys.executable, "-m", "zslurm", *command], cwd=ROOT, env=environ, check=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=_RUN_LIMIT_S,
        )  # fmt: skip
        result = json.loads(out.read_text())
    found = {
        "slow": slow,
        "named": [int(name.rpartition(" ")[2]) for name in result["slow"]],
        "findings": [line for line in result["findings"] if not line.startswith("slow pair")],
        "slow_pairs": sum(line.startswith("slow pair") for line in result["findings"]),
        "moments": len(result["rows"][0]["figures"]),
        "seconds": round(time.monotonic() - began),
        "load": round(os.getloadavg()[0], 1),
        "niceness": os.nice(0),
    }
    about = f"{way}: slow {slow}, named {found['named']}, {found['findings']}"
    print(f"slow_collectives_rank: {about}", file=sys.stderr, flush=True)
    return found
