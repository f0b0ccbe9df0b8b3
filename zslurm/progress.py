"""Two lines show zslurm the progress of your program, so that a hang is noticed and `zslurm status` has its steps.

    from zslurm import progress
    ...
    progress.step(step, loss=loss)      # after each step, on every rank

It imports nothing but the standard library, costs one system call, and does nothing outside of a run of zslurm. A
program in another language writes the same: one line of JSON with the key `step`, to a new file that it renames to
the path in ZSLURM_PROGRESS_FILE.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import SupportsFloat

VARIABLE = "ZSLURM_PROGRESS_FILE"
"""Environment variable: the file in which a rank shows its progress."""

MODULES_VARIABLE = "ZSLURM_MODULES_FILE"
"""Environment variable: the file for the names of the modules that the program has imported; see trainer.warm."""

RECOVERY_VARIABLE = "ZSLURM_RECOVERY_FILE"
"""Environment variable: what the names of the files begin with that a program shares with its rank to recover."""
GENERATION_VARIABLE = "ZSLURM_GENERATION"
"""Environment variable: the generation of the ranks that MASTER_PORT belongs to; see zslurm.recover."""

_shown = ""
_descriptor: tuple[int, str, int] | None = None
_WIDTH = 1024
"""Bytes of the file: a line is padded with blanks, so that one write replaces it whole."""


def step(number: int, **figures: SupportsFloat) -> None:
    """Show that this rank has finished a step.

    Args:
        number: of the step; any number that grows.
        figures: what `zslurm status` and metrics.jsonl shall have of it, by name: `loss`, `lr`, `grad_norm`,
            `tokens_per_s`, or others.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return
    _show_modules()
    row = {"step": int(number), "time": time.time()} | {name: _number(value) for name, value in figures.items()}
    line = json.dumps(row).encode()
    if len(line) >= _WIDTH:
        line = json.dumps({"step": int(number), "time": time.time()}).encode()
    try:
        os.pwrite(_opened(path), line.ljust(_WIDTH - 1) + b"\n", 0)
    except OSError:  # the file is away with its node's memory: training matters more
        return


def _show_modules() -> None:
    """Write down, once, which modules the program has imported: `trainer.warm` imports them for the next start."""
    global _shown
    path = os.environ.get(MODULES_VARIABLE)
    if not path or _shown == path:
        return
    _shown = path
    draft = f"{path}.{os.getpid()}"
    try:
        with open(draft, "w") as file:  # noqa: PTH123 - pathlib is not imported for this
            file.write("\n".join(sys.modules))
        os.replace(draft, path)  # noqa: PTH105 - as above
    except OSError:  # as in `step`
        return


def _number(value: SupportsFloat) -> float:
    """Return a figure as a number; a tensor is taken out of its graph first, or torch would warn."""
    return float(value.detach() if hasattr(value, "detach") else value)


def _opened(path: str) -> int:
    """Return a descriptor of the file that is this process's own: a forked one opens its own."""
    global _descriptor
    if _descriptor is None or _descriptor[1:] != (path, os.getpid()):
        _descriptor = (os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), path, os.getpid())
    return _descriptor[0]
