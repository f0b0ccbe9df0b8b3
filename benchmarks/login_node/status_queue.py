"""`zslurm status` with 1,000 jobs in the queue, against plain `squeue` of the same jobs in the same format.

On the real Slurm of the tests (eight nodes on this machine; needs root), as its ordinary user: 990 plain jobs and
10 runs, all held. "cold" asks Slurm, "warm" is the next call of a shell loop, which the kept view answers. The
calls of squeue are counted apart from the timing.
"""

from __future__ import annotations

import os
import shutil

from benchmarks.common import alternate, write_result
from benchmarks.login_node.submit_overhead import held_run_file
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from zslurm.slurm.jobs import QUEUE_FORMAT

_JOBS, _RUNS = 1000, 10


def run(runs: int = 11) -> None:
    """Measure and write results/status_queue.json."""
    with SlurmCluster() as cluster:
        directory = cluster.user_dir("benchmark")
        _fill_queue(cluster)
        # Byte code is compiled once, as in any installation.
        compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(directory / "compiled")}
        squeue = ["squeue", "--noheader", "--states=all", f"--user={cluster.user.pw_name}"]
        cold = 0

        def status(cache: str) -> str:
            environment = compiled | {"XDG_CACHE_HOME": str(directory / cache)}
            return cluster.zslurm("status", cwd=directory, env=environment).stdout

        def ask_anew() -> None:
            nonlocal cold
            cold += 1
            status(f"cold-{cold}")

        assert status("warm").count("\tpending\t") + status("warm").count("\theld\t") == _RUNS
        calls = _calls_of(cluster, compiled | {"XDG_CACHE_HOME": str(directory / "counted")})
        load = os.getloadavg()[0]
        timings = alternate(
            {
                "squeue": lambda: cluster.run([*squeue, f"--Format={QUEUE_FORMAT}"]),
                "zslurm status, cold": ask_anew,
                "zslurm status, warm": lambda: status("warm"),
                "python -c pass": lambda: cluster.run([cluster.installation().python, "-c", "pass"]),
            },
            runs=runs,
        )
        cluster.run(["scancel", "--user", cluster.user.pw_name])
    write_result(
        "status_queue",
        {
            "jobs_in_the_queue": _JOBS,
            "runs": _RUNS,
            "squeue_calls": calls,
            "load_at_the_start": round(load, 2),
            "timings": [timing.row() for timing in timings.values()],
            "cold_over_squeue_s": round(timings["zslurm status, cold"].median - timings["squeue"].median, 3),
        },
    )


def _fill_queue(cluster: SlurmCluster) -> None:
    """The held jobs and runs."""
    directory = cluster.instance.user / "benchmark"
    run_file = held_run_file(cluster, directory)
    for number in range(_RUNS):
        cluster.zslurm("submit", "-q", run_file, "--set", f"run.name=run-{number}", cwd=directory)
    one = "sbatch --quiet --hold --output=/dev/null --wrap=true"
    many = f"for i in $(seq {_JOBS - _RUNS}); do {one} || exit 1; done"
    cluster.run(["sh", "-c", many], cwd=directory, timeout=900)


def _calls_of(cluster: SlurmCluster, environment: dict[str, str]) -> dict[str, int]:
    """How often squeue is called by one status, and by a loop of ten."""
    tools = cluster.user_dir("counted")
    calls = tools / "calls"
    wrapper = tools / "squeue"
    wrapper.write_text(f'#!/bin/sh\necho >> {calls}\nexec {shutil.which("squeue")} "$@"\n')
    wrapper.chmod(0o755)
    path = {"PATH": f"{tools}:/usr/local/bin:/usr/bin:/bin"}
    found = {}
    for name, times in (("one status", 1), ("ten in a loop", 10)):
        cluster.run(["rm", "-rf", str(calls), environment["XDG_CACHE_HOME"]])
        for _ in range(times):
            cluster.zslurm("status", env=environment | path)
        found[name] = calls.read_text().count("\n")
    return found
