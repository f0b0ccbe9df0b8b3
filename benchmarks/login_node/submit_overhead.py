"""`zslurm submit` until Slurm has accepted the job, against plain `sbatch` of the very same script.

On the real Slurm of the tests (eight nodes on this machine; needs root), as its ordinary user. Jobs are held, so
none of them starts.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.common import alternate, write_result
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.train.runs import VOCAB, make_corpus


def _held_run_file(cluster: SlurmCluster, directory: Path) -> Path:
    """Set the user up, and write the file of a run whose job is held, with its data, into `directory`."""
    make_corpus(directory / "tokens.h5")
    cluster.zslurm("init", "--yes")
    run_file = directory / "run.yaml"
    run_file.write_text(
        f"extends: zaya1-tiny\nmodel: {{vocab_size: {VOCAB}}}\ndata: {{path: tokens.h5}}\n"
        "slurm: {nodes: 2, ranks_per_node: 2, flags: {hold: true}}\n"
    )
    return run_file


def run(runs: int = 11) -> None:
    """Measure and write results/submit_overhead.json."""
    with SlurmCluster() as cluster:
        directory = cluster.user_dir("benchmark")
        run_file = _held_run_file(cluster, directory)
        count = 0

        def submit() -> None:
            nonlocal count
            count += 1
            cluster.zslurm("submit", "-q", run_file, "--set", f"run.name=run-{count}", cwd=directory)

        submit()
        script = directory / "runs" / "run-1" / "script.sh"
        timings = alternate(
            {
                "sbatch": lambda: cluster.run(["sbatch", str(script)], cwd=directory),
                "zslurm submit": submit,
            },
            runs=runs,
        )
        cluster.run(["scancel", "--user", cluster.user.pw_name])
    sbatch, ours = timings["sbatch"].median, timings["zslurm submit"].median
    write_result(
        "submit_overhead",
        {
            "timings": [timing.row() for timing in timings.values()],
            "overhead_over_sbatch_s": round(ours - sbatch, 3),
            "ratio_to_sbatch": round(ours / sbatch, 1),
        },
    )
