"""`python -m zslurm.job.program.warm_keeper RUN_DIR`: keeps a warm program ready for one rank of a node.

One of them runs for each rank of a node, in a step that outlives the attempts (warm_step.py). It is the parent of
a process that has imported the program's modules (warm_program.py). The rank of the next attempt connects, sends
what its program is to be started with, and learns how it ends:

    rank      {"arguments", "environ"}, its output    start the warm program with them
    keeper    {"pid"}, or {"none": why}               it runs; or there is none, and the rank starts the program
    rank      {"steps": true}                         the program makes steps: prepare the next one
    keeper    {"code", "left"}                        how the program ended, and what it left behind

A rank whose connection ends has ended itself: its program is killed. The keeper ends when the run is over in this
job, or by SIGTERM while no program runs.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from zslurm import progress as protocol
from zslurm.config.load import load_spec
from zslurm.config.python_call import PythonCall, python_call
from zslurm.core.errors import ZslurmError
from zslurm.job.numa_bind import bind
from zslurm.job.program import warm_program
from zslurm.job.program.environment import filled, program_environment
from zslurm.job.program.process import adopt_orphans, end_descendants, prepare_child
from zslurm.job.program.warm_program import receive, send
from zslurm.job.rank_setup import set_up
from zslurm.run.run_dir import RunDir
from zslurm.slurm.environment import own_job_id

_LOOK_S = 0.05
_OVER_EVERY_S = 2.0
_NO_ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""What the program's variables have before a rank has an address: all are replaced when it starts."""


@dataclass
class _Warm:
    """A process that imports, or waits."""

    process: subprocess.Popen[bytes]
    channel: socket.socket
    ready: bool = False


@dataclass
class _Running:
    """A program that was handed to a rank; the rank's connection."""

    process: subprocess.Popen[bytes]
    rank: socket.socket


