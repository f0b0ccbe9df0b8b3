"""A node dies without a spare, again and again: when the others train on, and when a helper job has replaced it.

One run with `aegis.heal: helper` trains on eight nodes of a real Slurm (the tests' one, on this machine; needs
root; tests/on_slurm/versions.py has other versions). The node that the last helper job has brought, or at first a
node of the run, loses its power, `DEATHS` times in a row. Each time are measured, by the events of the run:

    noticed      from the death until the supervisor knows it
    train on     from the death until the other ranks have finished a step on fewer nodes
    queued       from the death until the helper job is in the queue
    joined       from the start of the helper job until its ranks have joined, so that all nodes train again
    held         how long all ranks waited for each other at the boundary at which they joined
    lost steps   that had been finished, and were taken again

Ranks use the real trainer, one a node, and wait `PACE_S` in each step, so that the cores of this machine do not
run short.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from typing import Any

from benchmarks.common import write_result
from tests.faults.harness import FaultRun
from tests.faults.nodes import FaultNodes
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.on_slurm.cluster.user import User
from tests.waiting import wait_for
from zslurm.run.run_dir import RunDir
from zslurm.slurm.hostlist import expand

NODES = int(os.environ.get("HELPER_NODES", "8"))
DEATHS = int(os.environ.get("HELPER_DEATHS", "20"))
PACE_S = 0.5
STEPS = 100_000
LIMIT_S = 300.0
"""Seconds after which a step of the measurement is given up; what was measured so far is written."""
MEASURED = ("noticed_s", "train_on_s", "queued_s", "joined_s", "held_s", "lost_steps")


def run() -> None:
    """Measure and write results/helper_jobs.json."""
    rows: list[dict[str, Any]] = []
    failed = ""
    with SlurmCluster(nodes=NODES + DEATHS) as cluster:
        user = User(cluster, cluster.user_dir("helper-jobs"), forks=False)
        user.zslurm("init", "--yes")
        nodes = FaultNodes(cluster, cluster.user_dir("helper-jobs-trees"))
        trained = FaultRun(user, nodes, "helped", steps=STEPS, in_memory=True)
        aegis = {"heal": "helper", "max_excluded": 2 * DEATHS, "hang": {"setup_s": 300, "step_s": 60}}
        phase = {"tokens": STEPS * NODES * 16, "context": 16, "global_batch": NODES, "micro_batch": 1, "lr": 3e-3}
        trained.submit(
            nodes=NODES,
            slurm={"time": "2:00:00"},
            aegis=aegis,
            pace_s=PACE_S,
            phases=[phase | {"warmup_steps": 2}],
        )
        version = cluster.run(["sinfo", "--version"]).stdout.split()[-1]
        try:
            trained.let_go()
            victim = trained.node_of(1)
            for number in range(DEATHS):
                rows.append(_kill(trained, victim, number))
                print(rows[-1], file=sys.stderr, flush=True)
                victim = rows[-1].pop("node")
        except (AssertionError, TimeoutError) as error:
            failed = str(error).splitlines()[0]
            print(trained.story(), file=sys.stderr)
            for log in sorted(RunDir(trained.path).attempt(1).logs.glob("rank-*.log")):
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-6000:]}", file=sys.stderr)
        finally:
            restarts = trained.attempt() - 1
            cluster.run(["scancel", "--user", cluster.user.pw_name])
    medians = {name: round(statistics.median([row[name] for row in rows]), 3) for name in MEASURED} if rows else {}
    write_result(
        "helper_jobs",
        {
            "slurm": version,
            "nodes": NODES,
            "deaths": len(rows),
            "ended_by": failed or "all deaths were survived",
            "restarts": restarts,
            "medians": medians,
            "most": {name: max(row[name] for row in rows) for name in medians},
            "rows": rows,
            "load_average": round(os.getloadavg()[0], 1),
        },
    )


def _kill(trained: FaultRun, victim: str, number: int) -> dict[str, Any]:
    """Kill a node once the run has all of its nodes and trains; return what was measured, and the next node."""
    step = max((row["step"] for row in trained.metrics("step")), default=0)
    trained.wait_for_step(step + 5)
    killed = time.time()
    trained.cluster.kill_node(victim)
    joined = _next(trained, "ranks_joined", killed)
    started = _next(trained, "recovery_started", killed)
    recovered = _next(trained, "recovered_in_memory", killed)
    steps = [row for row in trained.metrics("step") if row["time"] > recovered["time"]]
    helper = _next(trained, "helper_joined", killed)
    queued = _next(trained, "helper_queued", killed)
    return {
        "number": number + 1,
        "noticed_s": round(started["time"] - killed, 3),
        "train_on_s": round(steps[0]["time"] - killed, 3),
        "regrouped_s": recovered["seconds"],
        "queued_s": round(queued["time"] - killed, 3),
        "waited_s": helper["waited_s"],
        "joined_s": round(joined["time"] - helper["time"], 3),
        "all_nodes_s": round(joined["time"] - killed, 3),
        "held_s": joined["seconds"],
        "lost_steps": recovered["rolled_back"] + joined["rolled_back"],
        "load_average": round(os.getloadavg()[0], 1),
        "node": expand(str(helper["nodes"]))[0],
    }


def _next(trained: FaultRun, kind: str, since: float) -> dict[str, Any]:
    """Wait for an event of a kind since a time."""

    def found() -> dict[str, Any] | None:
        assert trained.ended() is None, "the run ended"
        assert trained.attempt() == 1, "the ranks were restarted"
        return next((event for event in trained.events(kind) if event["time"] >= since), None)

    return wait_for(found, kind, deadline_s=LIMIT_S, every_s=0.1)
