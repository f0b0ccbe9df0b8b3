"""Run a command on the nodes of a run that is running, next to its ranks: a Slurm step, no ssh.

One task on each node, as `srun --overlap` gives it: the job's cores, memory and (from Slurm 22.05 on) GPUs are
shared with the ranks, which notice nothing but the load. Each line of output comes with its node's name.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import IO

from zslurm.core.errors import ConfigError, NotFound, SlurmUnavailable, ZslurmError
from zslurm.run.run_dir import RunDir
from zslurm.run.state.run_state import look
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.environment import NODE_VARIABLE, scrubbed
from zslurm.slurm.hostlist import compress, expand
from zslurm.slurm.on_nodes.run_on_nodes import beside_ranks
from zslurm.slurm.run_command import SlurmCommands
from zslurm.slurm.version import shares_gpus

# What each task prints first: srun labels lines with the task's number, and only the task knows its node.
_HELLO = "zslurm-exec-node "
_SAY_HELLO = f'echo "{_HELLO}${NODE_VARIABLE}"; echo "{_HELLO}${NODE_VARIABLE}" >&2; exec "$@"'
_LABELLED = re.compile(rb"\s*(\d+): (.*\n?)", re.DOTALL)


def exec_on_nodes(run: RunDir, command: Sequence[str], nodes: str | None = None) -> int:
    """Run `command` once on each node of a run's job; returns the exit code of the worst.

    Args:
        run: the run; it must be running on Slurm.
        command: program and arguments; no shell reads them.
        nodes: a hostlist, for only these nodes.

    Raises:
        NotFound: the job does not have such a node.
        ConfigError: it is a local run.
        ZslurmError: it is not running.
        SlurmUnavailable: there is no srun here, or Slurm does not answer.
    """
    job_id, on = _where(run, nodes)
    program = SlurmCommands().find("srun")
    if program is None:
        raise SlurmUnavailable("srun: not found on PATH; run this on a machine of the Slurm cluster")
    argv = [
        program,
        f"--jobid={job_id}",
        *beside_ranks(on, "zslurm-exec"),
        "--input=none",
        "--label",
        "--unbuffered",
    ]
    # Where --overlap does not share GPUs, the step would wait for the ranks to end.
    argv += [] if shares_gpus(SlurmClient().version()) else ["--gres=none"]
    return _run([*argv, "/bin/sh", "-c", _SAY_HELLO, "zslurm-exec", *command], scrubbed(os.environ))


def _where(run: RunDir, nodes: str | None) -> tuple[str, list[str]]:
    """Return the job of a running run, and the nodes that are meant."""
    state = look(run)
    if state.state == "unknown":
        raise SlurmUnavailable(f"{run.name}: {state.reason}")
    if state.state != "running" or state.job_id is None or state.nodes is None:
        raise ZslurmError(f"{run.name}: it is {state.state}; a command can run with it only while it is running")
    if state.launcher != "slurm":
        raise ConfigError(f"{run.name}: it runs on this machine: run the command itself")
    nodes_of_run = expand(state.nodes)
    chosen = nodes_of_run if nodes is None else list(dict.fromkeys(expand(nodes)))
    if missing := [name for name in chosen if name not in nodes_of_run]:
        raise NotFound(f"--node: job {state.job_id} runs on {state.nodes}, not on {compress(missing)}")
    if not chosen:
        raise ConfigError("--node: no node is named")
    return state.job_id, chosen


def _run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run srun in a new session; Ctrl-C reaches it as SIGTERM, with which it ends its tasks."""
    names: dict[bytes, bytes] = {}
    with subprocess.Popen(
        argv, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:  # fmt: skip

        def stop(_signum: int, _frame: FrameType | None) -> None:
            process.terminate()

        before = {signum: signal.signal(signum, stop) for signum in (signal.SIGINT, signal.SIGTERM)}
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            errors = threading.Thread(target=_relabel, args=(process.stderr, sys.stderr.buffer, names))
            errors.start()
            _relabel(process.stdout, sys.stdout.buffer, names)
            errors.join()
            code = process.wait()
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)
    return 128 - code if code < 0 else code


def _relabel(source: IO[bytes], target: IO[bytes], names: dict[bytes, bytes]) -> None:
    """Pass lines on, with the node's name in place of the task's number; srun's own messages pass as they are."""
    hello = _HELLO.encode()
    for line in source:
        match = _LABELLED.fullmatch(line)
        if match is None:
            target.write(line)
        elif match[2].startswith(hello):
            names[match[1]] = match[2].removeprefix(hello).strip()
            continue
        else:
            target.write(names.get(match[1], match[1]) + b": " + match[2])
        target.flush()
