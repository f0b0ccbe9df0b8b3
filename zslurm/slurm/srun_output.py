"""What srun (and its local twin) says about tasks that failed.

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

CANNOT_START = "tasks cannot be started"
"""What a reason of `launch_failures` begins with."""


@dataclass(frozen=True)
class TaskFailure:
    """Ranks of one node that ended badly in the same way."""

    node: str
    ranks: tuple[int, ...]
    what: str

    @property
    def exit_code(self) -> int | None:
        """The exit code, where the ranks exited by themselves; None where a signal ended them."""
        match = _EXIT_CODE.fullmatch(self.what)
        return int(match[1]) if match else None


def task_failures(text: str) -> list[TaskFailure]:
    """Every failure in the order in which it was reported."""
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
