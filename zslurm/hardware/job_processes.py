"""The processes of a machine, from /proc below the movable root: what they are, and which job they belong to."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from zslurm.hardware.sysfs import key_values, names
from zslurm.slurm.environment import own_job_id, task_node


@dataclass(frozen=True)
class Process:
    """One process.

    Attributes:
        state: the letter of /proc: R, S, D (waits for a device, cannot be killed), Z (zombie), ...
        environ: empty if it may not be read: another user's, or a zombie's.
    """

    pid: int
    name: str
    uid: int | None
    parent: int | None
    state: str
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def job(self) -> str | None:
        """The Slurm job that it was started in."""
        return own_job_id(self.environ)

    @property
    def node(self) -> str | None:
        """The node that it was started on: several nodes of a test share one /proc."""
        return task_node(self.environ)


def processes(root: Path) -> Iterator[Process]:
    """Yield every process; one that ends while they are read is left out."""
    proc = root / "proc"
    for pid in (name for name in names(proc) if name.isdecimal()):
        if (record := process(root, int(pid))) is not None:
            yield record


def process(root: Path, pid: int) -> Process | None:
    """Return one process; None if there is none."""
    folder = root / "proc" / str(pid)
    status = key_values(folder / "status")
    if "Name" not in status:
        return None
    return Process(
        pid=pid,
        name=status["Name"],
        uid=_first_number(status.get("Uid", "")),
        parent=_first_number(status.get("PPid", "")),
        state=status.get("State", "?")[:1],
        environ=_environ(folder / "environ"),
    )


def _first_number(text: str) -> int | None:
    word = text.split()[0] if text.split() else ""
    return int(word) if word.isdecimal() else None


def _environ(place: Path) -> dict[str, str]:
    try:
        text = os.fsdecode(place.read_bytes())
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in text.split("\0") if "=" in pair)
