"""Which Python the ranks run in: the job's own, a copy on the node, or one inside a container."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Interpreter:
    """A Python as a step starts it.

    Attributes:
        command: what precedes `-m MODULE`; the last one is the Python.
        environ: the environment that it gets.
        srun_options: further options of srun.
    """

    command: tuple[str, ...]
    environ: Mapping[str, str]
    srun_options: tuple[str, ...] = ()

    @classmethod
    def own(cls, environ: Mapping[str, str]) -> Interpreter:
        """Return the Python that runs this process."""
        return cls((sys.executable,), environ)
