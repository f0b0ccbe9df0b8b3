"""RunSpec: everything about one run, typed and frozen.

The trainer's sections come from `zslurm.train.config`; this module adds what the launcher owns. Field descriptions
are what `zslurm config schema` prints.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

from zslurm.checkpoint_tools.plain import shorten
from zslurm.checkpoint_tools.quantities import counted
from zslurm.config.aegis import AegisSection
from zslurm.config.doctor import DoctorSection
from zslurm.config.fabric import FabricSection
from zslurm.config.measured import MeasuredSection
from zslurm.config.text import as_word, one_line, shown_json
from zslurm.config.trainer import TrainerSection
from zslurm.core.errors import ConfigError
from zslurm.core.paths import LONGEST_NAME
from zslurm.slurm.jobs import time_limit
from zslurm.slurm.sbatch_options import RESERVED
from zslurm.train.config import ModelConfig, RunIdentity, TrainConfig
from zslurm.train.sections.phases import PhaseConfig
from zslurm.train.sections.section import Count, Positive, Section, Whole

_LONGEST_TIME = timedelta(days=24855)  # Slurm counts seconds in 32 bits, and silently overflows
_WORD = "[A-Za-z_][A-Za-z0-9_]*"
_JOB_ID = re.compile(r"[0-9]+|local-[0-9]+")
_FLAG = re.compile(r"[a-z][a-z0-9-]*")
_TIME = re.compile(
    r"\d{1,9}|\d{1,9}:\d\d(:\d\d)?|\d{1,9}-\d{1,9}(:\d\d(:\d\d)?)?|UNLIMITED|INFINITE", re.IGNORECASE | re.ASCII
)
RECORDED = {"recorded": True}
"""Validation context of a configuration that a run was submitted with: what was accepted then stays accepted."""


def _matching(pattern: str, expected: str) -> AfterValidator:
    """Return a validator that refuses what does not match; `expected` names what would."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"{expected}, got {shown_json(value)}")
        return value

    return AfterValidator(check)


def _not_too_long(value: str) -> str:
    if len(value) > LONGEST_NAME:
        raise ValueError(f"must have at most {LONGEST_NAME} characters, this has {len(value)}: {value[:20]}...")
    return value


def _no_job_id(value: str, info: ValidationInfo) -> str:
    if _JOB_ID.fullmatch(value) and info.context != RECORDED:
        raise ValueError(
            f"must not be a job id, which commands would take it for: {value}; add a letter or a word"
        )
    return value


def _time(value: object) -> object:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    if not _TIME.fullmatch(text):
        shown = json.dumps(shorten(text)) if isinstance(value, str) else shorten(text)
        raise ValueError(f"must be a Slurm time such as 24:00:00, 2-12 or minutes, got {shown}")
    if (limit := time_limit(text)) is not None and limit > _LONGEST_TIME:
        raise ValueError(
            f"must be at most {_LONGEST_TIME.days} days, the longest time that Slurm can count (UNLIMITED sets no "
            f"limit), got {text}"
        )
    return text


Line = Annotated[str, BeforeValidator(as_word), AfterValidator(one_line)]
Name = Annotated[
    str,
    BeforeValidator(as_word),
    AfterValidator(_not_too_long),
    _matching(
        "[A-Za-z0-9][A-Za-z0-9._-]*",
        "must be letters, digits, '.', '_' and '-', and begin with a letter or digit (it becomes a directory and "
        "a job name)",
    ),
]
RunName = Annotated[Name, AfterValidator(_no_job_id)]
SlurmTime = Annotated[str, BeforeValidator(_time)]
VariableName = Annotated[str, _matching(_WORD, "must be the name of an environment variable")]
Bind = Annotated[
    Line,
    _matching(
        "/[^:,]*(:/[^:,]*(:[^:,]+)?)?", "must be /SOURCE, /SOURCE:/PLACE or /SOURCE:/PLACE:ro, without commas"
    ),
]
Directory = Annotated[Line, _matching(r"/[^%\\]*", "must be an absolute path without '%' and '\\'")]
Export = Annotated[
    Line,
    _matching(f"ALL|NONE|{_WORD}(,{_WORD})*", "must be ALL, NONE or names of variables with commas between them"),
]


