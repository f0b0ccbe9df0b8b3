"""What a run has left to train, for the policy to weigh fewer nodes against a wait."""

from __future__ import annotations

from zslurm.aegis.types import WorkLeft
from zslurm.checkpoint_tools.format.layout import step_of
from zslurm.config.spec import RunSpec
from zslurm.run.metrics.tail import newest_rows
from zslurm.run.program_checkpoints import newest_step
from zslurm.run.run_dir import RunDir
from zslurm.train.schedule import Plan


def work_left(run: RunDir, spec: RunSpec, committed: int, job_s: float | None) -> WorkLeft | None:
    """Return what is left after the checkpoint of step `committed` (-1: none); None for another program."""
    if spec.trainer is not None:
        return None
    plan = Plan(spec.phases)
    done = min(max(0, committed), plan.total_steps)
    position = plan.at(min(done, plan.total_steps - 1))
    step_s = newest_rows(run.metrics).step_time_s
    return WorkLeft(
        position.global_batch,
        position.phase.micro_batch,
        max(1, spec.ranks_per_node // position.phase.context_parallel),
        job_s=job_s,
        training_s=None if step_s is None else (plan.total_steps - done) * step_s,
    )


def committed_step(run: RunDir, spec: RunSpec) -> int:
    """Return the step of a run's newest checkpoint by the names of its directories; -1 if there is none."""
    if spec.trainer is not None:
        return newest_step(spec.trainer, run)
    try:
        steps = [step_of(path.name) for path in run.checkpoints.iterdir()]
    except OSError:
        return -1
    return max((step for step in steps if step is not None), default=-1)
