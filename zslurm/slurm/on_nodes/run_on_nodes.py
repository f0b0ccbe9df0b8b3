"""Ask every node the same question at once: one task per node prints one JSON document.

From a login node this is a short separate job (`srun`, which waits in the queue like any other); inside a job it
is a step next to whatever runs there. What the tasks print comes back through Slurm's own I/O: no port is opened,
no file is shared. A node without a readable answer is an answer too: `NodeAnswer.error` is the reason.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from zslurm.core.errors import SlurmRefused, SlurmUnavailable, ZslurmError
from zslurm.slurm.environment import node_name, scrubbed, step_environment
from zslurm.slurm.hostlist import compress
from zslurm.slurm.on_nodes.message_lines import Joiner, split
from zslurm.slurm.on_nodes.srun_output import failed_nodes, launch_failures, task_failures
from zslurm.slurm.run_command import Retries, SlurmCommands

SETUP_VARIABLE = "ZSLURM_SURVEY_SETUP"
"""Environment variable with shell lines that each node runs first; not on a command line that all can see."""

JOB_PREFIX = "zslurm-nodes-"
"""What the names of these jobs begin with."""

_QUEUED = re.compile(r"srun: job (\d+) queued and waiting for resources")
_STARTED = "has been allocated resources"
_LOOK_S, _END_S = 0.1, 30.0
_MARK = "zslurm-answer"
"""What the part of a line with an answer starts with."""


@dataclass(frozen=True)
class NodeAnswer:
    """The answer of one node.

    Attributes:
        value: the document; None without one.
        error: why there is none, in one line; None with one.
        received: when it came, by this machine's clock.
    """

    node: str
    value: Any
    error: str | None = None
    received: float = 0.0


def beside_ranks(nodes: Sequence[str], name: str) -> list[str]:
    """Return srun's options for a step with one task on each of these nodes of a job, next to what runs there."""
    return [
        f"--job-name={name}", f"--nodelist={compress(nodes)}", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}",
        "--ntasks-per-node=1", "--overlap", "--mem=0", "--cpu-bind=none", "--kill-on-bad-exit=0", "--wait=0",
    ]  # fmt: skip


def answer(value: Any, environ: Mapping[str, str] = os.environ) -> None:
    """Print a node's answer. What the asked module calls, once, at its end."""
    sys.stdout.write("".join(split(_MARK, (node_name(environ),), value)))
    sys.stdout.flush()