class RunSection(RunIdentity):
    """The run's name, seed and place."""

    name: RunName = Field("run", description="name of the run; its directory under runs_dir")
    runs_dir: Line = Field("runs", description="directory that holds the runs; shared by all nodes")
    group_readable: bool = Field(False, description="let the group read the run directory (0750, not 0700)")
    snapshot: Literal["none", "copy"] = Field(
        "none",
        description="copy: keep the code of each submission in RUN_DIR/code and run that, also after a requeue; "
        "commit and local changes are recorded in any case",
    )


class SlurmSection(Section):
    """What is asked of Slurm."""

    nodes: Count = Field(1, description="nodes of the job")
    spares: Whole = Field(
        0, description="nodes on top that wait to take a failed one's place; the job then outlives a dead node"
    )
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
    cpu_bind: Line = Field(
        "gpu",
        description="cores of each rank: of its GPU's NUMA node (`gpu`), all of the step's (`none`), or as "
        "srun --cpu-bind takes them",
    )
    job_name: Line | None = Field(None, description="Slurm's name for the job; default: the run's name")
    save_margin_s: Annotated[int, Field(ge=10, le=65535)] = Field(
        300, description="seconds before the time limit at which the run saves and stops"
    )
    export: Export = Field(
        "ALL",
        description="what of the login environment reaches the job: ALL, NONE, or names of variables (A,B,C)",
    )
    successor: Literal["auto", "on", "off"] = Field(
        "auto",
        description="queue a second job that continues the run if the first ended early; auto: if compute "
        "nodes have no scontrol (cluster.scontrol_on_nodes: false), so that a job cannot requeue itself",
    )
    flags: dict[str, Line | bool | None] = Field(
        default_factory=dict, description="any other long option of sbatch, e.g. reservation: spring"
    )

    @model_validator(mode="after")
    def _flags_are_flags(self) -> SlurmSection:
        for flag in self.flags:
            if not _FLAG.fullmatch(flag):
                raise ValueError(f"flags.{flag}: not a long option of sbatch (write it without the dashes)")
            if flag in RESERVED:
                raise ValueError(f"flags.{flag}: zslurm sets --{flag} itself; use the section's own key if any")
        return self


class ContainerSection(Section):
    """The container of the training step; the supervisor stays on the host."""

    engine: Literal["apptainer", "singularity", "pyxis"] = Field(
        "apptainer", description="what runs the image; pyxis is srun's own --container-image"
    )
    image: Line = Field(description="a .sif or .sqsh file, a directory, or what the engine takes (docker://...)")
    python: Line = Field("python3", description="the Python inside that has torch")
    packages: Literal["host", "image"] = Field(
        "host",
        description="whose zslurm and train the ranks import: this installation's, copied to RUN_DIR/code, or the "
        "image's own",
    )
    binds: tuple[Bind, ...] = Field((), description="more directories of the host: /SOURCE[:/PLACE[:ro]]")
    default_binds: bool = Field(
        True, description="bind the run, its data, /dev/shm, the GPUs' and the RDMA devices, if they exist"
    )
    options: tuple[Line, ...] = Field(
        (), description="further options, one word each: of `apptainer exec` (--rocm, --nv), or of srun for pyxis"
    )


