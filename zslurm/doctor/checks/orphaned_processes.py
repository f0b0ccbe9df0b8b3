"""Is anything left of jobs that are over?

What a killed job left is found by the job and the node in its environment, never by a program's name: data
loader workers that outlived three cancelled jobs once pinned seven of eight GPUs (GaTech-RL2/EgoVerse#682).
"""

from __future__ import annotations

import os

from zslurm.checkpoint_tools.quantities import counted
from zslurm.doctor.check import Check, Outcome, failed, passed, unavailable, warned, worst
from zslurm.hardware.job_processes import Process, processes
from zslurm.hardware.node_sources import Sources

_MOST_NAMED = 4
_MANY_ZOMBIES = 20


def check(sources: Sources) -> Outcome:
    """This user's processes of jobs that Slurm does not know as active, and zombies."""
    found = list(processes(sources.root))
    if not found:
        return unavailable("/proc cannot be read")
    mine = [process for process in found if process.uid == os.getuid()]
    problems = _orphans(mine, sources)
    zombies = [process for process in mine if process.state == "Z"]
    if len(zombies) >= _MANY_ZOMBIES:
        parents = sorted({str(process.parent) for process in zombies})
        text = f"{counted(len(zombies), 'zombie')} of yours, children of {', '.join(parents[:_MOST_NAMED])}"
        problems.append(warned(text, "end their parents"))
    if problems:
        return worst(problems, "")
    if sources.task.jobs is None:
        return unavailable("Slurm did not say which of your jobs are active")
    return passed("nothing is left of your old jobs")


def _orphans(mine: list[Process], sources: Sources) -> list[Outcome]:
    jobs = sources.task.jobs
    if jobs is None:
        return []
    # squeue says `12_[3-7]` of an array that waits, `12_2` of a task that runs.
    active = {*(job.partition("_")[0] for job in jobs), sources.environ.get("SLURM_JOB_ID")} - {None}
    clusters = (None, sources.environ.get("SLURM_CLUSTER_NAME"))
    left = [
        process
        for process in mine
        if process.job is not None
        and not {process.job, process.environ.get("SLURM_ARRAY_JOB_ID")} & active
        and process.node in (None, sources.node)
        and (clusters[1] is None or process.environ.get("SLURM_CLUSTER_NAME") in clusters)
    ]
    if not left:
        return []
    named = ", ".join(f"{process.pid} {process.name}" for process in left[:_MOST_NAMED])
    more = f" and {len(left) - _MOST_NAMED} more" if len(left) > _MOST_NAMED else ""
    of = ", ".join(sorted({process.job or "" for process in left}))
    pids = " ".join(str(process.pid) for process in left[:_MOST_NAMED])
    text = f"{counted(len(left), 'process')} of ended jobs ({of}): {named}{more}"
    return [failed(text, f"end them: srun -w {sources.node} kill -9 {pids}")]


CHECK = Check("orphaned-processes", "system", "processes of your jobs that are over, and zombies", "node", check)
