"""A function through submitit on the cluster `zslurm`, against submitit's own Slurm executor, on the same cluster.

On the real Slurm of the tests (needs root), as its ordinary user. Jobs are held, so none of them starts. There are
two figures: a program that submits one function, from the start of Python to its end; and each further submission
of a program that is running, without submitit's pause of 0.2 s between two, which both have.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict

from benchmarks.common import alternate, ratio, write_result
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster

_MORE = 10
_PROGRAM = f"""
import json, os, sys, time
import submitit

executor = submitit.AutoExecutor("logs", cluster=sys.argv[1])
executor.update_parameters(timeout_min=5, slurm_partition="batch", slurm_additional_parameters={{"hold": True}})
executor.submit(pow, 2, 3)
executor._executor._throttling = 0.0
seconds = []
for number in range({_MORE} if sys.argv[2] == "more" else 0):
    started = time.perf_counter()
    executor.submit(pow, 2, number)
    seconds.append(time.perf_counter() - started)
used = os.times()
print(json.dumps([seconds, used.user + used.system + used.children_user + used.children_system]))
"""


def run(runs: int = 11) -> None:
    """Measure and write results/submitit_overhead.json."""
    further: dict[str, list[float]] = defaultdict(list)
    processor: dict[str, list[float]] = defaultdict(list)
    with SlurmCluster() as cluster:
        directory = cluster.user_dir("benchmark")
        cluster.zslurm("init", "--yes")
        python = str(cluster.installation().python)

        def submit(name: str, what: str = "one") -> None:
            done = cluster.run([python, "-c", _PROGRAM, name, what], cwd=directory)
            seconds, used = json.loads(done.stdout.splitlines()[-1])
            further[name] += seconds
            if what == "one":
                processor[name].append(used)

        timings = alternate(
            {
                "cluster='slurm'": lambda: submit("slurm"),
                "cluster='zslurm'": lambda: submit("zslurm"),
            },
            runs=runs,
        )
        for _ in range(3):
            submit("slurm", "more")
            submit("zslurm", "more")
        cluster.run(["scancel", "--user", cluster.user.pw_name])
    slurm, ours = (statistics.median(further[name]) for name in ("slurm", "zslurm"))
    write_result(
        "submitit_overhead",
        {
            "timings": [timing.row() for timing in timings.values()],
            "ratio_of_a_program_to_submitit": ratio(timings["cluster='zslurm'"], timings["cluster='slurm'"]),
            "processor_time_of_a_program": {
                "submitit_median_s": round(statistics.median(processor["slurm"]), 3),
                "zslurm_median_s": round(statistics.median(processor["zslurm"]), 3),
            },
            "ratio_of_processor_time_of_a_program_to_submitit": round(
                statistics.median(processor["zslurm"]) / statistics.median(processor["slurm"]), 2
            ),
            "further_submissions": {
                "submitit_median_s": round(slurm, 4),
                "zslurm_median_s": round(ours, 4),
                "submissions_each": len(further["slurm"]),
            },
            "ratio_of_a_further_submission_to_submitit": round(ours / slurm, 2),
        },
    )
