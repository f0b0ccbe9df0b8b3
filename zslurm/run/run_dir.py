"""The run directory: every path in it, and who writes what.

RUN/
  config.json           the resolved run, which the trainer reads        written by: submit
  submissions.jsonl     each submission, requeue and cancel              submit, requeue, cancel
  code.json, code.diff  zslurm's version, git commit and local changes   submit
  code/                 copy of that code, with run.snapshot             submit
  script.sh             the rendered script of the last submission       submit
  gemm-table.json, .csv the cluster's tuned matrix products, for ranks   submit
  kernels-KIND.tar      the kernels of a kind of node, before ranks start   one node of the kind
  secrets.env           secrets of cluster.env, for the script (0600)    submit
  submitit/             submitit's pickled call and its result           submit, submitit
  supervisor.json       process of the present supervisor                supervisor
  agent.json            process of the agent, on the local launcher      supervisor
  deputy-ID-N-M.json    who acts for a supervisor that is gone           an agent
  events.jsonl          what happened and what was decided               supervisor; the standby
  state-events.json     its rows that change the run's state             supervisor; status
  job-ID.exit           exit code of the run, once job ID is over        supervisor
  logs/job-ID.log       output of the batch script and supervisor        the job
  metrics.jsonl         loss, speed, checkpoints, evaluations            rank 0
  chain.jsonl           the links of its checkpoints, also of deleted ones   rank 0
  routing.json          the router in the last evaluation                rank 0
  tensorboard/          the same for TensorBoard, if asked for        rank 0
  profile/              traces, if asked for                          rank 0
  exports/              for evaluation.command, with its output          rank 0's command
  checkpoints/          step-00000400/ ...                               all ranks
  output/               what a program writes that is not ours           trainer.command
  attempts/000001/
    attempt.json        job, nodes, world size, command                  supervisor
    step.json           process that holds the ranks (srun, or the local launcher)
    step.log            what that process says: which task failed how
    step.exit           its exit code, by rename
    hostfile            the node of each rank, with several nodes        supervisor
    rank-times.json     how long each rank takes for its own work          supervisor
    rendezvous.json     address of rank 0's store, by rename             rank 0, the store server
    store.json          how the next supervisor reaches the store server (0600)   the store server
    ranks/00003.json    why rank 3 ended                                 each rank
    logs/rank-00003.log output of rank 3                                 each rank
    logs/rank-00003.times  when it was how long (run/log_times.py)    each rank
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zslurm.core.errors import ConfigError, NotFound, ZslurmError
from zslurm.core.files import write_atomically
from zslurm.slurm.environment import own_job_id, task_node


def _node_local(path: Path, name: str) -> Path:
    """Return a place in this node's memory that belongs to a directory, and to this user."""
    root = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path("/tmp")
    owner = hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:12]
    return root / f"zslurm-{os.getuid()}-{owner}-{name}"


