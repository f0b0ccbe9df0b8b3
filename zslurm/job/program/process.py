"""The process of one rank's program, from its start to its end, and what it leaves behind.

The program has a separate process group. What it starts beyond that, in other sessions, this process adopts, and
ends when the program has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import psutil

from zslurm.checkpoint_tools.quantities import counted
from zslurm.config.trainer import TrainerSection
from zslurm.job.program.progress import ProgramProgress
from zslurm.job.program.recovery import ProgramRecovery
from zslurm.job.program.warm_rank import WarmProcess, WarmSlot
from zslurm.slurm.environment import step_id
from zslurm.train.stop import StopRequest

_POLL_S = 0.1
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_MOST_NAMED = 5


class Program:
    """The program of one rank."""

    def __init__(
        self,
        trainer: TrainerSection,
        stop: StopRequest,
        pass_on: Callable[[], object],
        warm: Path | None = None,
    ) -> None:
        """Prepare; nothing runs yet.

        Args:
            trainer: what is run, and how it is asked to stop.
            stop: the request to stop.
            pass_on: called once if a signal asked only this rank: the other ranks are to stop too.
            warm: the socket at which a process that has imported the program's modules waits.
        """
        self._trainer, self._stop, self._pass_on, self._warm_socket = trainer, stop, pass_on, warm
        self._warm: WarmSlot | None = None
        self.killed_late = False
        """It did not end within trainer.stop_s of the request, and was killed."""
        self.left_behind: list[str] = []
        """Names of the processes that it left behind and that were ended."""

    def run(
        self,
        command: list[str],
        environ: Mapping[str, str],
        watch: ProgramProgress,
        records: Path,
        recovery: ProgramRecovery | None = None,
    ) -> int:
        """Run it; returns its exit code, negative for a signal.

        Args:
            command: the program and its arguments.
            environ: its variables.
            watch: follows its progress.
            records: the directory of the rank's record.
            recovery: shows when the program has to meet the other ranks again.

        Raises:
            OSError: it cannot be started.
        """
        self._warm = None if self._warm_socket is None else WarmSlot(self._warm_socket)
        process = self._start(command, environ)
        watch.begin(records, process.pid)
        first_step = watch.step  # -1, or the last one of a program that was lost
        kill_at: float | None = None
        while (code := process.poll()) is None:
            watch.look()
            if self._warm is not None:
                self._warm.look(stepped=watch.step != first_step)
            if recovery is not None and recovery.is_new():
                watch.set_up_again()
            if recovery is not None and recovery.is_overdue():
                self._signal(process.pid, signal.SIGKILL)
            if self._stop.asked and kill_at is None:
                kill_at = time.monotonic() + self._trainer.stop_s
                stop_signal = signal.Signals[f"SIG{self._trainer.stop_signal}"]
                # Slurm has sent a signal that came from it to the program too: many take a second one as urgent.
                if self._stop.signum != stop_signal or step_id(environ) is None:
                    self._signal(process.pid, stop_signal)
                if self._stop.signum is not None:
                    self._pass_on()
            elif kill_at is not None and time.monotonic() > kill_at:
                self.killed_late = True
                self._signal(process.pid, signal.SIGKILL)
            time.sleep(_POLL_S)
        watch.close()
        if self._warm is not None:
            self._warm.close()
        self.left_behind = process.left_behind if isinstance(process, WarmProcess) else end_descendants()
        return code

    def _start(self, command: list[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes] | WarmProcess:
        """Start the program: in a process that has imported its modules, if one waits."""
        if self._warm is not None and (warm := self._warm.take(command, environ, lambda: self._stop.asked)):
            return warm
        words = [shutil.which(command[0], path=environ["PATH"]) or command[0], *command[1:]]
        return subprocess.Popen(
            words, cwd=self._trainer.directory, env=dict(environ), stdin=subprocess.DEVNULL, process_group=0,
            preexec_fn=lambda: prepare_child(self._trainer.stop_signal),
        )  # fmt: skip

    @staticmethod
    def _signal(group: int, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signum)

    def notes(self, code: int) -> list[str]:
        """Return what the rank's log has to say about the end of the program, a line each."""
        lines = []
        if self.killed_late:
            limit = f"{self._trainer.stop_s:g} s"
            lines.append(f"the program did not stop within {limit} of the request (trainer.stop_s) and was killed")
        if self.left_behind:
            count, named = len(self.left_behind), ", ".join(self.left_behind[:_MOST_NAMED])
            more = ", ..." if count > _MOST_NAMED else ""
            why = "; a program that forks away ends with its first process" if code == 0 else ""
            count_left = counted(count, "process", many="processes")
            lines.append(f"the program left {count_left} behind, now killed: {named}{more}{why}")
        return lines


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends (Linux; prctl(2), PR_SET_CHILD_SUBREAPER)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(kept: Collection[int] = ()) -> list[str]:
    """Kill what the program has left behind, also in other sessions; returns the names of these processes.

    Children whose numbers are among `kept` stay, with their descendants.
    """
    names: dict[int, str] = {}
    while children := _descendants(kept):
        for process in children:
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    names.setdefault(process.pid, "".join(c if c.isprintable() else "?" for c in process.name()))
                process.kill()
        _, alive = psutil.wait_procs(children, timeout=5.0)
        if alive:  # in uninterruptible sleep: the agents know what to do
            break
    return list(names.values())


def _descendants(kept: Collection[int]) -> list[psutil.Process]:
    """Return all descendants of this process, without some of its children and theirs."""
    children = [child for child in psutil.Process().children() if child.pid not in kept]
    descendants = list(children)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            descendants += child.children(recursive=True)
    return descendants


_LIBC = ctypes.CDLL(None)


def prepare_child(stop_signal: str) -> None:
    """Give the program the handlers that it expects, and let it end with its rank.

    srun's shell made us ignore some signals. SIGUSR1 and SIGUSR2 stay ignored, unless one is the program's own
    signal to stop: Slurm sends what it is asked to send to every process of the step, and both would end the
    program.
    """
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        ignored = signum in (signal.SIGUSR1, signal.SIGUSR2) and signum.name != f"SIG{stop_signal}"
        signal.signal(signum, signal.SIG_IGN if ignored else signal.SIG_DFL)
    with contextlib.suppress(OSError, AttributeError):
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