class ClusterSection(Section):
    """What the site knows, as a cluster profile gives it; a run file may override it."""

    name: Name = Field("local", description="name of the cluster profile")
    launcher: Literal["slurm", "local"] = Field("local", description="run as a Slurm job, or on this machine")
    gpus_per_node: Whole = Field(0, description="GPUs of one node")
    gpu_type: Line | None = Field(None, description="type of the GPUs as Slurm names it, e.g. mi300x")
    gpu_option: Literal["gpus-per-node", "gres", "gpus-per-task"] = Field(
        "gpus-per-node",
        description="sbatch's option for the GPUs of a job; `zslurm init` finds the form that the site accepts",
    )
    cpus_per_node: Count | None = Field(None, description="cores of one node")
    interface: Line | None = Field(None, description="management network interface, for rendezvous")
    storage_interface: Line | None = Field(
        None, description="network interface of data and checkpoints; `zslurm doctor` checks the mounts' route"
    )
    storage_iops: Positive | None = Field(
        None,
        description="pages of 4 KiB a second that the storage of the data gives in random reads, the budget of "
        "`zslurm plan io`; `zslurm bench storage` measures it",
    )
    gpu_family: Line | None = Field(
        None, description="family of the GPUs for the RCCL rules, e.g. mi300x or h100; default: gpu_type"
    )
    network: Literal["pollara", "broadcom", "cx7", "infiniband", "slingshot", "other"] | None = Field(
        None,
        description="kind of the NICs between nodes, for the RCCL rules; other: none that the rules know",
    )
    rails_only: bool = Field(False, description="no path between rails: NIC i of a node reaches NICs i only")
    nics: tuple[Line, ...] = Field((), description="RDMA devices of one node in rail order: the first is rail 0's")
    gpu_nics: tuple[Whole, ...] = Field(
        (), description="for each GPU the index of its NIC in `nics`; default: GPU i uses NIC i"
    )
    gid_index: Whole | None = Field(None, description="GID index of RoCE v2; default: the network's usual one")
    traffic_class: Whole | None = Field(
        None, description="class of RoCE packets that switches never drop, four times its DSCP, e.g. 104"
    )
    gpu_numa: tuple[Whole, ...] = Field(
        (), description="for each GPU its NUMA node; default: what sysfs of the node has when the ranks start"
    )
    rccl_version: Line | None = Field(
        None, description="version of RCCL or NCCL, e.g. 2.22.3, for the rules; default: the one in rocm_version"
    )
    rocm_version: Line | None = Field(None, description="version of ROCm on the nodes, e.g. 7.2.1, for the rules")
    ainic_transport: Literal["plugin", "builtin", "generic"] | None = Field(
        None,
        description="RCCL's transport for Pollara NICs: AMD's plugin librccl-anp.so, what RCCL has built in (ROCm "
        "7.2.1 and newer), or RCCL's generic RDMA; default: by rocm_version or rccl_version",
    )
    peermem: bool | None = Field(
        None, description="whether the nodes' kernel lets NICs reach GPU memory by peer memory (peermem)"
    )
    copy_engines: bool = Field(
        False,
        description="let the copy engines of AMD GPUs make the all-gathers of weights inside a node, without "
        "compute units: RCCL 2.28.3 (ROCm 7.12) and newer, torch 2.9 and newer; not measured on a GPU yet",
    )
    rail_policy: Literal["exclude", "refuse", "warn"] = Field(
        "exclude",
        description="what to do with a node whose rails are incomplete, before the ranks start: "
        "exclude it and requeue, refuse to start, or continue with a warning",
    )
    leaf_switches: dict[Line, Line] = Field(
        default_factory=dict,
        description="leaf switch -> hostlist, if a leaf joins all NICs of its nodes and Slurm has no topology",
    )
    fabric: FabricSection = Field(
        FabricSection(), description="switches behind the rails, if each leaf switch carries some rails"
    )
    nodes_per_switch: Count | None = Field(
        None,
        description="nodes on one leaf switch of Slurm's topology/tree: a job then asks for as few leaf switches "
        "as hold it (--switches); `zslurm init` writes it",
    )
    setup: tuple[Line, ...] = Field(
        (), description="shell lines that run in the job before anything else (module load ...)"
    )
    modules: tuple[Line, ...] = Field((), description="modules to load before `setup` (module load ...)")
    venv: Directory | None = Field(
        None,
        description="virtual or conda environment whose Python runs the job; default: the one zslurm runs in",
    )
    stage_env: Directory | None = Field(
        None,
        description="node-local directory, e.g. /tmp: the Python environment is copied there, once per node, "
        "and the ranks run from it",
    )
    container: ContainerSection | None = Field(None, description="run the training step inside a container")
    env: dict[VariableName, Line | None] = Field(
        default_factory=dict,
        description="environment variables of the supervisor and of every rank; null takes away what a rule sets",
    )
    scontrol_on_nodes: bool | None = Field(
        None, description="whether compute nodes have scontrol; see slurm.successor"
    )
    exclusions: Line | None = Field(
        None,
        description="directory with the nodes that the runs of a group exclude, which all of them read and write; "
        "default: each run finds its bad nodes by itself",
    )
    template: Line = Field("train", description="sbatch template: the name of one, or a path")
    gemm_table: Line = Field(
        "auto",
        description="table of matrix products that `zslurm bench tuning` tuned, for every rank on GPUs: auto "
        "takes the profile's if it has one, off takes none; or a path",
    )
    measured: MeasuredSection = Field(
        MeasuredSection(),
        description="what was measured here; `zslurm bench apply` writes it",
        json_schema_extra={"readOnly": True},
    )
    doctor: DoctorSection = Field(DoctorSection(), description="limits of `zslurm doctor`")

    @model_validator(mode="after")
    def _fits_together(self) -> ClusterSection:
        if self.container is not None and self.stage_env is not None:
            raise ValueError(
                "stage_env: a container brings its own Python environment; leave stage_env or container out"
            )
        if self.fabric.slices and self.leaf_switches:
            raise ValueError(
                "leaf_switches: fabric.slices describes the network already; leave one of the two out: slices for "
                "leaf switches that carry some rails, leaf_switches for leaf switches that carry all"
            )
        gpus = counted(self.gpus_per_node, "GPU")
        rails = len(self.nics) or self.gpus_per_node
        for index, slice_ in enumerate(self.fabric.slices):
            if rails and max(slice_.rails) >= rails:
                raise ValueError(
                    f"fabric.slices[{index}].rails: {max(slice_.rails)} is none of the {counted(rails, 'rail')} "
                    "(0 is the first)"
                )
        if self.gpu_numa and len(self.gpu_numa) != self.gpus_per_node:
            raise ValueError(f"gpu_numa: {gpus} but {counted(len(self.gpu_numa), 'entry')}")
        if self.network == "slingshot" and self.is_rails_network:
            raise ValueError("network: slingshot joins all NICs; leave out rails_only and fabric.slices")
        if self.network == "slingshot" and self.nics:
            raise ValueError(
                "nics: leave it out with network: slingshot, whose NICs are no RDMA devices; libfabric pairs them "
                "with GPUs by NUMA domain"
            )
        if not self.nics or not self.gpus_per_node:
            return self
        nics = counted(len(self.nics), "NIC")
        if len(set(self.nics)) != len(self.nics):
            raise ValueError("nics: a device is listed twice")
        if not self.gpu_nics and len(self.nics) != self.gpus_per_node:
            raise ValueError(
                f"nics: {gpus} but {nics}: list one for each GPU in rail order, or give in gpu_nics which NIC "
                "each GPU uses"
            )
        if self.gpu_nics and len(self.gpu_nics) != self.gpus_per_node:
            raise ValueError(f"gpu_nics: {gpus} but {counted(len(self.gpu_nics), 'entry')}")
        if self.gpu_nics and max(self.gpu_nics) >= len(self.nics):
            raise ValueError(f"gpu_nics: {max(self.gpu_nics)} is none of the {nics} (0 is the first)")
        return self

    @property
    def rdma_network(self) -> Literal["pollara", "broadcom", "cx7", "infiniband"] | None:
        """Return the RDMA network that the RCCL rules know; None if it is another, or not known.

        HPE Slingshot is none: RCCL reaches it through libfabric, by a plugin.
        """
        return None if self.network == "other" or self.network == "slingshot" else self.network

    def network_request(self, flags: Mapping[str, str | bool | None]) -> str | None:
        """Return what `--network` of sbatch and srun asks of the network, besides `slurm.flags`; None for nothing.

        With `alt_read`, HPE Slingshot's rendezvous protocol for RCCL, the driver must not answer reads by itself.
        """
        if (flag := flags.get("network")) is not None:
            return flag if isinstance(flag, str) else None
        protocol = self.env.get("FI_CXI_RDZV_PROTO", "alt_read")
        return "disable_rdzv_get" if self.network == "slingshot" and protocol == "alt_read" else None

    @property
    def has_rails(self) -> bool:
        """Return whether GPUs have NICs of their rail."""
        return bool(self.gpus_per_node and self.nics) or self.is_rails_network

    @property
    def is_rails_network(self) -> bool:
        """Return whether the network between nodes is built by rail: no ordinary Clos or InfiniBand network."""
        return self.rails_only or bool(self.fabric.slices)

    @property
    def gpu_request(self) -> str | None:
        """Return all GPUs of a node as --gpus-per-node takes them, such as mi300x:8; None if there are none."""
        return self.gpu_request_of(self.gpus_per_node)

    def gpu_request_of(self, gpus: int) -> str | None:
        """Return a number of GPUs of a node, or all that it has, as --gpus-per-node takes them."""
        gpus = min(gpus, self.gpus_per_node)
        if not gpus:
            return None
        return f"{self.gpu_type}:{gpus}" if self.gpu_type else str(gpus)

    def gpu_flag(self, request: str | None, tasks: int = 1) -> tuple[str, str | None]:
        """Return the option of a job for GPUs of each node (`mi300x:8`), in the form that the site accepts.

        Raises:
            ConfigError: `tasks` of a node cannot share its GPUs evenly, which gpus-per-task needs.
        """
        if request is None or self.gpu_option == "gpus-per-node":
            return "gpus-per-node", request
        if self.gpu_option == "gres":
            return "gres", f"gpu:{request}"
        kind, colon, count = request.rpartition(":")
        if int(count) % tasks:
            shared = f"{counted(int(count), 'GPU')} cannot be divided by {counted(tasks, 'rank')} of a node"
            raise ConfigError(f"cluster.gpu_option: {shared}, as gpus-per-task needs")
        return "gpus-per-task", f"{kind}{colon}{int(count) // tasks}"

    def srun_gpu_options(self) -> list[str]:
        """Return srun's options for a step whose tasks all see every GPU of their node."""
        return [f"--gpus-per-node={self.gpu_request}", "--gpu-bind=none"] if self.gpu_request else []


