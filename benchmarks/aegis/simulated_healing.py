"""1,024 nodes for 30 days in the simulated world of Aegis: goodput with spares, helper jobs and requeues.

Each way meets the same faults at published rates, with recovery in memory. Only what replaces a node that dies
differs: one of ten spares that the job has besides, a helper job while the others train on, or a requeue for all
nodes. Helper jobs and requeues wait as long as each other in the queue, half an hour. A started helper job takes
`HELPER_STARTS_S` until its ranks have joined, a requeued job `START_S` until it trains. Lost nodes do not come
back within the time; a run whose spares are used up is requeued for ten others.

Goodput is the work that is kept, as a share of what all nodes would do without a fault: a step on 1,023 nodes
takes 1,024 / 1,023 times as long. It is given for the nodes that train, and for all that the job holds.
"""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from multiprocessing import get_context
from typing import Any

from benchmarks.aegis.simulated_cluster import SETTINGS, drawn
from benchmarks.common import write_result
from zslurm.aegis.core.policy.shrinking import HELPER_STARTS_S
from zslurm.aegis.simulation.quiet import pass_quietly
from zslurm.aegis.simulation.run import Run
from zslurm.aegis.simulation.world import STEP_S, World
from zslurm.plan.failures import PRESETS

NODES, DAYS, SPARES = 1024, 30, 10
WAIT_S = 1800
START_S = 300
"""Seconds from the start of a requeued job until it trains: prolog, imports, checkpoint, graphs of collectives."""
WAYS = ("spare", "requeue", "helper")


def run() -> None:
    """Play each way in a separate process, one after the other, and write the result."""
    rows = []
    for way in WAYS:
        with get_context("spawn").Pool(1) as pool:
            rows.append(pool.apply(play, (way,)))
        print(rows[-1], flush=True)
    write_result(
        "simulated_healing",
        {
            "rates": PRESETS["llama3"].source,
            "nodes": NODES,
            "days": DAYS,
            "wait_s": WAIT_S,
            "helper_starts_s": HELPER_STARTS_S,
            "start_s": START_S,
            "rows": rows,
            "load_average": round(os.getloadavg()[0], 1),
        },
    )


def play(heal: str, nodes: int = NODES, days: float = DAYS) -> dict[str, Any]:
    """Play one way; return its goodput, and what was done."""
    faults = drawn(nodes, days)
    lost, spares = sum(each.what == "node_dies" for each in faults), SPARES if heal == "spare" else 0
    world = World(faults, nodes=nodes + lost + SPARES, ranks_per_node=2, total=10**9, in_memory=True)
    changed = {"recovery": "memory", "heal": "requeue" if heal == "spare" else heal}
    simulated = Run(world, SETTINGS.model_copy(update=changed), nodes, spares)
    simulated.requeue_s, simulated.helper_s = WAIT_S + START_S, WAIT_S + int(HELPER_STARTS_S)
    began, end = time.process_time(), int(days * 86400)
    work, step, fewest = 0.0, 0, nodes
    gc.disable()  # nothing here has cycles, and each second makes an object for each rank
    while simulated.phase != "over" and world.now < end:
        pass_quietly(world, simulated, end)
        world.second()
        simulated.second()
        attempt = world.attempt
        if attempt is not None and simulated.phase == "watching" and attempt.step != step:
            in_use = len({rank.node.name for rank in attempt.ranks})
            work += (attempt.step - step) * in_use / nodes  # steps that are lost are taken again
            step, fewest = attempt.step, min(fewest, in_use)
    kinds = Counter(str(row["event"]) for row in simulated.rows)
    goodput = work * STEP_S / world.now
    return {
        "heal": heal,
        "ended": simulated.outcome or "at the end of the time",
        "days": round(world.now / 86400, 2),
        "goodput": round(goodput, 5),
        "goodput_of_all_nodes_held": round(goodput * nodes / (nodes + spares), 5),
        "nodes_lost": lost,
        "starts_of_the_job": simulated.starts,
        "helper_jobs": kinds["ranks_joined"],
        "recovered_in_memory": kinds["recovered_in_memory"],
        "attempts": kinds["attempt_started"],
        "fewest_nodes": fewest,
        "processor_s": round(time.process_time() - began, 1),
    }
