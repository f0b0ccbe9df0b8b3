"""Run one Slurm command: clean environment, one timeout, bounded retries, and errors in one clear line.

slurmctld is shared by everyone and is sometimes slow. A request that surely did not reach it is sent again with
growing pauses; one that may have been carried out is repeated only if doing it twice is harmless.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass

from zslurm.checkpoint_tools.quantities import counted
from zslurm.core.errors import NotFound, SlurmRefused, SlurmUnavailable
from zslurm.slurm.environment import scrubbed

# Slurm's messages (src/common/slurm_errno.c and the commands). The request did not arrive:
_UNREACHED = (
    "Unable to contact slurm controller",
    "Unexpected message received",  # of scontrol requeue and suspend where the controller is away (22.05)
    "Slurm backup controller in standby mode",
    "Connection refused",
    "Unable to connect to database",
    "Resource temporarily unavailable",
    "Rate limit exceeded",  # since 23.02, where the site sets rl_enable
    "Connection timed out establishing",  # since 24.11
)
# It may have arrived:
_UNANSWERED = (
    "Socket timed out",
    "Zero Bytes were transmitted",
    "Transport endpoint is not connected",
    "Connection timed out writing",
    "Connection timed out reading",
)
_NO_CLUSTER = ("Could not establish a configuration source", "Unable to process configuration file")
_NEVER_AVAILABLE = "Requested node configuration is not available"
"""Also for more nodes than the partition has, which versions before 24.11 put into the queue."""
_NEVER_AVAILABLE_ADVICE = (
    ": the partition does not have so many nodes with these GPUs, CPUs, memory and features; ask for fewer, or "
    "for another partition (`sinfo` lists them)"
)
UNKNOWN_JOB = "Invalid job id specified"
HIDDEN = "Access/permission denied"
"""Slurm's refusal to show what the site's PrivateData keeps from users."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retries:
    """How often a command is repeated, and after which pauses."""

    attempts: int = 4
    first_pause_s: float = 1.0
    """The pause doubles with every attempt."""

    def pause_after(self, attempt: int) -> float:
        """Return the seconds to wait after a failed attempt, counted from 0."""
        return self.first_pause_s * 2.0**attempt


class _Unanswered(Exception):
    """One attempt failed in a way that another may succeed after."""


class SlurmCommands:
    """Runs squeue, scontrol and the others for one environment."""

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 30.0,
        *,
        retries: Retries | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            environment: has PATH and SLURM_CONF; this process's own if not given.
            timeout_s: one attempt is given up after this long.
            retries: how often to try again.
        """
        environment = os.environ if environment is None else environment
        # Slurm prints local times without their zone.
        fixed = {"TZ": "UTC", "LC_ALL": "C.UTF-8", "SLURM_TIME_FORMAT": "standard"}
        self._environment = scrubbed(environment) | fixed
        self._timeout_s = timeout_s
        self._retries = retries or Retries()

    def find(self, program: str) -> str | None:
        """Return the path of a program, or None."""
        return shutil.which(program, path=self._environment.get("PATH", os.defpath))

    def run(self, program: str, *arguments: str, repeatable: bool = True) -> subprocess.CompletedProcess[str]:
        """Run one command to success.

        Raises:
            SlurmUnavailable: it is not installed, no cluster is configured, or the controller does not answer.
                If it is not `repeatable`, doing it twice would do harm, it may have been done.
            NotFound: Slurm does not know the job.
            SlurmRefused: Slurm refused; its message is in the error's.
        """
        if (path := self.find(program)) is None:
            raise SlurmUnavailable(
                f"{program}: not found on PATH; run this on a machine of the Slurm cluster, or load its module"
            )
        attempt = 1
        while True:
            try:
                return self._run_once(program, [path, *arguments], repeatable=repeatable)
            except _Unanswered as error:
                if attempt >= self._retries.attempts:
                    tries = "" if attempt == 1 else f" ({counted(attempt, 'try')})"
                    raise SlurmUnavailable(f"the Slurm controller does not answer{tries}: {error}") from None
                _LOG.debug("the Slurm controller does not answer, trying again: %s", error)
                time.sleep(self._retries.pause_after(attempt - 1))
                attempt += 1

    def _run_once(self, program: str, argv: list[str], *, repeatable: bool) -> subprocess.CompletedProcess[str]:
        try:
            result = subprocess.run(
                argv, env=self._environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                errors="replace", timeout=self._timeout_s,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            message = f"{program} did not answer within {self._timeout_s:g} s"
            if repeatable:
                raise _Unanswered(message) from None
            raise SlurmUnavailable(f"{message}; it may have been done") from None
        except OSError as error:
            raise SlurmUnavailable(f"{argv[0]}: {error.strerror}") from error
        if result.returncode != 0:
            verb = "" if argv[1].startswith("-") else f" {argv[1]}"
            raise _failure(f"{program}{verb}", message_of(result), repeatable=repeatable)
        return result


def controller_was_away(text: str) -> bool:
    """Return whether srun or sbatch reached no controller, or got no answer from it, by what was printed.

    Only their own lines count: a program that srun started may print "Connection refused" as well.
    """
    return any(
        words in line
        for line in text.splitlines()
        if "srun:" in line or "sbatch:" in line
        for words in (*_UNREACHED, *_UNANSWERED, *_NO_CLUSTER)
    )


def words_of_sbatch(text: str) -> str:
    """Return the messages of sbatch in a text, in one line and without sbatch's marks."""
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("sbatch:")]
    return "; ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in lines)


def advice_on_refusal(message: str) -> str:
    """Return what a user can do about sbatch's refusal, to be appended to it; empty if that is unknown."""
    return _NEVER_AVAILABLE_ADVICE if _NEVER_AVAILABLE in message else ""


def may_have_arrived(message: str) -> bool:
    """Return whether Slurm may have done what a command asked for, though it got no answer."""
    return any(words in message for words in _UNANSWERED)


def message_of(result: subprocess.CompletedProcess[str]) -> str:
    """Return the stderr of a command (or else its stdout) in one line; only its errors, if it marks them."""
    lines = [line.strip() for line in (result.stderr.strip() or result.stdout).splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line or "fatal:" in line]
    return "; ".join(errors or lines) or f"exit code {result.returncode}, no message"


def _failure(command: str, message: str, *, repeatable: bool) -> Exception:
    """Return the error that a failed command means."""
    line = message if message.startswith(command.split()[0]) else f"{command}: {message}"
    if any(words in message for words in _UNREACHED):
        return _Unanswered(line)
    if may_have_arrived(message):
        return _Unanswered(line) if repeatable else SlurmUnavailable(f"{line}; it may have been done")
    if any(words in message for words in _NO_CLUSTER):
        return SlurmUnavailable(
            f"{line}; is SLURM_CONF (or SLURM_CONF_SERVER) right, and is this a machine of the cluster?"
        )
    if UNKNOWN_JOB in message:
        return NotFound(line)
    if HIDDEN in message and command in ("sinfo", "squeue", "scontrol show"):
        return SlurmRefused(f"{line}; the site hides this from its users (PrivateData)")
    return SlurmRefused(line)
