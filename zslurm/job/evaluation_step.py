"""Answer an evaluation on the nodes of the job that this process is in: the ranks as one Slurm step.

    with answers_of_step(request, step) as ask: ...

Requests and answers are files of a folder in the user's state directory, which all nodes share. One rank that
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
from itertools import count
from pathlib import Path

from zslurm.core.errors import SlurmUnavailable, ZslurmError
from zslurm.core.files import read_json, write_atomically
from zslurm.job.evaluation_rank import ANSWERS, LOOK_S, REQUEST, WORK
from zslurm.run.index import state_dir
from zslurm.slurm.commands import SlurmCommands
from zslurm.slurm.environment import step_environment
from zslurm.slurm.on_nodes.run_on_nodes import end_srun
from zslurm.slurm.on_nodes.srun_output import launch_failures, task_failures
from zslurm.train.errors import TrainError
from zslurm.train.evaluation.on_ranks import Failure, Request
from zslurm.train.evaluation.scoring import Answers, Ask, Work

_LAST_FILES_S = 5.0
"""Until a file that a rank of another node has written is to be seen here."""


class OutOfTime(TrainError):
    """The job's time limit was reached."""


@dataclass(frozen=True)
class Step:
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


@contextmanager
def answers_of_step(request: Request, step: Step) -> Iterator[Ask]:
    """Start the ranks, and return what asks all of them.

    Raises:
        SlurmUnavailable: there is no srun.
        TrainError: a rank failed, or the step did not start, here or when it is asked; the others are ended.
        OutOfTime: the job's time is over, likewise.
    """
    with _folder() as folder:
        write_atomically(folder / REQUEST, json.dumps(request.fields()), private=True)
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                _command(step, folder), env=step_environment(os.environ), stdin=subprocess.DEVNULL,
                stdout=output, stderr=output, start_new_session=True, text=True,
            )  # fmt: skip
        numbers = count()

        def ask(work: Work) -> Answers:
            number = next(numbers)
            write_atomically(folder / WORK.format(number=number), json.dumps(work.fields()), private=True)
            answers: Answers = {}
            for rank in range(step.ranks):
                answers |= _received(folder, rank, number, process)
            return answers

        try:
            yield ask
            write_atomically(folder / WORK.format(number=next(numbers)), json.dumps({"end": True}), private=True)
            process.wait()
        finally:
            end_srun(process)


@contextmanager
def _folder() -> Iterator[Path]:
    folder = state_dir() / "tools" / f"eval-{os.environ.get('SLURM_JOB_ID', '')}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, mode=0o700)
    except OSError as error:
        raise ZslurmError(f"{folder}: cannot be made: {error.strerror}; set XDG_STATE_HOME") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _command(step: Step, folder: Path) -> list[str]:
    program = SlurmCommands(os.environ).find("srun")
    if program is None:
        raise SlurmUnavailable("srun: not found on PATH; run this on a machine of the Slurm cluster")
    return [
        program, f"--jobid={os.environ['SLURM_JOB_ID']}", f"--nodes={step.nodes}", f"--ntasks={step.ranks}",
        f"--ntasks-per-node={step.ranks_per_node}", "--overlap", "--mem=0", "--cpu-bind=none",
        "--kill-on-bad-exit=1", "--job-name=zslurm-eval", *step.options,
        sys.executable, "-P", "-m", "zslurm.job.evaluation_rank", str(folder),
    ]  # fmt: skip


def _received(folder: Path, rank: int, number: int, process: subprocess.Popen[str]) -> Answers:
    """Wait for a rank's answers to the requests of that number."""
    path = folder / ANSWERS.format(rank=rank, number=number)
    gone: float | None = None
    while True:
        ended = process.poll() is not None
        list(folder.iterdir())  # makes an NFS client look again, instead of remembering "no such file"
        if (found := read_json(path)) is not None:
            answers = found["answers"]
            return {place: answer if isinstance(answer, str) else tuple(answer) for place, answer in answers}
        _raise_failure(folder)
        if ended:
            gone = gone or time.monotonic()
            if time.monotonic() - gone > _LAST_FILES_S:
                _raise_end(folder)
        time.sleep(LOOK_S)


def _raise_failure(folder: Path) -> None:
    """Raise what a rank wrote of its own failure, if one did."""
    for path in sorted(folder.glob("failure-*.json")):
        found = read_json(path)
        if found is not None:
            raise Failure(found["text"], found["usage"]).error(f"rank {found['rank']} on {found['node']}")


def _raise_end(folder: Path) -> None:
    """Raise why a step is over before all ranks have sent everything, by what srun printed."""
    text = (folder / "output").read_text(errors="replace")
    if "DUE TO TIME LIMIT" in text:
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
    own = [line for line in lines if not line.startswith(("srun:", "slurmstepd:"))]
    return (own or [line for line in lines if "error:" in line] or lines or [""])[-1]
