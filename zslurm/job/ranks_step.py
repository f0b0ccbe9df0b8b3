"""Run a command's ranks on the nodes of the job that this process is in, as one Slurm step.

    with ranks_step(step, "zslurm.job.evaluation_rank", request) as ranks:
        answers = ranks.received(ranks.folder / "rank-00000-00000.json")

Command and ranks write files into a folder in the user's state directory, which all nodes share. One rank that
fails ends the step.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zslurm.cluster.site import load_site
from zslurm.core.errors import SlurmUnavailable, ZslurmError
from zslurm.core.files import read_json, write_atomically
from zslurm.run.index import state_dir
from zslurm.slurm.environment import node_name, own_job_id, step_environment
from zslurm.slurm.on_nodes.run_on_nodes import end_srun
from zslurm.slurm.on_nodes.srun_output import is_of_slurm, launch_failures, reached_time_limit, task_failures
from zslurm.slurm.run_command import SlurmCommands
from zslurm.train.errors import TrainError
from zslurm.train.parallel.local_ranks import Failure

REQUEST = "request.json"
LOOK_S = 0.3
_LAST_FILES_S = 5.0
"""Until a file that a rank of another node has written is to be seen here."""


class OutOfTime(TrainError):
    """The job's time limit was reached."""


@dataclass(frozen=True)
class StepShape:
    """The shape of a step.

    Attributes:
        nodes: of the job.
        ranks_per_node: on each of them.
        options: further ones of srun, such as for GPUs.
    """

    nodes: int
    ranks_per_node: int
    options: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """Return all of them."""
        return self.nodes * self.ranks_per_node


def step_of(nodes: int, ranks: int) -> StepShape:
    """Return a step with `ranks` on each node, and as many GPUs of each node if the profile's nodes have any."""
    gpus = load_site().cluster.gpu_request_of(ranks)
    return StepShape(nodes, ranks, (f"--gpus-per-node={gpus}", "--gpu-bind=none") if gpus else ())


@dataclass(frozen=True)
class RanksStep:
    """Ranks that run.

    Attributes:
        folder: of the files that the command and its ranks write.
        process: srun.
    """

    folder: Path
    process: subprocess.Popen[str]

    def received(self, path: Path) -> dict[str, Any]:
        """Wait for a file of a rank.

        Raises:
            TrainError: a rank failed, or the step is over.
            OutOfTime: the job's time is over.
        """
        gone: float | None = None
        while True:
            ended = self.process.poll() is not None
            list(self.folder.iterdir())  # makes an NFS client look again, instead of remembering "no such file"
            if (content := read_json(path)) is not None:
                return content
            _raise_failure(self.folder)
            if ended:
                gone = gone or time.monotonic()
                if time.monotonic() - gone > _LAST_FILES_S:
                    _raise_end(self.folder)
            time.sleep(LOOK_S)


@contextmanager
def ranks_step(step: StepShape, module: str, request: dict[str, Any]) -> Iterator[RanksStep]:
    """Start the ranks, each as `python -m MODULE FOLDER`; they find `request` in the folder's request.json.

    Raises:
        SlurmUnavailable: there is no srun.
        ZslurmError: the folder cannot be made.
    """
    with _folder() as folder:
        write_atomically(folder / REQUEST, json.dumps(request), private=True)
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                _command(step, module, folder), env=step_environment(os.environ), stdin=subprocess.DEVNULL,
                stdout=output, stderr=output, start_new_session=True, text=True,
            )  # fmt: skip
        try:
            yield RanksStep(folder, process)
            process.wait()
        finally:
            end_srun(process)


def wait_for(path: Path) -> dict[str, Any] | None:
    """Wait for a file that another node writes, and return what it holds; None if its folder is gone."""
    while path.parent.is_dir():
        list(path.parent.iterdir())  # as above
        if (content := read_json(path)) is not None:
            return content
        time.sleep(LOOK_S)
    return None


def write_failure(folder: Path, failure: Failure, rank: int) -> None:
    """Leave why a rank of this node gave up."""
    fields = {**failure._asdict(), "rank": rank, "node": node_name()}
    write_atomically(folder / f"failure-{rank:05}.json", json.dumps(fields), private=True)


@contextmanager
def _folder() -> Iterator[Path]:
    folder = state_dir() / "tools" / f"ranks-{own_job_id() or ''}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, mode=0o700)
    except OSError as error:
        raise ZslurmError(f"{folder}: cannot be made: {error.strerror}; set XDG_STATE_HOME") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _command(step: StepShape, module: str, folder: Path) -> list[str]:
    program = SlurmCommands(os.environ).find("srun")
    if program is None:
        raise SlurmUnavailable("srun: not found on PATH; run this on a machine of the Slurm cluster")
    return [
        program, f"--jobid={own_job_id()}", f"--nodes={step.nodes}", f"--ntasks={step.ranks}",
        f"--ntasks-per-node={step.ranks_per_node}", "--overlap", "--mem=0", "--cpu-bind=none",
        "--kill-on-bad-exit=1", f"--job-name={module}", *step.options,
        sys.executable, "-P", "-m", module, str(folder),
    ]  # fmt: skip


def _raise_failure(folder: Path) -> None:
    """Raise what a rank wrote of its own failure, if one did."""
    for path in sorted(folder.glob("failure-*.json")):
        content = read_json(path)
        if content is not None:
            raise Failure(content["text"], content["usage"]).error(f"rank {content['rank']} on {content['node']}")


def _raise_end(folder: Path) -> None:
    """Raise why a step is over before all ranks have sent everything, by what srun printed."""
    text = (folder / "output").read_text(errors="replace")
    if reached_time_limit(text):
        raise OutOfTime("the job's time limit was reached")
    if failures := task_failures(text):
        first = failures[0]
        ranks = ", ".join(map(str, first.ranks))
        last = _last_words(text)
        why = f": {last}" if last and first.exit_code is not None else ""
        raise TrainError(f"rank {ranks} on {first.node}: {first.what}{why or '; is there memory for all ranks?'}")
    for node, reason in launch_failures(text).items():
        raise TrainError(f"{node}: {reason}")
    raise TrainError(f"the ranks ended: {_last_words(text) or 'srun printed no reason'}")


def _last_words(text: str) -> str:
    """Return the last line of an error, of a program before srun's own."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    own_lines = [line for line in lines if not is_of_slurm(line)]
    return (own_lines or [line for line in lines if "error:" in line] or lines or [""])[-1]
