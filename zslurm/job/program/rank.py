"""`python -m zslurm.job.program.rank RUN_DIR ATTEMPT`: one rank of a run whose trainer is another program.

Sets torchrun's variables, agrees with the other ranks on an address for their rendezvous, starts the command,
follows its progress (program_progress.py), passes a request to save and stop on as the signal that the program
wants, and ends as the program ended. Nothing here needs torch.

The program has a process group of its own. What it starts beyond that, in other sessions, this process adopts, and
ends when the program has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import psutil

from zslurm import progress as protocol
from zslurm.config.load import load_spec
from zslurm.config.spec import RunSpec
from zslurm.config.trainer import PLACEHOLDERS, TrainerSection
from zslurm.core.errors import Exit, ZslurmError
from zslurm.core.files import read_json, write_atomically
from zslurm.core.redact import redact
from zslurm.job.numa_bind import bind
from zslurm.job.own_address import rendezvous_host
from zslurm.job.program.progress import ProgramProgress
from zslurm.job.rank_setup import close_progress, map_environment, open_progress
from zslurm.run.log_times import keep_times
from zslurm.run.run_dir import AttemptDir, RunDir
from zslurm.train.stop import StopRequest

RENDEZVOUS_TIMEOUT_S = 900.0
_POLL_S = 0.1
_PR_SET_CHILD_SUBREAPER = 36
SAFE_PATH = "PYTHONSAFEPATH"
_TAIL = 1 << 16
_TRACEBACK = re.compile(r"^(?:\[rank\d+\]: ?)?Traceback \(most recent call last\):$", re.MULTILINE)
_ERROR = re.compile(
    r"^(?:\[rank\d+\]: ?)?(?P<error>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning)): (?P<message>.*)$"
)


def free_port(host: str) -> int:
    """Return a port that is free on this address now, outside of the kernel's range for outgoing connections."""
    for port in range(29500, 32000):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((socket.gethostbyname(host), port))
            return port
    raise RuntimeError(f"no port from 29500 to 31999 is free on {host}")


def rendezvous(attempt: AttemptDir, environ: MutableMapping[str, str]) -> None:
    """Set MASTER_ADDR and MASTER_PORT: rank 0 chooses them, and publishes them for the others.

    Raises:
        RuntimeError: rank 0 published no address in time, or found no port.
    """
    if environ["RANK"] == "0":
        host = rendezvous_host(environ)
        write_atomically(attempt.rendezvous, json.dumps({"host": host, "port": free_port(host)}) + "\n")
    deadline = time.monotonic() + RENDEZVOUS_TIMEOUT_S
    while (address := read_json(attempt.rendezvous)) is None:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{attempt.rendezvous}: rank 0 published no address in {RENDEZVOUS_TIMEOUT_S:g} s")
        time.sleep(0.05)
        list(attempt.path.iterdir())  # makes an NFS client look again
    environ["MASTER_ADDR"], environ["MASTER_PORT"] = address["host"], str(address["port"])


def program_environment(
    spec: RunSpec, trainer: TrainerSection, run: RunDir, attempt: AttemptDir, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables of the program: torchrun's, zslurm's, and its own (`trainer.env`)."""
    nodes = int(environ["WORLD_SIZE"]) // int(environ["LOCAL_WORLD_SIZE"])
    path = environ.get("PATH", os.defpath)
    own = str(Path(sys.executable).parent)
    # The Python of cluster.venv comes first where one is named; else what is active where the run was submitted.
    path = f"{own}:{path}" if spec.cluster.venv is not None else f"{path}:{own}"
    # Ours keep a user's files out of Python's path; a program finds the modules beside it.
    kept = {name: value for name, value in environ.items() if name != SAFE_PATH or name in spec.cluster.env}
    return {
        **kept,
        "PATH": path,
        "NNODES": str(nodes),
        "NODE_RANK": environ["GROUP_RANK"],
        "ZSLURM_RUN_DIR": str(run.path),
        "ZSLURM_ATTEMPT": str(attempt.number),
        **trainer.env,
    }


def filled(command: tuple[str, ...], environ: Mapping[str, str]) -> list[str]:
    """Return the command with its placeholders replaced."""
    values = {
        "nodes": environ["NNODES"],
        "node_rank": environ["NODE_RANK"],
        "ranks_per_node": environ["ZSLURM_RANKS_PER_NODE"],
        "world_size": environ["WORLD_SIZE"],
        "rank": environ["RANK"],
        "local_rank": environ["LOCAL_RANK"],
        "master_addr": environ["MASTER_ADDR"],
        "master_port": environ["MASTER_PORT"],
        "run_dir": environ["ZSLURM_RUN_DIR"],
        "attempt": environ["ZSLURM_ATTEMPT"],
    }
    name = re.compile(r"\{(" + "|".join(PLACEHOLDERS) + r")\}")
    return [name.sub(lambda found: values[found[1]], word) for word in command]


class Program:
    """The program of one rank, from its start to its end."""

    def __init__(self, trainer: TrainerSection, stop: StopRequest) -> None:
        """Prepare; nothing runs yet."""
        self._trainer, self._stop = trainer, stop
        self.killed_late = False
        """It did not end within trainer.stop_s of the request, and was killed."""

    def run(self, command: list[str], environ: Mapping[str, str], watch: ProgramProgress, records: Path) -> int:
        """Run it; returns its exit code, negative for a signal.

        Raises:
            OSError: it cannot be started.
        """
        words = [shutil.which(command[0], path=environ["PATH"]) or command[0], *command[1:]]
        process = subprocess.Popen(
            words, cwd=self._trainer.directory, env=dict(environ), stdin=subprocess.DEVNULL, process_group=0,
            preexec_fn=_default_signals,
        )  # fmt: skip
        watch.begin(records, process.pid)
        kill_at: float | None = None
        while (code := process.poll()) is None:
            watch.look()
            if self._stop.asked and kill_at is None:
                kill_at = time.monotonic() + self._trainer.stop_s
                self._signal(process.pid, signal.Signals[f"SIG{self._trainer.stop_signal}"])
            elif kill_at is not None and time.monotonic() > kill_at:
                self.killed_late = True
                self._signal(process.pid, signal.SIGKILL)
            time.sleep(_POLL_S)
        watch.close()
        end_descendants()
        return code

    @staticmethod
    def _signal(group: int, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signum)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends (Linux; prctl(2), PR_SET_CHILD_SUBREAPER)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants() -> None:
    """Kill what the program has left behind, also in other sessions."""
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        _, alive = psutil.wait_procs(left, timeout=5.0)
        if alive:  # in uninterruptible sleep: the agents know what to do
            return


def _default_signals() -> None:
    """Give the program the handlers that it expects: srun's shell made us ignore some."""
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_DFL)


