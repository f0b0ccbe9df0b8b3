"""A DDP script after a killed rank: zslurm in three ways, torchrun elastic, `sbatch --requeue`, and two peers.

On the real Slurm of the tests (needs root), two nodes of one rank. The same script (tests/foreign/programs), with
its own checkpoints every ten steps, is started in several ways, and its rank 1 kills itself after step 25:

    zslurm            `zslurm submit -- python plain_ddp.py`; Aegis starts all ranks again in the job
    zslurm, warm      the same with `trainer.warm`
    zslurm, recover   recovering_ddp.py, which calls `zslurm.recover` and `zslurm.keep`, with `trainer.warm`
    torchrun          `srun torchrun --max-restarts=3 --rdzv-backend=c10d`; its agents start all workers again
    torchft           torchft_ddp.py; a lighthouse with heartbeats of 1 s, torchrun for each replica
    nvrx              nvrx_ddp.py; nvidia-resiliency-ext, in-process restart without the lost rank
    sbatch --requeue  `srun --kill-on-bad-exit`, and `scontrol requeue` if that fails; Slurm holds a requeued
                      job back before it may start again

`seconds` is from the kill to the end of the next step of any rank, `full_s` to that of the process that replaces
the lost one. Both have one step of PACE_S in them. Peers are measured if PEERS names a directory with their
packages for the Python of the tests: `pip install --no-deps --target DIRECTORY torchft-nightly
nvidia-resiliency-ext`. Also counted are the lines that a user adds to the script for zslurm.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, write_result
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.waiting import wait_for

PROGRAMS = ROOT / "tests" / "foreign" / "programs"
PROGRAM = PROGRAMS / "plain_ddp.py"
AT, STEPS, PACE_S = 25, 60, 0.4
_DEADLINE_S = 600.0
_HEAD = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --time=20 --requeue --open-mode=append
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT={port} WORLD_SIZE=2
"""
_ELASTIC = (
    _HEAD
    + """srun {python} -m torch.distributed.run --nnodes=2 --nproc-per-node=1 --max-restarts=3 \\
  --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$MASTER_ADDR:{port}" {program}
"""
)
_REQUEUE = (
    _HEAD
    + """srun --kill-on-bad-exit=1 bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=0 exec {python} {program}' \\
  || scontrol requeue "$SLURM_JOB_ID"
"""
)
_TORCHFT = (
    _HEAD
    + """export TORCHFT_LIGHTHOUSE="http://$MASTER_ADDR:{port}"
{python} -c "
import time
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind='0.0.0.0:{port}', min_replicas=1, join_timeout_ms=1000, quorum_tick_ms=50,
                          heartbeat_timeout_ms=1000)
time.sleep(100_000)" &
srun --kill-on-bad-exit=0 --wait=0 bash -c 'unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT; \\
  REPLICA_GROUP_ID=$SLURM_PROCID exec {python} -m torch.distributed.run --nnodes=1 --nproc-per-node=1 \\
  --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint=localhost:0 {program}'
"""
)
_NVRX = (
    _HEAD
    + """srun --kill-on-bad-exit=0 --wait=0 bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=0 exec {python} {program}'
"""
)


