"""`zslurm doctor` on eight nodes, against a plain `srun -N8 hostname`: what an examination adds to a job's start.

On the real Slurm of the tests: eight nodes, each with its own tree of files and a stand-in for amd-smi, all
on this machine, so that Python starts eight times on its few cores. Needs root; runs as an ordinary user.
"""

from __future__ import annotations

from benchmarks.common import alternate, write_result
from tests.on_slurm.cluster.doctor_site import Site
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster

GOAL_S = 10


def run(runs: int = 7) -> None:
    """Measure and write results/doctor.json."""
    with SlurmCluster() as cluster:
        site = Site(cluster, cluster.user_dir("benchmark"))
        report = site.json()
        if report["status"] != "pass" or len(report["asked"]) != len(cluster.node_names):
            raise RuntimeError(f"the nodes are not healthy: {report['results']}")
        timings = alternate(
            {
                "srun -N8 hostname": lambda: cluster.run(["srun", "-N8", "--exclusive", "hostname"]),
                "zslurm doctor": lambda: site.doctor("-q"),
                "zslurm doctor --only memlock": lambda: site.doctor("-q", "--only", "memlock"),
            },
            runs=runs,
        )
    srun, doctor = timings["srun -N8 hostname"].median, timings["zslurm doctor"].median
    write_result(
        "doctor",
        {
            "nodes": len(report["asked"]),
            "checks": len(report["checks"]),
            "timings": [timing.row() for timing in timings.values()],
            "more_than_srun_s": round(doctor - srun, 2),
            "goal_s": GOAL_S,
            "goal_met": doctor < GOAL_S,
        },
    )