class _Below:
    """A path in a directory, by its name there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: AttemptDir | RunDir, kind: type[Any]) -> Path:
        return owner.path / self._name


@dataclass(frozen=True)
class AttemptDir:
    """Paths of one attempt (one start of the ranks)."""

    path: Path

    description = _Below("attempt.json")
    """What the attempt was started with: number, nodes, ranks."""
    step_process = _Below("step.json")
    """The process that holds the ranks: srun, or the local launcher."""
    step_log = _Below("step.log")
    """The output of that process."""
    step_exit = _Below("step.exit")
    """The exit code of that process, once it has ended."""
    hostfile = _Below("hostfile")
    """The nodes of the ranks, in order, for srun."""
    rendezvous = _Below("rendezvous.json")
    """The address at which the ranks meet."""
    ranks = _Below("ranks")
    """The directory of the records that ranks leave when they end."""
    logs = _Below("logs")
    """The directory of the ranks' output."""

    rank_times = _Below("rank-times.json")
    """The step work time of each rank, over the last steps."""

    @property
    def number(self) -> int:
        """Number of the attempt, from 1."""
        return int(self.path.name)

    def progress(self, environ: Mapping[str, str]) -> Path:
        """Return the path of the progress of this node's ranks: in its memory, and separate from other runs."""
        node = task_node(environ) or "localhost"
        return _node_local(self.path, f"{self.number}-{node}")

    def rank_end(self, rank: int) -> Path:
        """Return the path of the record that a rank leaves when it ends."""
        return self.ranks / f"{rank:05d}.json"

    @property
    def store_log(self) -> Path:
        """The output of the store server."""
        return self.path / "store.log"

    @property
    def store_control(self) -> Path:
        """The address of the store server for the next supervisor, with a token; readable by its owner only."""
        return self.path / "store.json"

    @property
    def flight(self) -> Path:
        """The directory for dumps of the ranks' flight recorders."""
        return self.path / "flight"

    def flight_dump(self, rank: int) -> Path:
        """Return the path of the dump of a rank's flight recorder; torch appends the rank to what precedes it."""
        return self.flight / f"rank-{rank}"

    def warm_log(self, first: int) -> Path:
        """Return the path of the output of the srun of warm processes that are numbered from `first`."""
        return self.path / f"warm-{first:05d}.log"

    def rank_log(self, rank: int) -> Path:
        """Return the path of the output of a rank."""
        return self.logs / f"rank-{rank:05d}.log"

    def rank_log_times(self, rank: int) -> Path:
        """Return the path of the times of the lines in a rank's output."""
        return self.logs / f"rank-{rank:05d}.times"


