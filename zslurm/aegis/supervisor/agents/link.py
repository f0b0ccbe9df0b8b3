"""One srun with an agent on each of its nodes, or one agent as a child of this process, and the pipes to it.

Nothing here blocks its caller: two threads read what comes, and a line that the other side does not take is
dropped. srun gives each line of its standard input to every task; if one node has died unnoticed, srun may stop
reading once too much waits for that node. `stuck_for` measures it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from zslurm.slurm.on_nodes.srun_output import failed_nodes, launch_failures, task_failures

_LONGEST_LINE = 65536
_BLOCK = 65536
# A thousand agents report a thousand times a second: to wake up for each would cost more than to read them.
_GATHER_S = 0.05
_KEPT_ERRORS = 8192


class AgentLink:
    """The agents that one command started."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        nodes: Sequence[str],
        name: str,
        heard: Callable[[AgentLink, bytes], None],
    ) -> None:
        """Start the command, in a new session.

        Args:
            command: srun and its agents, or one agent.
            env: its whole environment.
            nodes: those on which agents start.
            name: of the Slurm step.
            heard: called with every line of output, in a thread of this link.

        Raises:
            OSError: it cannot be started.
        """
        self.nodes, self.name = tuple(nodes), name
        self.started = time.monotonic()
        self.has_reported = False
        """Whether an agent of this link has reported; the reader of the lines sets it."""
        self._heard = heard
        self._errors = b""
        self._taken = self.started
        self._writing = threading.Lock()
        self._process = subprocess.Popen(
            list(command), env=dict(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._stdin = self._process.stdin.fileno()
        os.set_blocking(self._stdin, False)
        self._readers = [
            threading.Thread(target=self._read, args=(pipe, take), daemon=True, name=f"{name}-{what}")
            for pipe, take, what in (
                (self._process.stdout, self._take_line, "out"),
                (self._process.stderr, self._take_error_line, "err"),
            )
        ]
        for reader in self._readers:
            reader.start()

    # --- what comes -----------------------------------------------------------------------------------------

    def _read(self, pipe: IO[bytes], take: Callable[[bytes], None]) -> None:
        remainder = b""
        while block := os.read(pipe.fileno(), _BLOCK):
            *lines, remainder = (remainder + block).split(b"\n")
            for line in lines:
                take(line)
            if len(remainder) > _LONGEST_LINE:
                remainder = b""
            if len(block) < _BLOCK // 2:
                time.sleep(_GATHER_S)
        take(remainder)

    def _take_line(self, line: bytes) -> None:
        self._heard(self, line)

    def _take_error_line(self, line: bytes) -> None:
        self._errors = (self._errors + line + b"\n")[-_KEPT_ERRORS:]

    def error_output(self) -> str:
        """Return the last of what srun and the agents wrote to their standard error."""
        return self._errors.decode(errors="replace")

    def last_line(self) -> str:
        """Return the last line of it that is not empty."""
        lines = [" ".join(line.split()) for line in self.error_output().splitlines() if line.strip()]
        return lines[-1][-300:] if lines else ""

    def ended(self) -> dict[str, str]:
        """Return the nodes whose agent has ended, or never was, with srun's reason."""
        text = self.error_output()
        if self._process.poll() is not None:
            reason = self.last_line() or f"exit code {self._process.returncode}"
            gone = dict.fromkeys(self.nodes, f"the agents' step ended: {reason}")
        else:
            gone = {}
        gone |= {failure.node: f"the agent ended: {failure.what}" for failure in task_failures(text)}
        return gone | self.without_node()

    def without_node(self) -> dict[str, str]:
        """Return the nodes that Slurm cannot reach or has declared dead, with its message."""
        text = self.error_output()
        failures = launch_failures(text) | dict.fromkeys(failed_nodes(text), "Slurm declared it failed")
        if len(self.nodes) == 1 and "Required node not available" in text:
            failures[self.nodes[0]] = "Slurm: required node not available (down, drained or reserved)"
        return failures

    @property
    def refused(self) -> bool:
        """Whether the command ended and names no node: Slurm started nothing, perhaps because of one."""
        return self.over and not task_failures(self.error_output()) and not self.without_node()

    @property
    def pid(self) -> int:
        """The process of the command, which leads its own group."""
        return self._process.pid

    @property
    def over(self) -> bool:
        """Whether the command has ended."""
        return self._process.poll() is not None

    # --- what goes ------------------------------------------------------------------------------------------

    def write(self, line: str, wait_s: float = 0.0) -> bool:
        """Give every agent a line; return false if it was not taken in time."""
        data = line.encode()
        deadline = time.monotonic() + wait_s
        with self._writing:
            while data:
                try:
                    data = data[os.write(self._stdin, data) :]
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        return False
                    time.sleep(0.02)
                except (OSError, ValueError):
                    return False
        return True

    def stuck_for(self, now: float) -> float:
        """Return seconds since all that was written had been taken; 0 when it is over.

        Ask more often than you write.
        """
        try:
            waiting = struct.unpack("i", fcntl.ioctl(self._stdin, termios.FIONREAD, b"\0" * 4))[0]
        except (OSError, ValueError):
            return 0.0
        if not waiting:
            self._taken = now
        return now - self._taken

    def excuse(self, seconds: float, now: float) -> None:
        """Count a time in which this process itself was stopped neither as the agents' start nor as stuck."""
        self.started, self._taken = min(now, self.started + seconds), min(now, self._taken + seconds)

    # --- its end --------------------------------------------------------------------------------------------

    def close_input(self) -> None:
        """Close the standard input of the command: nothing more will come."""
        assert self._process.stdin
        with self._writing, contextlib.suppress(OSError, ValueError):
            self._stdin = -1  # the number may soon be another file's
            self._process.stdin.close()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the command's end; returns false if it did not come."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """End srun, or the local agent, now. Agents on other nodes are not its children: Slurm ends them."""
        self.close_input()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.wait(5.0)
        for reader in self._readers:
            reader.join(1.0)
