"""From the death of a node to its confirmation: with its witnesses asked at once, and by missed heartbeats only.

Two runs train side by side on one real Slurm (the tests' one, on this machine; needs root), alike but for
`aegis.ask_after_s`: one asks a silent node's slurmd and neighbours, the other (0) waits for
`aegis.heartbeat_timeout_s`. Nodes of both die in turn, as in a power cut but for one thing: the machine itself
lives, so that the port of a dead slurmd refuses connections. From a lost machine nothing comes back, which takes
up to 1.25 s more (`zslurm.core.reach.CONNECT_S`).
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.common import Timing, ratio, write_result
from tests.faults.harness import FaultRun
from tests.faults.nodes import FaultNodes
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.on_slurm.cluster.user import User
from tests.waiting import wait_for

NODES, DEATHS = 2, 3
STEPS = 100_000
_CONTENDERS = {"witnesses": 1.5, "heartbeats": 0.0}


def run() -> None:
    """Measure and write results/node_death.json."""
    with SlurmCluster(nodes=len(_CONTENDERS) * (NODES + DEATHS)) as cluster:
        user = User(cluster, cluster.user_dir("node-death"))
        user.zslurm("init", "--yes")
        nodes = FaultNodes(cluster, cluster.user_dir("node-death-trees"))
        runs = {name: _submit(user, nodes, name, ask_after_s) for name, ask_after_s in _CONTENDERS.items()}
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
        for _ in range(DEATHS):
            for name, trained in runs.items():
                found[name].append(_kill_a_node(trained))
        cluster.run(["scancel", "--user", cluster.user.pw_name])
    times = {name: Timing(name, [death["seconds"] for death in deaths]) for name, deaths in found.items()}
    write_result(
        "node_death",
        {
            "peer": "heartbeats: the same run with aegis.ask_after_s 0 (heartbeat_timeout_s 8)",
            "deaths_of_each": DEATHS,
            "contenders": [timing.row() for timing in times.values()],
            "heartbeats_over_witnesses": ratio(times["heartbeats"], times["witnesses"]),
            "reasons": {name: [death["line"] for death in deaths] for name, deaths in found.items()},
        },
    )


def _submit(user: User, nodes: FaultNodes, name: str, ask_after_s: float) -> FaultRun:
    trained = FaultRun(user, nodes, name, steps=STEPS)
    # As in a run of a user: an agent reports once a second.
    aegis = {"ask_after_s": ask_after_s, "sensors": {"period_s": 5.0, "progress_s": 1.0}, "restarts_per_hour": 60}
    trained.submit(nodes=NODES, slurm={"spares": DEATHS}, aegis=aegis)
    return trained


def _kill_a_node(trained: FaultRun) -> dict[str, Any]:
    """Kill the node of rank 1 once the run trains; return the seconds until it is found dead, and the reason."""
    wait_for(lambda: trained.metrics("step"), f"{trained.name} to train")
    attempt, deaths = trained.attempt(), len(_dead(trained))
    step = max((row["step"] for row in trained.metrics("step")), default=0)
    trained.wait_for_step(step + 20, attempt=attempt)
    killed = time.time()
    trained.cluster.kill_node(trained.node_of(1))
    wait_for(lambda: len(_dead(trained)) > deaths, f"{trained.name} to find the dead node")
    wait_for(lambda: trained.attempt() > attempt, f"{trained.name} to start again")
    fault = _dead(trained)[deaths]
    return {"seconds": fault["time"] - killed, "line": fault["line"]}


def _dead(trained: FaultRun) -> list[dict[str, Any]]:
    return [event for event in trained.events("fault_detected") if event["kind"] == "node_dead"]
