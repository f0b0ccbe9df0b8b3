"""RunSpec: everything about one run, typed and frozen.

The trainer's sections come from `train.config`; this module adds what the launcher owns. Field descriptions
are what `zslurm config schema` prints.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from train.config import (
    CheckpointConfig,
    Count,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PhaseConfig,
    Positive,
    RunIdentity,
    Section,
    Whole,
)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_TIME = re.compile(r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d(:\d\d)?)?|UNLIMITED|INFINITE", re.IGNORECASE | re.ASCII)
# Control characters, everything that some program takes for the end of a line, and what UTF-8 cannot write.
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FLAG = re.compile(r"[a-z][a-z0-9-]*")


def one_line(value: str) -> str:
    """Refuse control characters: no value may smuggle a line into a script."""
    if CONTROL.search(value):
        raise ValueError(f"must be one line without control characters, got {value!a}")
    return value


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError(
            f"must be letters, digits, '.', '_' and '-' (it becomes a directory and a job name), got {value!r}"
        )
    return value


def _time(value: object) -> object:
    text = str(value)
    if not _TIME.fullmatch(text):
        raise ValueError(f"must be a Slurm time such as 24:00:00, 2-12 or minutes, got {value!r}")
    return text


def _variable(value: str) -> str:
    if not _VARIABLE.fullmatch(value):
        raise ValueError(f"is not a name of an environment variable: {value!r}")
    return value


def _word(value: object) -> object:
    """Numbers that are names (an account `123`) are taken as they were typed."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Line = Annotated[str, BeforeValidator(_word), AfterValidator(one_line)]
Name = Annotated[str, BeforeValidator(_word), AfterValidator(_name)]
SlurmTime = Annotated[str, BeforeValidator(_time)]
VariableName = Annotated[str, AfterValidator(_variable)]

# sbatch options that the template or a typed field decides; `slurm.flags` must not set them again.
RESERVED_FLAGS = frozenset(
    "nodes ntasks ntasks-per-node cpus-per-task gpus-per-node time partition account qos job-name output error "
    "open-mode signal requeue no-requeue chdir array wrap parsable test-only export nodelist exclude mem "
    "constraint".split()
)


class RunSection(RunIdentity):
    """The run's name, seed and place."""

    name: Name = Field("run", description="name of the run; its directory under runs_dir")
    runs_dir: Line = Field("runs", description="directory that holds the runs; shared by all nodes")
    group_readable: bool = Field(False, description="let the group read the run directory (0750, not 0700)")


class SlurmSection(Section):
    """What is asked of Slurm."""

    nodes: Count = Field(1, description="nodes of the job")
    ranks_per_node: Count | None = Field(
        None, description="ranks on each node; default: the node's GPUs, or 1 without GPUs"
    )
    time: SlurmTime | None = Field(None, description="time limit, e.g. 24:00:00; default: the partition's")
    partition: Line | None = Field(None, description="partition")
    account: Line | None = Field(None, description="account to charge")
    qos: Line | None = Field(None, description="quality of service")
    constraint: Line | None = Field(None, description="node features that are required")
    nodelist: Line | None = Field(None, description="nodes that must be used")
    exclude: Line | None = Field(None, description="nodes that must not be used")
    cpus_per_task: Count | None = Field(None, description="cores of each rank; default: the node's share")
    mem: Line | None = Field(None, description="memory per node, e.g. 500G; default: Slurm's")
    cpu_bind: Line = Field("none", description="srun --cpu-bind for the ranks")
    job_name: Line | None = Field(None, description="Slurm's name for the job; default: the run's name")
    save_margin_s: Annotated[int, Field(ge=10, le=65535)] = Field(
        300, description="seconds before the time limit at which the run saves and stops"
    )
    flags: dict[str, Line | bool | None] = Field(
        default_factory=dict, description="any other long option of sbatch, e.g. reservation: spring"
    )

    @model_validator(mode="after")
    def _flags_are_flags(self) -> SlurmSection:
        for flag in self.flags:
            if not _FLAG.fullmatch(flag):
                raise ValueError(f"flags.{flag}: not a long option of sbatch (write it without the dashes)")
            if flag in RESERVED_FLAGS:
                raise ValueError(f"flags.{flag}: zslurm sets --{flag} itself; use the section's own key if any")
        return self


class ClusterSection(Section):
    """What the site knows. Lives in a cluster profile; a run file may override it."""

    name: Name = Field("local", description="name of the cluster profile")
    launcher: Literal["slurm", "local"] = Field("local", description="run as a Slurm job, or on this machine")
    gpus_per_node: Whole = Field(0, description="GPUs of one node")
    gpu_type: Line | None = Field(None, description="type of the GPUs as Slurm names it, e.g. mi300x")
    cpus_per_node: Count | None = Field(None, description="cores of one node")
    interface: Line | None = Field(None, description="management network interface, for rendezvous")
    setup: tuple[Line, ...] = Field(
        (), description="shell lines that run in the job before anything else (module load ...)"
    )
    env: dict[VariableName, Line] = Field(
        default_factory=dict, description="environment variables of the supervisor and of every rank"
    )
    template: Line = Field("train", description="sbatch template: the name of one, or a path")


class AegisSection(Section):
    """The supervisor beside the run."""

    grace_s: Positive = Field(
        30.0,
        description="seconds that peers of a failed rank get to say why, before the attempt is torn down",
    )
    lost_peer_s: Positive = Field(
        600.0,
        description="seconds that Slurm gets to name a dead node when ranks only complain of lost peers; "
        "longer than the site's SlurmdTimeout",
    )
    save_s: Positive = Field(
        600.0, description="seconds that ranks get to save and stop when asked, before they are killed"
    )
    poll_s: Positive = Field(0.25, description="seconds between two looks of the supervisor")


class RunSpec(Section):
    """One run, resolved. RUN_DIR/config.json holds it as JSON."""

    run: RunSection = RunSection()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    phases: Annotated[tuple[PhaseConfig, ...], Field(min_length=1)]
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    slurm: SlurmSection = SlurmSection()
    cluster: ClusterSection = ClusterSection()
    aegis: AegisSection = AegisSection()

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node: as asked, else one for each GPU, else one."""
        return self.slurm.ranks_per_node or max(1, self.cluster.gpus_per_node)

    @property
    def world_size(self) -> int:
        """Ranks of the whole run."""
        return self.slurm.nodes * self.ranks_per_node

    @property
    def total_steps(self) -> int:
        """Optimizer steps of all phases."""
        return sum(phase.steps for phase in self.phases)

    @property
    def cpus_per_task(self) -> int:
        """Cores of each rank: as asked, else the node's share, else one."""
        if self.slurm.cpus_per_task:
            return self.slurm.cpus_per_task
        return max(1, (self.cluster.cpus_per_node or 0) // self.ranks_per_node)
