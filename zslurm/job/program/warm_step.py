"""The step, or local processes, of the keepers of warm programs: one for each rank of each node.

It is started once in a job, next to the first attempt, and outlives the attempts. Its keepers end when the run is
over in this job.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from zslurm.config.spec import RunSpec
from zslurm.job.in_memory.warm_step import next_to_ranks
from zslurm.job.numa_bind import bind_variable
from zslurm.job.preparation.interpreter import Interpreter
from zslurm.job.step import StepPlan
from zslurm.run.run_dir import RunDir
from zslurm.slurm.environment import step_environment

STEP_NAME = "warm-programs"


def keepers_step(spec: RunSpec, run: RunDir, python: Interpreter, nodes: Sequence[str]) -> StepPlan:
    """Return the step of the keepers on these nodes; on the local launcher, on this machine."""
    keeper = [*python.command, "-u", "-m", "zslurm.job.program.warm_keeper", str(run.path)]
    if spec.cluster.launcher != "slurm":
        local = [
            sys.executable, "-u", "-m", "zslurm.job.local_step",
            f"--ranks={spec.world_size}", f"--output={run.warm}", "--name=keeper", "--",
        ]  # fmt: skip
        return StepPlan([*local, *keeper], dict(python.environ))
    options = next_to_ranks(spec, python, nodes, per_node=spec.ranks_per_node, name=STEP_NAME)
    command = [*options, f"--output={run.warm}/keeper-%5t.log"]
    # A signal to the whole job must not end a keeper under which a program saves, or one that has no handler yet.
    masked = ["/bin/sh", "-c", "trap '' HUP INT USR1 USR2; exec \"$@\"", "zslurm-warm"]
    return StepPlan([*command, *masked, *keeper], step_environment(python.environ) | bind_variable(spec))
