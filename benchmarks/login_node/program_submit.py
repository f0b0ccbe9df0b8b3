"""`zslurm submit -- python train.py` until Slurm has accepted the job, against plain submitit and plain `sbatch`.

On the real Slurm of the tests (needs root), as its ordinary user, with a fresh Python for each submission, as a
person types it. Jobs are held, so none of them starts.
"""

from __future__ import annotations

from benchmarks.common import alternate, ratio, write_result
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster

_SUBMITIT = """
import submitit

def train():
    print("trains")

executor = submitit.SlurmExecutor(folder="submitit")
executor.update_parameters(nodes=2, ntasks_per_node=2, time=10, additional_parameters={"hold": True})
print(executor.submit(train).job_id)
"""


def run(runs: int = 7) -> None:
    """Measure and write results/program_submit.json."""
    with SlurmCluster() as cluster:
        directory = cluster.user_dir("benchmark")
        cluster.zslurm("init", "--yes")
        (directory / "train.py").write_text("print('trains')\n")
        (directory / "by_submitit.py").write_text(_SUBMITIT)
        (directory / "job.sh").write_text("#!/bin/bash\nsrun python3 train.py\n")
        count = 0

        def by_zslurm() -> None:
            nonlocal count
            count += 1
            cluster.zslurm(
                "submit", "-q", "-J", f"run-{count}", "--nodes", "2", "--time", "10",
                "--set", "slurm.flags.hold=true", "--", "python3", "train.py", cwd=directory,
            )  # fmt: skip

        python = cluster.installation().python
        timings = alternate(
            {
                "sbatch": lambda: cluster.run(["sbatch", "--hold", "--nodes=2", "job.sh"], cwd=directory),
                "submitit": lambda: cluster.run([python, "by_submitit.py"], cwd=directory),
                "zslurm submit -- PROGRAM": by_zslurm,
            },
            runs=runs,
        )
        cluster.run(["scancel", "--user", cluster.user.pw_name])
    write_result(
        "program_submit",
        {
            "timings": [timing.row() for timing in timings.values()],
            "ratio_to_submitit": ratio(timings["zslurm submit -- PROGRAM"], timings["submitit"]),
        },
    )
