"""Clusters in the simulated world of Aegis, with faults at published rates: how long it takes, how much memory.

The core sees each report of each agent, second by second, while anything is wrong; quiet seconds pass at once. A
node has two ranks, every lost one is replaced by a spare, and lost nodes do not come back within the time.
"""

from __future__ import annotations

import gc
import os
import random
import resource
import time
from collections import Counter
from multiprocessing import get_context
from typing import Any

from benchmarks.common import write_result
from zslurm.aegis.simulation.quiet import pass_quietly
from zslurm.aegis.simulation.run import Run
from zslurm.aegis.simulation.world import STEP_S, Happening, What, World
from zslurm.config.aegis import AegisSection
from zslurm.plan.failures import KINDS, PRESETS, Kind

GPUS_PER_NODE = 8
CLUSTERS = ((1024, 30), (16384, 7))
"""Nodes, and days."""
LONGEST_S = 3600
"""Processor seconds after which a cluster is left, with the days that it came to."""
SETTINGS = AegisSection.model_validate(
    {"max_excluded": 10_000, "restarts_per_hour": 60, "heartbeat_timeout_s": 8, "grace_s": 20, "tolerate_s": 12}
)
"""As by default, but for limits that would stop a run of this size."""
HAPPENS: dict[Kind, What] = {
    "node": "node_dies",
    "process": "rank_killed",
    "restart": "nic_down",
    "hang": "rank_hangs",
}


def run() -> None:
    """Play both clusters, each in a separate process, and write the result."""
    rows = []
    for nodes, days in CLUSTERS:
        with get_context("spawn").Pool(1) as pool:
            rows.append(pool.apply(play, (nodes, days)))
        print(rows[-1])
    rates = PRESETS["llama3"].source
    write_result(
        "simulated_cluster",
        {"rates": rates, "ranks_per_node": 2, "rows": rows, "load_average": round(os.getloadavg()[0], 1)},
    )


def play(nodes: int, days: float) -> dict[str, Any]:
    """Play one cluster; return its processor time and memory, and how the run ended."""
    faults = drawn(nodes, days)
    lost = sum(each.what == "node_dies" for each in faults)
    spares = max(1, nodes // 100)
    world = World(faults, nodes=nodes + spares + lost, ranks_per_node=2, total=10**9)
    simulated = Run(world, SETTINGS, nodes, spares)
    began, processor, seconds = time.perf_counter(), time.process_time(), 0
    end = int(days * 86400)
    gc.disable()  # nothing here has cycles, and each second makes an object for each rank
    while simulated.phase != "over" and world.now < end and time.process_time() - processor < LONGEST_S:
        pass_quietly(world, simulated, end)
        world.second()
        simulated.second()
        seconds += 1
        if seconds % 1000 == 0:
            print(
                f"{nodes} nodes: {world.now / 86400:.2f} days after {time.process_time() - processor:.0f} s",
                flush=True,
            )
    decisions = Counter(str(row["action"]) for row in simulated.rows if row["event"] == "decision")
    return {
        "nodes": nodes,
        "days": round(world.now / 86400, 2),
        "faults": len(faults) - len(world.happenings),
        "ended": simulated.outcome or ("at the end of the time" if world.now >= end else "not yet"),
        "decisions": dict(decisions),
        "wrongly_excluded": len(simulated.excluded_nodes - world.guilty.keys()),
        "share_of_time_in_kept_steps": round(world.committed * STEP_S / world.now, 4),
        "seconds_played": seconds,
        "wall_s": round(time.perf_counter() - began, 1),
        "processor_s": round(time.process_time() - processor, 1),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def drawn(nodes: int, days: float, seed: int = 1) -> tuple[Happening, ...]:
    """Draw faults at the published rates; a network that fails is one link that is down for five seconds."""
    rates, dice = PRESETS["llama3"], random.Random(seed)
    a_day = rates.total * GPUS_PER_NODE * nodes * 24
    at, faults = 0.0, []
    while (at := at + dice.expovariate(a_day) * 86400) < days * 86400:
        (kind,) = dice.choices(KINDS, rates.per_gpu_hour)
        ranks = kind in ("process", "hang")
        where = dice.randrange(2 * nodes if ranks else nodes)
        faults.append(Happening(int(at) + 1, HAPPENS[kind], where, 5))
    return tuple(faults)
