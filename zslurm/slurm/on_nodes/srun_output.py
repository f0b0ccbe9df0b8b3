"""Read what srun (and the local launcher) prints about tasks that failed.

Formats from srun's own sources (src/srun/libsrun/launch.c and task_state.c): `srun: error: NODE: task 3: Exited
with exit code 1`, `tasks 2-3,5: Killed`, `Out Of Memory`, `Segmentation fault (core dumped)`. The local step
writes the same with `step:` in front.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from zslurm.slurm.hostlist import expand_ranges

_FAILURE = re.compile(
    r"(?:srun|step): error: (?P<node>[^:\s]+): tasks? (?P<ranks>[\d,\-]+): (?P<what>.+?)\s*$", re.MULTILINE
)
_LAUNCH_FAILURE = re.compile(
    r"srun: error: Task launch for StepId=\S+ failed on node (?P<node>\S+): (?P<what>.+?)\s*$", re.MULTILINE
)
_NODE_FAILURE = re.compile(r"srun: error: Node failure on (?P<node>\S+)")
_EXIT_CODE = re.compile(r"Exited with exit code (\d+)")

# Not `Force Terminated StepId=`: srun 22.05 ends with it wherever SIGKILL ended a task, one rank included.
_ENDED_FROM_OUTSIDE = re.compile(r"^srun: Job step aborted: Waiting", re.MULTILINE)
_LACKS_ENDS = ("Timed out waiting for job step", "Unable to create step", "Unable to confirm allocation")
"""Messages after which srun may have ended without a report of every task."""
_CANCELLED = re.compile(r"\*\*\* STEP (?P<step>\S+) ON \S+ CANCELLED AT \S+(?P<due> DUE TO [^*]+)?")

CANNOT_START = "tasks cannot be started"
"""What a reason of `launch_failures` begins with."""
_WARNING = re.compile(r"\s*(?:\d+: )?srun: (?:warning|info|debug\d?): ")


@dataclass(frozen=True)
class TaskFailure:
    """Ranks of one node that ended badly in the same way."""

    node: str
    ranks: tuple[int, ...]
    what: str

    @property
    def exit_code(self) -> int | None:
        """The exit code, if the ranks exited by themselves; None if a signal ended them."""
        match = _EXIT_CODE.fullmatch(self.what)
        return int(match[1]) if match else None


def task_failures(text: str) -> list[TaskFailure]:
    """Return every failure in the order in which it was reported."""
    return [
        TaskFailure(match["node"], tuple(expand_ranges(match["ranks"])), match["what"])
        for match in _FAILURE.finditer(text)
    ]


def failed_nodes(text: str) -> list[str]:
    """Nodes that Slurm itself declared failed, in order, each once."""
    return list(dict.fromkeys(match["node"] for match in _NODE_FAILURE.finditer(text)))


def launch_failures(text: str) -> dict[str, str]:
    """Nodes on which tasks could not even be started, with Slurm's reason."""
    return {match["node"]: f"{CANNOT_START}: {match['what']}" for match in _LAUNCH_FAILURE.finditer(text)}


def cancelled_step(text: str, first_task: str) -> str | None:
    """Return the step that was cancelled (`scancel JOB.STEP`), such as `4711.2`, or `` if it is not named.

    Slurm ends steps in the same way for other reasons: the time limit, a preemption, a node that failed. Then it
    prints the reason, and this is None, as for a step that ended by itself and for one whose tasks got SIGKILL
    (`scancel --signal=KILL JOB.STEP`): that looks like ranks that were killed.

    `text` is what srun printed, `first_task` the last lines of the output of task 0, to which slurmstepd writes.
    """
    if not _ENDED_FROM_OUTSIDE.search(text) or failed_nodes(text):
        return None
    cancelled = list(_CANCELLED.finditer(f"{text}\n{first_task}"))
    if any(match["due"] for match in cancelled):
        return None
    return cancelled[-1]["step"] if cancelled else ""


def may_lack_ends(text: str) -> bool:
    """Return whether srun may have ended without a report of every task, by what it printed."""
    return any(message in text for message in _LACKS_ENDS)


def reached_time_limit(text: str) -> bool:
    """Return whether Slurm ended a step at the time limit, by what srun printed."""
    return "DUE TO TIME LIMIT" in text


def is_of_slurm(line: str) -> bool:
    """Return whether a line is of srun or slurmstepd, and not of the program that they run."""
    return line.startswith(("srun:", "slurmstepd:"))


def is_warning(line: str) -> bool:
    """Return whether a line of srun only warns: it is never why a step ended."""
    return _WARNING.match(line) is not None
