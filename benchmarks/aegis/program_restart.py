"""A DDP script that knows nothing of zslurm, after a killed rank: zslurm, torchrun elastic and `sbatch --requeue`.

On the real Slurm of the tests (needs root), two nodes of one rank. The same script (tests/foreign/programs), with
its own checkpoints every ten steps, is started in three ways, and its rank 1 kills itself after step 25:

    zslurm            `zslurm submit -- python plain_ddp.py`; Aegis starts all ranks again in the job
    torchrun          `srun torchrun --max-restarts=3 --rdzv-backend=c10d`; its agents start all workers again
    sbatch --requeue  `srun --kill-on-bad-exit`, and `scontrol requeue` if that fails; Slurm holds a requeued
                      job back before it may start again

The time is that from the kill to the end of the first step of the new processes. Also counted are the lines that a
user adds to the script for zslurm.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, write_result
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.waiting import wait_for

PROGRAM = ROOT / "tests" / "foreign" / "programs" / "plain_ddp.py"
AT, STEPS = 25, 60
_DEADLINE_S = 600.0
_ELASTIC = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --time=20
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun {python} -m torch.distributed.run --nnodes=2 --nproc-per-node=1 --max-restarts=3 --rdzv-backend=c10d \\
  --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$head:{port}" {program}
"""
_REQUEUE = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --time=20 --requeue --open-mode=append
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT={port} WORLD_SIZE=2
srun --kill-on-bad-exit=1 bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=0 exec {python} {program}' \\
  || scontrol requeue "$SLURM_JOB_ID"
"""


class _Site:
    """The cluster, and a directory for each start."""

    def __init__(self, cluster: SlurmCluster) -> None:
        self.cluster, self.directory, self.count = cluster, cluster.user_dir("benchmark"), 0
        sources = cluster.installation().sources
        self.python = str(cluster.installation().python)
        self.program = str(sources / PROGRAM.relative_to(ROOT))

    def measure(self, start: Callable[[Path, dict[str, str]], None]) -> dict[str, Any]:
        """Start it once in a fresh directory; returns seconds and lost steps."""
        self.count += 1
        place = self.directory / str(self.count)
        self.cluster.run(["mkdir", place])
        times = place / "times"
        variables = {"TIMES": str(times), "FAULT": f"kill:{AT}:1", "PACE_S": "0.1", "OMP_NUM_THREADS": "1"}
        start(place, variables)

        def first_new_step() -> tuple[float, int] | None:
            rows = [line.split() for line in times.read_text().splitlines()] if times.exists() else []
            fault = next((float(row[4]) for row in rows if row[0] == "fault"), None)
            old = {row[3] for row in rows if fault is not None and float(row[4]) <= fault}
            new = [(float(row[4]), int(row[1])) for row in rows if row[0] == "step" and row[3] not in old]
            return (new[0][0] - fault, new[0][1]) if fault is not None and new else None

        seconds, step = wait_for(first_new_step, "the first new step", deadline_s=_DEADLINE_S, every_s=0.1)
        self.cluster.run(["scancel", "--user", self.cluster.user.pw_name])
        wait_for(
            lambda: not self.cluster.run(["squeue", "--noheader"]).stdout.strip(), "the jobs to end", every_s=0.3
        )
        return {"seconds": round(seconds, 2), "lost_steps": AT - step + 1}

    def words(self, place: Path) -> str:
        return f"{self.program} --steps {STEPS} --out {place}/out"

    def by_script(self, template: str, place: Path, variables: dict[str, str]) -> None:
        script = place / "job.sh"
        port = 20_000 + self.count
        script.write_text(template.format(python=self.python, program=self.words(place), port=port))
        self.cluster.run(["sbatch", f"--chdir={place}", str(script)], env=variables)

    def by_zslurm(self, place: Path, variables: dict[str, str]) -> None:
        run = {
            "run": {"name": "restart"},
            "trainer": {
                "command": [self.python, *self.words(place).split()],
                "env": variables,
                "checkpoints": f"{place}/out/step-*.pt",
            },
            "slurm": {"nodes": 2, "ranks_per_node": 1, "time": "20"},
            "cluster": {"gpus_per_node": 0},
        }
        (place / "run.yaml").write_text(json.dumps(run))
        self.cluster.zslurm("submit", "run.yaml", cwd=place)


def lines_added() -> int:
    """Return how many lines of the script are zslurm's: those that name `progress`."""
    text = PROGRAM.read_text().partition('"""\n\nimport')[2]
    return sum("progress" in line for line in text.splitlines())


def run(turns: int = 2) -> None:
    """Measure and write results/program_restart.json."""
    rows: dict[str, list[dict[str, Any]]] = {"zslurm": [], "torchrun": [], "sbatch --requeue": []}
    with SlurmCluster() as cluster:
        site = _Site(cluster)
        cluster.zslurm("init", "--yes")
        starts: dict[str, Callable[[Path, dict[str, str]], None]] = {
            "zslurm": site.by_zslurm,
            "torchrun": lambda place, variables: site.by_script(_ELASTIC, place, variables),
            "sbatch --requeue": lambda place, variables: site.by_script(_REQUEUE, place, variables),
        }
        began = time.time()
        for turn in range(turns):
            for name, start in starts.items():
                if turn == 0 or name != "sbatch --requeue":  # Slurm's own wait does not differ from turn to turn
                    rows[name].append(site.measure(start))
    medians = {name: round(statistics.median(row["seconds"] for row in found), 2) for name, found in rows.items()}
    write_result(
        "program_restart",
        {
            "rows": [{"name": name, "median_s": medians[name], "turns": found} for name, found in rows.items()],
            "torchrun_over_zslurm": round(medians["torchrun"] / medians["zslurm"], 2),
            "requeue_over_zslurm": round(medians["sbatch --requeue"] / medians["zslurm"], 2),
            "lines_added": {"launching": 0, "hang_detection": lines_added()},
            "took_s": round(time.time() - began),
        },
    )