def run_on_nodes(
    module: str,
    *arguments: str,
    nodes: Sequence[str] = (),
    count: int | None = None,
    options: Iterable[str] = (),
    job_id: str | None = None,
    setup: Sequence[str] = (),
    timeout_s: float = 120.0,
    environ: Mapping[str, str] = os.environ,
    python: Sequence[str] = (sys.executable,),
    waiting: Callable[[str], None] = lambda job_id: None,
) -> dict[str, NodeAnswer]:
    """Run `python -m MODULE ARGUMENTS` once on each node and collect the answers, by node.

    Args:
        module: a module that calls `answer` once.
        arguments: of the module.
        nodes: on exactly these nodes; those that do not answer are in the result, with the reason.
        count: how many nodes of Slurm's choice, if none are named.
        options: further options of srun (partition, account, GPUs, ...).
        job_id: as a step of this job, which this process runs in; default: as a separate job.
        setup: shell lines that each node runs first (`module load rocm`).
        timeout_s: all is given up after this long, its wait in the queue included.
        environ: the environment to start from.
        python: the words that start Python on a node, such as one inside a container.
        waiting: called again and again with the job's id while it waits in the queue.

    Raises:
        SlurmUnavailable: no srun, or no answer from the controller.
        SlurmRefused: srun could not start anything; its message is passed on.
    """
    program = SlurmCommands(environ).find("srun")
    if program is None:
        raise SlurmUnavailable("srun: not found on PATH; run this on a machine of the Slurm cluster")
    n_nodes = len(nodes) or count or 1
    command = [program, f"--nodes={n_nodes}", f"--ntasks={n_nodes}", "--ntasks-per-node=1", "--cpu-bind=none"]
    name = f"{JOB_PREFIX}{secrets.token_hex(4)}"
    command += ["--no-kill", "--kill-on-bad-exit=0", "--input=none", f"--job-name={name}"]
    command += [f"--nodelist={compress(nodes)}"] if nodes else []
    command += [f"--jobid={job_id}", "--overlap", "--mem=0"] if job_id is not None else []
    shell = ["/bin/bash", "-c", f'eval "${SETUP_VARIABLE}"; exec "$@"', "zslurm-nodes"] if setup else []
    command += [*options, *shell, *python, "-P", "-m", module, *arguments]
    env = dict(scrubbed(environ) if job_id is None else step_environment(environ))
    env |= {SETUP_VARIABLE: "\n".join(setup)} if setup else {}
    deadline, late = time.monotonic() + timeout_s, False
    try:
        # In a new session: Ctrl-C reaches this process, which then ends srun in order.
        with subprocess.Popen(
            command, env=env, text=True, errors="replace", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                out, err = _Listener(process.stdout), _Listener(process.stderr)
                while process.poll() is None and not late:
                    if queued := queued_job(list(err.heard)):
                        waiting(queued)
                    late = time.monotonic() > deadline
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(_LOOK_S)
            finally:
                if end_srun(process) and job_id is None:
                    cancel_named(name, environ)
            out.join()
            err.join()
    except KeyboardInterrupt:
        if job_id is None:  # it may have come while Popen had started srun and had not yet returned it
            cancel_named(name, environ)
        raise
    if late and (queued := queued_job(list(err.heard))):
        raise SlurmRefused(
            f"the nodes could not be asked: job {queued} did not start within {max(1.0, timeout_s):.0f} s"
        )
    return _collect(out, err, nodes, f"no answer within {timeout_s:.3g} s" if late else None, process)


def run_here(
    module: str,
    *arguments: str,
    timeout_s: float = 120.0,
    environ: Mapping[str, str] = os.environ,
    python: Sequence[str] = (sys.executable,),
) -> NodeAnswer:
    """Ask this machine the same, without Slurm; the arguments are as in `run_on_nodes`."""
    this_node = node_name(environ)
    try:
        done = subprocess.run(
            [*python, "-P", "-m", module, *arguments], env=dict(environ), text=True, errors="replace",
            stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return NodeAnswer(this_node, None, f"no answer within {timeout_s:g} s")
    except OSError as error:
        return NodeAnswer(this_node, None, f"{python[0]}: {error.strerror}")
    answers = read_answers((0.0, line) for line in done.stdout.splitlines())
    failure = NodeAnswer(this_node, None, _message(done.stderr) or f"exit code {done.returncode}")
    return next(iter(answers.values()), failure)


class _Listener(threading.Thread):
    """Reads a pipe to its end: `heard` are its lines so far, each with the time at which it came."""

    def __init__(self, pipe: IO[str] | None) -> None:
        super().__init__(daemon=True)
        self._pipe = pipe
        self.heard: list[tuple[float, str]] = []
        self.start()

    def run(self) -> None:
        for line in self._pipe or ():
            self.heard.append((time.time(), line))


def queued_job(heard: Iterable[tuple[float, str]]) -> str | None:
    """Return the job that waits in the queue, if it does."""
    job_id_seen = None
    for _, line in heard:
        match = _QUEUED.search(line)
        job_id_seen = match[1] if match else None if _STARTED in line else job_id_seen
    return job_id_seen


def _collect(
    out: _Listener, err: _Listener, nodes: Sequence[str], late: str | None, process: subprocess.Popen[str]
) -> dict[str, NodeAnswer]:
    """Return the answers, and what is known of nodes without one.

    Raises:
        SlurmUnavailable, SlurmRefused: no node answered.
    """
    answers, text = read_answers(out.heard), "".join(line for _, line in err.heard)
    lost = launch_failures(text) | dict.fromkeys(failed_nodes(text), "Slurm declared it failed")
    if not late:  # or we ended them ourselves
        lost |= {failure.node: f"the question ended badly: {failure.what}" for failure in task_failures(text)}
    missing = late or _message(text) or f"srun ended with {process.returncode}"
    if not answers and not lost and not (late and nodes):
        raise _refusal(missing)
    for node in (*lost, *nodes):
        answers.setdefault(node, NodeAnswer(node, None, lost.get(node, missing)))
    return answers


def end_srun(process: subprocess.Popen[Any]) -> bool:
    """SIGTERM makes srun cancel its job or step; SIGKILL would leave it behind.

    One signal is not enough: srun forgets it while it has asked for a job and does not know its number yet.

    Returns:
        Whether it had not ended by itself.
    """
    if process.poll() is not None:
        return False
    patience = time.monotonic() + _END_S
    while process.poll() is None and time.monotonic() < patience:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)
    if process.poll() is None:
        process.kill()
    return True


def cancel_named(name: str, environ: Mapping[str, str]) -> None:
    """Cancel the job of an srun that was ended: it may have died before it knew that it has one."""
    with suppress(ZslurmError):
        SlurmCommands(environ, timeout_s=10.0, retries=Retries(attempts=2)).run("scancel", f"--name={name}")


def read_answers(heard: Iterable[tuple[float, str]]) -> dict[str, NodeAnswer]:
    """Return the answers that are whole, by node; one came when the last of its lines did."""
    joiner = Joiner(_MARK, words=1)
    answers = {}
    for received, line in heard:
        if (message := joiner.take(line)) is not None:
            (node,), text = message
            with suppress(ValueError, RecursionError):  # a damaged one
                answers[node] = NodeAnswer(node, json.loads(text), received=received)
    return answers


def _message(err: str) -> str:
    """Return what went wrong: if a program called it fatal, its message rather than srun's about its exit code."""
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    fatal = [line for line in lines if line.upper().startswith("FATAL")]
    return "; ".join(dict.fromkeys(fatal or [line for line in lines if "error:" in line] or lines[-1:]))


def _refusal(message: str) -> SlurmRefused | SlurmUnavailable:
    unreachable = ("Unable to contact slurm controller", "Socket timed out", "Could not establish a configuration")
    if any(phrase in message for phrase in unreachable):
        return SlurmUnavailable(f"srun: the Slurm controller does not answer: {message}")
    return SlurmRefused(f"the nodes could not be asked: {message}")
