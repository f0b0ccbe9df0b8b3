"""What the readers of GPU tools need of a machine; node_sources.py has the real one."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from zslurm.config.doctor import DoctorSection
from zslurm.hardware.command import CommandOutput
from zslurm.hardware.facts import NodeFacts


class Machine(Protocol):
    """A machine whose GPUs are read."""

    root: Path

    @property
    def limits(self) -> DoctorSection:
        """How long tools may take."""
        ...

    @property
    def facts(self) -> NodeFacts:
        """The devices that sysfs lists."""
        ...

    def find(self, program: str) -> str | None:
        """Return where a program is; None where there is none."""
        ...

    def run(self, program: str, *arguments: str, timeout_s: float) -> CommandOutput | None:
        """Run a program; None where there is none.

        Raises:
            CommandHung: it did not end.
        """
        ...
