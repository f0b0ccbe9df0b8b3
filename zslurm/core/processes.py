"""Processes that outlive their parent, and how they are found again.

A process is known by its pid and when it was started: the same pid may be another process's by now. The time is
the kernel's own, counted from the boot: nothing changes when the clock is set.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from zslurm.checkpoint_tools.lock import process_start
from zslurm.core.files import read_json, read_text, write_atomically

# Runs "$@" and leaves its exit code in a file, by rename. It waits for a line of its parent, which comes once the
# record is written: a process that cannot be found again would train on unseen. The wrapper itself survives the
# signals that are meant for the command, or nothing would be left to write the file. A signal to end that comes
# before the command ends the wrapper, or the command would start and never receive it. The command starts with
# SIGUSR2 ignored, the request to save and stop, and sets its handler when it can save.
_WRAPPER = """
trap : USR1 HUP CONT
trap '' USR2
read -r go || exit 1
trap : TERM INT
out=$1; shift
"$@" < /dev/null; code=$?
echo "$code" > "$out.tmp" && mv "$out.tmp" "$out"
"""


# Of records without `started`: creation times move a little when the clock is set.
_SAME_CREATION_S = 2.0


@dataclass(frozen=True)
class ProcessRecord:
    """A process as another process can find it again.

    Attributes:
        created: when, in UNIX seconds by the clock of that time.
        started: the same in clock ticks since the boot; None if the kernel does not show it.
        boot: the kernel's id of that boot; None with `started`.
    """

    pid: int
    created: float
    host: str
    started: int | None = None
    boot: str | None = None

    @classmethod
    def of(cls, pid: int) -> ProcessRecord:
        """Return the record of a living process.

        Raises:
            psutil.NoSuchProcess: it is gone.
        """
        created, boot = psutil.Process(pid).create_time(), _boot_id()
        return cls(pid, created, socket.gethostname(), _started(pid) if boot else None, boot)

    @classmethod
    def read(cls, path: Path) -> ProcessRecord | None:
        """Return the record in a file; None if there is none."""
        return cls.of_fields(read_json(path) or {})

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> ProcessRecord | None:
        """Return the record among the fields of a JSON object; None if there is none."""
        try:
            record = cls(int(fields["pid"]), float(fields["created"]), str(fields["host"]))
            if not 0 < record.pid < 1 << 31:
                return None
            if fields.get("started") is None or fields.get("boot") is None:
                return record
            return replace(record, started=int(fields["started"]), boot=str(fields["boot"]))
        except (KeyError, OverflowError, TypeError, ValueError):
            return None

    def write(self, path: Path) -> None:
        """Write the record by rename."""
        write_atomically(path, json.dumps(asdict(self)) + "\n")

    @property
    def here(self) -> bool:
        """True if the process is (or was) on this machine."""
        return self.host == socket.gethostname()

    @property
    def alive(self) -> bool:
        """True while the very process runs on this machine; a zombie has ended."""
        return self._status() not in (None, psutil.STATUS_ZOMBIE)

    @property
    def is_stopped(self) -> bool:
        """True if the very process is on this machine, and stopped by SIGSTOP or a debugger."""
        return self._status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)

    def _status(self) -> str | None:
        """Return the process's status as psutil has it; None if it is gone."""
        if not self._same_boot:
            return None
        try:
            process = psutil.Process(self.pid)
            return str(process.status()) if self._is(process) else None
        except psutil.Error:
            return None

    @property
    def owns_group(self) -> bool:
        """True if the process group of this number is the one that the process led, or is empty.

        The number is not given away while anybody is left in the group, so it survives its leader.
        """
        if not self._same_boot:
            return False
        try:
            return self._is(psutil.Process(self.pid))
        except psutil.NoSuchProcess:
            return True

    @property
    def _same_boot(self) -> bool:
        """False if the machine is another one, or was started again since."""
        return self.here and (self.boot is None or _boot_id() in (None, self.boot))

    def _is(self, process: psutil.Process) -> bool:
        """Return whether a process is the recorded one; raise psutil.NoSuchProcess if it is gone."""
        if self.started is None:
            return bool(abs(process.create_time() - self.created) < _SAME_CREATION_S)
        return _started(self.pid) == self.started

    def signal(self, signum: int) -> bool:
        """Send a signal to the process; False if it is gone."""
        if not self.alive:
            return False
        try:
            os.kill(self.pid, signum)
        except ProcessLookupError:
            return False
        return True


@functools.cache
def _boot_id() -> str | None:
    return read_text(Path("/proc/sys/kernel/random/boot_id")) or None


def _started(pid: int) -> int:
    """Return when a process was started, in clock ticks since the boot.

    Raises:
        psutil.NoSuchProcess: it is gone.
    """
    started = process_start(pid)
    if started is None:
        raise psutil.NoSuchProcess(pid)
    return started


def read_stat(process: Path) -> tuple[str, list[str]] | None:
    """Return the name of a process and what /proc/PID/stat has behind it, its state first; None if it is gone.

    The name may hold anything, also spaces and brackets (man 5 proc).
    """
    head, _, remainder = (read_text(process / "stat") or "").rpartition(")")
    fields = remainder.split()
    return (head.partition("(")[2], fields) if fields else None


@dataclass(frozen=True)
class DetachedProcess:
    """A command in a separate session, whose output goes to a file and whose exit code is left in another."""

    record: ProcessRecord
    exit_file: Path

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path,
        record_file: Path,
        exit_file: Path,
    ) -> DetachedProcess:
        """Start `command`; its record is in `record_file` when this returns.

        Raises:
            OSError: the shell cannot be started or a file cannot be written.
        """
        with log.open("ab") as output:
            process = subprocess.Popen(
                ["/bin/sh", "-c", _WRAPPER, "zslurm-step", str(exit_file), *command],
                env=dict(env),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        record = ProcessRecord.of(process.pid)
        record.write(record_file)
        assert process.stdin is not None
        with process.stdin as word:
            word.write(b"go\n")
        return cls(record, exit_file)

    @classmethod
    def adopt(cls, record_file: Path, exit_file: Path) -> DetachedProcess | None:
        """Find a process that another one started; None if none was recorded."""
        record = ProcessRecord.read(record_file)
        return cls(record, exit_file) if record else None

    def poll(self) -> int | None:
        """Return the exit code; None while it runs; 137 if it was killed before it could leave one.

        While the file system does not answer nothing new is known, so it counts as running.
        """
        alive = self.record.alive
        try:
            text = self.exit_file.read_text().strip()
        except FileNotFoundError:
            return None if alive else 128 + signal.SIGKILL
        except OSError:
            return None
        return int(text) if text.isdigit() else 1

    @property
    def left_exit_code(self) -> bool:
        """False while it runs, if it was killed before it could leave one, or if that is unknown."""
        with contextlib.suppress(OSError):
            return self.exit_file.exists()
        return False

    def signal_group(self, signum: int) -> None:
        """Send a signal to the command and everything it started, also to what outlived it."""
        if self.record.owns_group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.record.pid, signum)

    def reap(self) -> None:
        """Collect the exit status if the process is a child of ours, so that no zombie stays."""
        try:
            os.waitpid(self.record.pid, os.WNOHANG)
        except ChildProcessError:
            return