def error_in(log: str) -> dict[str, Any]:
    """Return error, message and traceback of the last traceback in a log; nothing where there is none."""
    starts = [found.start() for found in _TRACEBACK.finditer(log)]
    if not starts:
        return {}
    text = log[starts[-1] :]
    found = [match for line in text.splitlines() if (match := _ERROR.match(line))]
    if not found:
        return {}
    error = found[-1]["error"].rpartition(".")[2]
    return {"error": error, "message": redact(found[-1]["message"])[:2000], "traceback": redact(text)[-20000:]}


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def record_end(
    attempt: AttemptDir, environ: Mapping[str, str], code: int, step: int, stop: StopRequest, killed_late: bool
) -> int:
    """Record why the program ended, as far as that is known; returns the exit code of this rank.

    Where it failed without a traceback nothing is recorded: the signatures of its log then show more than its exit
    code, which srun reports.
    """
    rank = int(environ["RANK"])
    body: dict[str, Any] = {
        "rank": rank,
        "node": environ.get("SLURMD_NODENAME", socket.gethostname()),
        "exit_code": code,
        "time": time.time(),
        "step": step,
    }
    if stop.asked:
        # However it ends after the request, it was interrupted: programs exit with 0, a code, or by the signal.
        body["exit_code"] = code = Exit.INTERRUPTED
        if stop.signal_name is not None:
            body["signal"] = stop.signal_name
        if killed_late:
            print("zslurm: the program did not stop in time (trainer.stop_s) and was killed", flush=True)
    elif code != 0:
        found = error_in(_tail(attempt.rank_log(rank)))
        if not found or code < 0:
            return code
        body |= found
    with contextlib.suppress(OSError):
        write_atomically(attempt.rank_end(rank), json.dumps(body) + "\n")
    return code


def run_program(run: RunDir, attempt: AttemptDir, stop: StopRequest, environ: MutableMapping[str, str]) -> int:
    """Run the program of one rank; returns the exit code, negative for a signal.

    Raises:
        ZslurmError: the run's configuration cannot be read.
        OSError: the program cannot be started.
    """
    spec = load_spec(run.config)
    trainer = spec.trainer
    assert trainer is not None
    rank, records = int(environ["RANK"]), attempt.progress(environ)
    environ["ZSLURM_RANKS_PER_NODE"] = str(spec.processes_per_node)
    if bound := bind(environ):
        print(bound, flush=True)
    keep_times(attempt.rank_log(rank), attempt.rank_log_times(rank))
    open_progress(records, rank)
    shown = records / f"shown-{rank:05d}"
    rendezvous(attempt, environ)
    given = program_environment(spec, trainer, run, attempt, environ) | {protocol.VARIABLE: str(shown)}
    adopt_orphans()
    watch, program = ProgramProgress(trainer, run, attempt, rank, shown), Program(trainer, stop)
    try:
        code = program.run(filled(trainer.command, given), given, watch, records)
    finally:
        with contextlib.suppress(OSError):
            shown.unlink(missing_ok=True)
        close_progress(records, rank)
    return record_end(attempt, environ, code, watch.step, stop, program.killed_late)


def main(argv: list[str]) -> int:
    """Run one rank; returns its exit code."""
    if len(argv) != 2 or not argv[1].isdigit():
        print("usage: python -m zslurm.job.program.rank RUN_DIR ATTEMPT", file=sys.stderr)
        return 2
    stop = StopRequest()
    stop.install()
    run = RunDir(Path(argv[0]))
    attempt = run.attempt(int(argv[1]))
    map_environment(os.environ)
    try:
        code = run_program(run, attempt, stop, os.environ)
    except (OSError, RuntimeError, ZslurmError) as error:
        code, message = Exit.USAGE, f"trainer.command cannot be started: {error}"
        print(f"error: {message}", file=sys.stderr, flush=True)
        rank = int(os.environ["RANK"])
        body = {
            "rank": rank,
            "node": os.environ.get("SLURMD_NODENAME", socket.gethostname()),
            "exit_code": code,
            "time": time.time(),
            "step": -1,
            "error": type(error).__name__,
            "message": message,
        }
        with contextlib.suppress(OSError):
            write_atomically(attempt.rank_end(rank), json.dumps(body) + "\n")
    sys.stdout.flush()
    if code < 0:  # end by the same signal: srun reports it, as it would of the program itself
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
