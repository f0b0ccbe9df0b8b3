"""Random schedules of faults in the simulated world of Aegis: how many of them one process plays in a second."""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import Any

from benchmarks.common import write_result
from tests.aegis.simulation.simulation import play_all

PLAYED = ((1, 8, 5000), (4, 64, 1000))
"""Fewest nodes of the ranks, most nodes of a job, and schedules."""


def run() -> None:
    """Play both sizes, one after the other, and write the result."""
    rows = [play(*sizes) for sizes in PLAYED]
    write_result("simulated_schedules", {"rows": rows, "load_average": round(os.getloadavg()[0], 1)})


def play(fewest_nodes: int, most_nodes: int, count: int) -> dict[str, Any]:
    """Play the first schedules; return how fast that was, and how the runs ended."""
    began, processor = time.perf_counter(), time.process_time()
    played = list(play_all(range(count), 1, fewest_nodes=fewest_nodes, most_nodes=most_nodes))
    wall_s, processor_s = time.perf_counter() - began, time.process_time() - processor
    row = {
        "fewest_nodes": fewest_nodes,
        "most_nodes": most_nodes,
        "schedules": count,
        "a_second": round(count / wall_s, 1),
        "a_processor_second": round(count / processor_s, 1),
        "ends": dict(Counter(end for _, end, _ in played)),
        "violations": sum(violation is not None for _, _, violation in played),
    }
    print(row)
    return row