class RunSpec(TrainConfig):
    """One run, resolved: the trainer's sections and the launcher's. RUN_DIR/config.json holds it as JSON."""

    model_config = ConfigDict(extra="forbid")

    run: RunSection = RunSection()
    model: ModelConfig = ModelConfig()
    slurm: SlurmSection = SlurmSection()
    cluster: ClusterSection = ClusterSection()
    aegis: AegisSection = AegisSection()
    trainer: TrainerSection | None = Field(
        None, description="another program that trains, instead of zslurm's own trainer"
    )

    @property
    def ranks_per_node(self) -> int:
        """Return the ranks on each node: as asked, else one for each GPU, else one.

        A launcher of the program's own, of which each node has one, is one rank.
        """
        return 1 if self.trainer is not None and self.trainer.launcher == "node" else self.processes_per_node

    @property
    def processes_per_node(self) -> int:
        """Return the processes that train on each node, whoever starts them."""
        return self.slurm.ranks_per_node or max(1, self.cluster.gpus_per_node)

    @property
    def world_size(self) -> int:
        """Return the ranks of the whole run."""
        return self.slurm.nodes * self.ranks_per_node

    @property
    def needs_rails_alone(self) -> bool:
        """Return whether another job on its nodes would slow this one down on the network.

        On an ordinary network only a run on several nodes sends through NICs, and one that takes fewer GPUs than a
        node has NICs shares its nodes by intent.
        """
        cluster = self.cluster
        if not cluster.has_rails or cluster.is_rails_network:
            return cluster.has_rails
        return self.slurm.nodes > 1 and cluster.gpus_per_node >= len(cluster.nics)

    @property
    def wants_successor(self) -> bool:
        """Return whether a second job waits for the end of the first."""
        setting = self.slurm.successor
        needed = setting == "on" or (setting == "auto" and self.cluster.scontrol_on_nodes is False)
        return needed and self.cluster.launcher == "slurm"

    @property
    def outlives_nodes(self) -> bool:
        """Return whether the job continues when a node dies: there are spares, or fewer nodes will do."""
        least = self.aegis.fewest_nodes
        return bool(self.slurm.spares) or (least is not None and least < self.slurm.nodes)

    @property
    def why_no_helper(self) -> str:
        """Return why helper jobs cannot bring nodes into this run; empty if they can."""
        if self.cluster.launcher != "slurm":
            return "needs Slurm; this run starts on this machine"
        if not self.recovers_in_memory:
            return "needs recovery in memory, which this run does not have; on GPUs set aegis.recovery: memory"
        if self.cluster.stage_env is not None:
            return "does not copy cluster.stage_env to the nodes of helper jobs; leave one of them out"
        return ""

    @property
    def may_ask_for_helpers(self) -> bool:
        """Return whether a helper job may bring nodes into this run: always, or if that costs least."""
        weighs = self.aegis.heal == "auto" and self.aegis.min_nodes is not None
        return (weighs or self.aegis.heal == "helper") and not self.why_no_helper

    @property
    def recovers_in_memory(self) -> bool:
        """Return whether lost ranks are expected to be replaced in memory: with `auto` not yet on GPUs."""
        on_gpus = self.cluster.gpus_per_node > 0 and self.parallel.device != "cpu"
        is_expected = self.aegis.recovery == "memory" or not on_gpus
        return self.trainer is None and self.world_size > 1 and self.aegis.recovers_in_memory and is_expected

    @property
    def network_request(self) -> str | None:
        """Return what `--network` of sbatch and srun asks of the network; None for nothing."""
        return self.cluster.network_request(self.slurm.flags)

    @property
    def srun_network_options(self) -> list[str]:
        """Return srun's option for the network of the ranks' step."""
        return [f"--network={self.network_request}"] if self.network_request else []

    @property
    def srun_cpu_bind(self) -> str:
        """Return srun's --cpu-bind for the ranks, which bind themselves to the cores of their GPUs."""
        return "none" if self.slurm.cpu_bind == "gpu" else self.slurm.cpu_bind

    @property
    def cpus_per_task(self) -> int:
        """Return the cores of each rank: as asked, else the node's share, else one."""
        if self.slurm.cpus_per_task:
            return self.slurm.cpus_per_task
        return max(1, (self.cluster.cpus_per_node or 0) // self.ranks_per_node)


class ProgramSpec(RunSpec):
    """A run whose trainer is another program, so that it has no phases."""

    phases: tuple[PhaseConfig, ...] = ()

    @model_validator(mode="after")
    def _is_the_program_s(self, info: ValidationInfo) -> ProgramSpec:
        if info.context == RECORDED:
            return self
        for name in OWN_SECTIONS:
            if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True):
                raise ValueError(f"{name}: belongs to zslurm's own trainer; leave it out, or trainer")
        if self.aegis.recovery == "memory":
            raise ValueError("aegis.recovery: memory needs zslurm's own trainer; leave it out")
        if self.aegis.heal == "helper":
            raise ValueError("aegis.heal: helper needs zslurm's own trainer; leave it out")
        if self.trainer is not None and self.trainer.stop_s >= self.aegis.save_s:
            raise ValueError(
                f"trainer.stop_s ({self.trainer.stop_s:g} s) must be less than aegis.save_s "
                f"({self.aegis.save_s:g} s), after which everything is killed; raise aegis.save_s"
            )
        return self


OWN_SECTIONS = tuple(name for name in TrainConfig.model_fields if name not in ("run", "parallel"))
"""Sections that only zslurm's own trainer reads. `parallel.device: cpu` also decides about GPUs of a program."""


def spec_class(data: Mapping[str, Any]) -> type[RunSpec]:
    """Return the class of a run by its configuration."""
    return RunSpec if data.get("trainer") is None else ProgramSpec
