"""The options of sbatch that zslurm knows, in the order in which a script has them: one row for each.

Everything else derives from this table: the keys of the section `slurm` that a row names, options of
`zslurm submit`, the `#SBATCH` lines of runs, of `--slurm` and of submitit's functions, and what `slurm.flags` must
not set. A new option is a row here, and if users set it by name, a field in `config/spec.py` and a parameter in
`cli/run/submit.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Job = Literal["command", "function", "probe"]
"""A job besides those of runs: a command with `--slurm`, a function of submitit, a job that asks nodes."""


@dataclass(frozen=True)
class SbatchOption:
    """One long option of sbatch.

    Attributes:
        name: without the dashes.
        key: the key of the section `slurm` that gives its value; empty if the program computes it.
        rendered: a script of a run can have it.
        free: users may give it in `slurm.flags`, also instead of the computed value.
        typed: its names in `zslurm submit`; empty if it has no option there.
        metavar: what stands for its value there.
        help: what it means there.
        sets: the dotted key of the run that the option there sets, if it differs from `key`.
        jobs: other jobs that carry the value of `key` as it is.
        instead: what to use if a user gives it behind `--`, although the program sets it.
        of_submitit: why `slurm_additional_parameters` of submitit cannot have it; empty if they can.
    """

    name: str
    key: str = ""
    rendered: bool = True
    free: bool = False
    typed: tuple[str, ...] = ()
    metavar: str = ""
    help: str = ""
    sets: str = ""
    jobs: frozenset[Job] = frozenset()
    instead: str = ""
    of_submitit: str = ""

    @property
    def run_key(self) -> str:
        """Return the dotted key of a run that the option of `zslurm submit` sets."""
        return self.sets or (f"slurm.{self.key}" if self.key else f"slurm.flags.{self.name}")


_EVERYWHERE: frozenset[Job] = frozenset({"command", "function", "probe"})
_LOGS = "submitit reads the logs there"

OPTIONS = (
    SbatchOption(
        "job-name",
        "job_name",
        typed=("-J", "--job-name"),
        metavar="NAME",
        help="Name of the run, and of its job.",
        sets="run.name",
        instead="--set slurm.job_name=NAME",
    ),
    SbatchOption(
        "nodes",
        "nodes",
        typed=("-N", "--nodes"),
        metavar="N",
        help="Nodes of the job.",
        instead="--nodes N",
        of_submitit="use nodes, from which submitit knows the number of tasks",
    ),
    SbatchOption(
        "ntasks",
        rendered=False,
        instead="--set slurm.ranks_per_node=N",
        of_submitit="use nodes and tasks_per_node",
    ),
    SbatchOption(
        "ntasks-per-node",
        "ranks_per_node",
        instead="--set slurm.ranks_per_node=N",
        of_submitit="use tasks_per_node, from which submitit knows the number of tasks",
    ),
    SbatchOption("cpus-per-task", "cpus_per_task", instead="--set slurm.cpus_per_task=N"),
    SbatchOption("gpus-per-node", instead="--set cluster.gpus_per_node=N"),
    SbatchOption("mem", "mem", instead="--set slurm.mem=SIZE"),
    SbatchOption(
        "time",
        "time",
        typed=("-t", "--time"),
        metavar="TIME",
        help="Time limit: 24:00:00, 2-12, or minutes.",
        instead="--time",
    ),
    SbatchOption(
        "partition",
        "partition",
        typed=("-p", "--partition"),
        metavar="NAME",
        help="Partition.",
        jobs=_EVERYWHERE,
        instead="--partition",
    ),
    SbatchOption(
        "account",
        "account",
        typed=("-A", "--account"),
        metavar="NAME",
        help="Account to charge.",
        jobs=_EVERYWHERE,
        instead="--account",
    ),
    SbatchOption(
        "qos",
        "qos",
        typed=("--qos",),
        metavar="NAME",
        help="Quality of service.",
        jobs=_EVERYWHERE,
        instead="--qos",
    ),
    SbatchOption("constraint", "constraint", jobs=_EVERYWHERE, instead="--set slurm.constraint=FEATURES"),
    SbatchOption(
        "nodelist",
        "nodelist",
        typed=("-w", "--nodelist"),
        metavar="NODES",
        help="Nodes that the job must have: node[3,7-9].",
        jobs=frozenset({"function"}),
        instead="--set slurm.nodelist=NODES",
    ),
    SbatchOption(
        "exclude",
        "exclude",
        typed=("-x", "--exclude"),
        metavar="NODES",
        help="Nodes that must not be used: node[3,7-9].",
        jobs=frozenset({"command", "function"}),
        instead="--exclude",
    ),
    SbatchOption("output", of_submitit=_LOGS),
    SbatchOption("error", rendered=False, of_submitit=_LOGS),
    SbatchOption("open-mode", of_submitit="a job that starts again appends to its logs"),
    SbatchOption("requeue"),
    SbatchOption("no-requeue", rendered=False),
    SbatchOption("no-kill", instead="--spares N"),
    SbatchOption("export", "export", instead="--set slurm.export=NAMES"),
    SbatchOption("signal", instead="--set slurm.save_margin_s=SECONDS", of_submitit="use slurm_signal_delay_s"),
    SbatchOption("exclusive", free=True),
    SbatchOption("switches", free=True),
    SbatchOption(
        "reservation",
        rendered=False,
        free=True,
        typed=("--reservation",),
        metavar="NAME",
        help="Reservation to run in.",
    ),
    SbatchOption("chdir", rendered=False),
    SbatchOption(
        "array",
        rendered=False,
        instead="--sweep KEY=VALUE,VALUE",
        of_submitit="use map_array or executor.batch(), and slurm_array_parallelism",
    ),
    SbatchOption("wrap", rendered=False, of_submitit="the script runs the function"),
    SbatchOption(
        "parsable",
        rendered=False,
        instead="--quiet",
        of_submitit="submitit reads the job's number from sbatch's answer",
    ),
    SbatchOption("test-only", rendered=False, instead="--dry-run", of_submitit="nothing would be submitted"),
)

BY_NAME = {option.name: option for option in OPTIONS}

RESERVED = frozenset(option.name for option in OPTIONS if not option.free)
"""Options that a key or the program decides; `slurm.flags` must not set them again."""


def carried_by(job: Job) -> list[SbatchOption]:
    """Return the options whose value another job takes from the section `slurm` as it is."""
    return [option for option in OPTIONS if job in option.jobs]