class _Site:
    """The cluster, and a directory for each start."""

    def __init__(self, cluster: SlurmCluster) -> None:
        self.cluster, self.directory, self.count = cluster, cluster.user_dir("benchmark"), 0
        self.programs = cluster.installation().sources / PROGRAMS.relative_to(ROOT)
        self.python = str(cluster.installation().python)

    def measure(self, start: Callable[[Path, dict[str, str]], None]) -> dict[str, Any]:
        """Start it once in a fresh directory; return seconds, lost steps and the load of the machine."""
        self.count += 1
        place = self.directory / str(self.count)
        self.cluster.run(["mkdir", place])
        times = place / "times"
        variables = {
            "TIMES": str(times), "FAULT": f"kill:{AT}:1", "PACE_S": str(PACE_S), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        start(place, variables)

        def first_new_steps() -> dict[str, Any] | None:
            rows = [line.split() for line in times.read_text().splitlines()] if times.exists() else []
            fault = next((float(row[4]) for row in rows if row[0] == "fault"), None)
            if fault is None:
                return None
            old = {row[3] for row in rows if float(row[4]) <= fault}
            # The other rank notes the step of the fault as well, a moment later.
            after = [row for row in rows if row[0] == "step" and float(row[4]) > fault + PACE_S / 2]
            full = next((row for row in after if row[3] not in old), None)
            if not after or (full is None and time.time() < fault + 40.0):
                return None
            seconds = {"seconds": round(float(after[0][4]) - fault, 2), "lost_steps": AT - int(after[0][1]) + 1}
            return seconds | {"full_s": None if full is None else round(float(full[4]) - fault, 2)}

        load = os.getloadavg()[0]
        row = wait_for(first_new_steps, "the first new step", deadline_s=_DEADLINE_S, every_s=0.1)
        self.cluster.run(["scancel", "--user", self.cluster.user.pw_name])
        wait_for(
            lambda: not self.cluster.run(["squeue", "--noheader"]).stdout.strip(), "the jobs to end", every_s=0.3
        )
        return row | {"load": round(load, 1)}

    def words(self, place: Path, program: str) -> str:
        return f"{self.programs / program} --steps {STEPS} --out {place}/out"

    def by_script(self, template: str, program: str, place: Path, variables: dict[str, str]) -> None:
        script = place / "job.sh"
        port = 20_000 + 2 * self.count
        text = template.format(python=self.python, program=self.words(place, program), port=port)
        script.write_text(text)
        peers = os.environ.get("PEERS", "")
        self.cluster.run(["sbatch", f"--chdir={place}", str(script)], env=variables | {"PYTHONPATH": peers})

    def by_zslurm(self, program: str, warm: bool, place: Path, variables: dict[str, str]) -> None:
        run = {
            "run": {"name": "restart"},
            "trainer": {
                "command": [self.python, *self.words(place, program).split()],
                "env": variables,
                "checkpoints": f"{place}/out/step-*.pt",
                "warm": warm,
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
    rows: dict[str, list[dict[str, Any]]] = {}
    with SlurmCluster() as cluster:
        site = _Site(cluster)
        cluster.zslurm("init", "--yes")
        starts: dict[str, Callable[[Path, dict[str, str]], None]] = {
            "zslurm": partial(site.by_zslurm, "plain_ddp.py", False),
            "zslurm, warm": partial(site.by_zslurm, "plain_ddp.py", True),
            "zslurm, recover": partial(site.by_zslurm, "recovering_ddp.py", True),
            "torchrun": partial(site.by_script, _ELASTIC, "plain_ddp.py"),
        }
        if os.environ.get("PEERS"):
            starts["torchft"] = partial(site.by_script, _TORCHFT, "torchft_ddp.py")
            starts["nvrx"] = partial(site.by_script, _NVRX, "nvrx_ddp.py")
        starts["sbatch --requeue"] = partial(site.by_script, _REQUEUE, "plain_ddp.py")
        began = time.time()
        for turn in range(turns):
            for name, start in starts.items():
                if turn == 0 or name != "sbatch --requeue":  # Slurm's own wait does not differ from turn to turn
                    rows.setdefault(name, []).append(site.measure(start))
                    print(name, rows[name][-1], flush=True)
    medians = {name: round(statistics.median(row["seconds"] for row in found), 2) for name, found in rows.items()}
    write_result(
        "program_restart",
        {
            "rows": [{"name": name, "median_s": medians[name], "turns": found} for name, found in rows.items()],
            "pace_s": PACE_S,
            "peers": sorted(path.stem for path in Path(os.environ.get("PEERS") or "-").glob("*.dist-info")),
            "torchrun_over_zslurm": round(medians["torchrun"] / medians["zslurm"], 2),
            "requeue_over_zslurm": round(medians["sbatch --requeue"] / medians["zslurm"], 2),
            "lines_added": {"launching": 0, "hang_detection": lines_added()},
            "took_s": round(time.time() - began),
        },
    )