@dataclass
class Keeper:
    """Hands warm programs to the ranks that connect.

    Attributes:
        listener: where ranks connect.
        start: starts a process that imports; it gets the other end of its channel.
    """

    listener: socket.socket
    start: Callable[[socket.socket], subprocess.Popen[bytes]]
    _warm: _Warm | None = None
    _ranks: set[socket.socket] = field(default_factory=set)
    _asking: tuple[socket.socket, dict[str, Any], list[int]] | None = None
    _running: list[_Running] = field(default_factory=list)

    @property
    def is_idle(self) -> bool:
        """Whether no program runs under it."""
        return not self._running

    def look(self) -> None:
        """Take what has come, wait a moment if nothing has."""
        channels = [] if self._warm is None or self._warm.ready else [self._warm.channel]
        readable, _, _ = select.select([self.listener, *self._ranks, *channels], [], [], _LOOK_S)
        for ready in readable:
            if ready is self.listener:
                self._accept()
            elif ready in self._ranks:
                self._hear(ready)
            elif self._warm is not None and ready is self._warm.channel:
                self._warm.ready = receive(ready) is not None
                if not self._warm.ready:
                    self._warm.process.wait()
        self._look_at_warm()
        self._look_at_running()

    def close(self) -> None:
        """End what waits."""
        self.listener.close()
        if self._warm is not None:
            self._warm.channel.close()
            self._warm.process.kill()
            self._warm.process.wait()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            rank, _ = self.listener.accept()
            _pid, uid, _gid = struct.unpack("3i", rank.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid == os.getuid():
                self._ranks.add(rank)
            else:
                rank.close()

    def _hear(self, rank: socket.socket) -> None:
        received = receive(rank)
        if received is None:
            self._forget(rank)
            return
        message, descriptors = received
        if "arguments" in message:
            if self._warm is None:
                _answer(rank, {"none": ""})
                _close_all(descriptors)
            else:
                self._asking = (rank, message, descriptors)
        elif "steps" in message and self._warm is None:
            channel, far_end = socket.socketpair()
            with far_end:
                self._warm = _Warm(self.start(far_end), channel)

    def _forget(self, rank: socket.socket) -> None:
        """Kill the program of a rank that has ended."""
        self._ranks.discard(rank)
        rank.close()
        for running in self._running:
            if running.rank is rank:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(running.process.pid, signal.SIGKILL)
        if self._asking is not None and self._asking[0] is rank:
            _close_all(self._asking[2])
            self._asking = None

    def _look_at_warm(self) -> None:
        warm = self._warm
        if warm is None:
            return
        if (code := warm.process.poll()) is not None:
            print(f"the process that imports the program's modules ended with {code}", flush=True)
            warm.channel.close()
            self._warm = None
            self._refuse("the imports of its program failed, as RUN_DIR/warm shows")
        elif warm.ready and self._asking is not None:
            (rank, message, descriptors), self._asking = self._asking, None
            try:
                send(warm.channel, message, descriptors)
            except OSError:  # it has died; the next look finds it
                self._asking = (rank, message, descriptors)
                return
            _close_all(descriptors)
            warm.channel.close()
            self._warm = None
            self._running.append(_Running(warm.process, rank))
            _answer(rank, {"pid": warm.process.pid})

    def _refuse(self, why: str) -> None:
        if self._asking is not None:
            _answer(self._asking[0], {"none": why})
            _close_all(self._asking[2])
            self._asking = None

    def _look_at_running(self) -> None:
        for running in [running for running in self._running if running.process.poll() is not None]:
            self._running.remove(running)
            kept = [program.process.pid for program in self._running]
            names = end_descendants(kept if self._warm is None else [*kept, self._warm.process.pid])
            _answer(running.rank, {"code": running.process.returncode, "left": names})


def _answer(rank: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # it has ended
        send(rank, message)


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def warm_command(call: PythonCall, channel: int, environ: Mapping[str, str]) -> list[str]:
    """Return the command of a process that prepares a program with these variables, and waits at a descriptor."""
    python = shutil.which(call.interpreter[0], path=environ["PATH"]) or call.interpreter[0]
    file = str(Path(warm_program.__file__).absolute())
    modules = environ[protocol.MODULES_VARIABLE]
    return [python, *call.interpreter[1:], file, str(channel), modules, call.kind, call.target]


def main(argv: Sequence[str]) -> int:
    """Keep a program warm until the run is over in this job; returns the exit code."""
    if len(argv) != 1:
        print("usage: python -m zslurm.job.program.warm_keeper RUN_DIR", file=sys.stderr)
        return 2
    run = RunDir(Path(argv[0]).absolute())
    asked: list[int] = []

    def ask(signum: int, _frame: FrameType | None) -> None:
        asked.append(signum)

    signal.signal(signal.SIGTERM, ask)
    environ = os.environ
    set_up(environ)
    try:
        trainer = load_spec(run.config).trainer
        call = None if trainer is None else python_call(trainer.command)
        if trainer is None or call is None:
            raise ZslurmError(f"{run.config}: trainer.command is no Python program")
        if bound := bind(environ):
            print(bound, flush=True)
        spec, attempt = load_spec(run.config), run.attempt(0)
        variables = program_environment(
            spec, trainer, run, attempt, {**environ, **_NO_ADDRESS}, attempt.progress(environ)
        )
        call = python_call(filled(trainer.command, variables)) or call
        path = run.warm_socket(environ)
        remove_stale(path)
        with socket.socket(socket.AF_UNIX) as listener:
            draft = path.with_suffix(".new")  # a socket of this name that refuses connections has no keeper
            draft.unlink(missing_ok=True)
            listener.bind(str(draft))
            draft.chmod(0o600)
            listener.listen(4)
            draft.rename(path)

            def start(channel: socket.socket) -> subprocess.Popen[bytes]:
                return subprocess.Popen(
                    warm_command(call, channel.fileno(), variables), cwd=trainer.directory, env=variables,
                    stdin=subprocess.DEVNULL, process_group=0, pass_fds=[channel.fileno()],
                    preexec_fn=lambda: prepare_child(trainer.stop_signal),
                )  # fmt: skip

            _keep(Keeper(listener, start), run, environ, asked)
            path.unlink(missing_ok=True)
            run.warm_modules(environ).unlink(missing_ok=True)
    except (OSError, ZslurmError) as error:
        print(f"error: no program is kept warm: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def remove_stale(path: Path) -> None:
    """Remove what keepers of this user left in the directory of a socket: a job's end kills them.

    Args:
        path: the socket of this run's keeper.
    """
    for left_socket in path.parent.glob(f"zslurm-{os.getuid()}-*-warm-*"):
        if left_socket.suffix or not left_socket.is_socket():
            continue
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(left_socket))
            except ConnectionRefusedError:
                left_socket.unlink(missing_ok=True)
                left_socket.with_suffix(".modules").unlink(missing_ok=True)
            except OSError:  # it is gone, or another user's: nothing of ours is left there
                continue


def _keep(keeper: Keeper, run: RunDir, environ: Mapping[str, str], asked: Sequence[int]) -> None:
    """Serve until the run is over in this job, or a signal comes while no program runs."""
    adopt_orphans()
    over = run.job_exit(own_job_id(environ) or environ.get("ZSLURM_JOB_ID", ""))
    before, look_at = _written(over), time.monotonic()  # an earlier start of the job may have left one
    while True:
        keeper.look()
        if asked and keeper.is_idle:
            break
        if time.monotonic() > look_at:
            look_at = time.monotonic() + _OVER_EVERY_S
            if _written(over) != before or not run.config.exists():
                break
    keeper.close()
    with contextlib.suppress(psutil.Error):
        end_descendants()


def _written(path: Path) -> int | None:
    """Return when a file was written, in nanoseconds; None without it."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