@dataclass(frozen=True)
class RunDir:
    """Paths of one run."""

    path: Path

    config = _Below("config.json")
    """The run as it was submitted last, without secrets."""
    submissions = _Below("submissions.jsonl")
    """Submissions and other actions of users, a line each."""
    code = _Below("code.json")
    """The version of the code that the run was submitted with."""
    code_diff = _Below("code.diff")
    """Changes of the checkout that were not committed."""
    code_copy = _Below("code")
    """The copy of the code, if run.snapshot asks for one."""
    gemm_table = _Below("gemm-table.json")
    """The cluster's table of tuned matrix products at submission, if it has one."""
    gemm_csv = _Below("gemm-table.csv")
    """The same as torch's TunableOp reads it; nothing writes to it."""
    kernel_tables = _Below("kernel-tables.json")
    """Which kernels the cluster's measurements found to be the fastest, if it has such."""
    secrets = _Below("secrets.env")
    """The secret variables of the job, only for its owner."""
    script = _Below("script.sh")
    """The script of the job."""
    submitit = _Below("submitit")
    """The directory of the call that submitit pickled."""
    supervisor = _Below("supervisor.json")
    """The supervisor's lease."""
    events = _Below("events.jsonl")
    """Events of the supervisor, a line each."""
    metrics = _Below("metrics.jsonl")
    """Metrics of the training steps, a line each."""
    routing = _Below("routing.json")
    """How the router routed in the last evaluation."""
    logs = _Below("logs")
    """The directory of the jobs' output."""
    checkpoints = _Below("checkpoints")
    """The directory of checkpoints."""
    output = _Below("output")
    """The directory for files of a program that is not ours (trainer.command)."""
    attempts = _Below("attempts")
    """The directory of attempts."""

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.path.name

    helpers = _Below("helpers")
    """The directory of the scripts of helper jobs, and of what these report."""

    def helper_report(self, helper: str) -> Path:
        """Return the path of what a helper job reports when it starts."""
        return self.helpers / f"{helper}.json"

    def job_exit(self, job_id: str) -> Path:
        """Return the path of the exit code that the supervisor leaves for the script of a job."""
        return self.path / f"job-{job_id}.exit"

    def job_log(self, job_id: str) -> Path:
        """Return the path of the output of a job: of its script and of the supervisor."""
        return self.logs / f"job-{job_id}.log"

    @property
    def exists(self) -> bool:
        """True if a run is here, be it only prepared."""
        return self.config.is_file()

    @property
    def submitted(self) -> bool:
        """True if the run was accepted by a launcher at least once."""
        return self.submissions.is_file()

    def warm_socket(self, environ: Mapping[str, str]) -> Path:
        """Return the path of the socket at which a warm program waits for the rank of this number on its node."""
        node, job = task_node(environ) or "localhost", own_job_id(environ) or environ.get("ZSLURM_JOB_ID", "")
        return _node_local(self.path, f"warm-{node.partition('.')[0]}-{job}-{environ['LOCAL_RANK']}")

    def warm_modules(self, environ: Mapping[str, str]) -> Path:
        """Return the path of the names of the modules that the program of this rank has imported."""
        return self.warm_socket(environ).with_suffix(".modules")

    @property
    def warm(self) -> Path:
        """The directory of the output of the step that keeps programs warm."""
        return self.path / "warm"

    def node_memory(self, environ: Mapping[str, str], attempt: int) -> Path:
        """Return the path of what the agents of this node saw when an attempt began: in its memory as well."""
        node = task_node(environ) or "localhost"
        return _node_local(self.path, f"agents-{node}-{attempt}.json")

    def attempt_dirs(self) -> list[AttemptDir]:
        """Return every attempt so far, oldest first."""
        directories = [p for p in self.attempts.glob("[0-9]*") if p.name.isdigit()]
        return [AttemptDir(p) for p in sorted(directories, key=lambda p: int(p.name))]

    def attempt(self, number: int) -> AttemptDir:
        """Paths of attempt `number`."""
        return AttemptDir(self.attempts / f"{number:06d}")

    def create(self, *, group_readable: bool) -> None:
        """Make the directory and its folders, closed to others.

        Raises:
            ConfigError: it cannot be made or is not writable, or holds something that is no run.
        """
        try:
            if not self.exists and self._foreign_files():
                raise ConfigError(
                    f"{self.path}: holds files that are no run's; choose another run.name or runs_dir"
                )
            self.path.mkdir(parents=True, exist_ok=True)
            self.path.chmod(0o750 if group_readable else 0o700)
            for folder in (self.logs, self.submitit, self.attempts, self.checkpoints):
                folder.mkdir(exist_ok=True)
            probe = self.path / f".writable-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise not_writable(error, self.path) from error

    def _foreign_files(self) -> list[str]:
        """Names in the directory that no submission, not even one that broke off, leaves there."""
        if not self.path.is_dir():
            return []
        files = (self.code, self.code_diff, self.config, self.script, self.secrets, self.submissions)
        tables = (self.gemm_table, self.gemm_csv, self.kernel_tables)
        folders = (self.code_copy, self.logs, self.submitit, self.attempts, self.checkpoints, self.output)
        own_names = {path.name for path in (*files, *tables, *folders)}
        return [path.name for path in self.path.iterdir() if path.name not in own_names and path.name[0] != "."]

    def write_text(self, path: Path, text: str) -> None:
        """Write one of the run's files by rename.

        Raises:
            ZslurmError: the file system refused.
        """
        try:
            write_atomically(path, text)
        except OSError as error:
            raise ZslurmError(f"{path}: cannot be written: {error.strerror}") from error


def not_writable(error: OSError, path: Path) -> ConfigError:
    """Return what to say if the file system refused `path`."""
    return ConfigError(
        f"{error.filename or path}: {error.strerror}: the run directory is not writable; "
        "set run.runs_dir to a directory of yours that all nodes share"
    )


def open_run(path: Path) -> RunDir:
    """Return the run at `path`.

    Raises:
        NotFound: there is none.
    """
    run = RunDir(path.absolute())
    if not run.exists:
        raise NotFound(f"{path}: not a run directory (it has no config.json)")
    return run
