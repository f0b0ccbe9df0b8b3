"""Results of faults that are kept row by row: a run of some of them replaces these rows, and leaves the others.

Each row has the day and the commit of its run, and is there because it came to its end as it should.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS
from tests.on_slurm.cluster.config_files import slurm_version
from zslurm.submit.code_version import code_version

Rows = dict[Any, dict[str, Any] | None]
"""Rows by what identifies them; None for one that did not end as it should, whose former row no longer holds."""


def merged(before: list[dict[str, Any]], new: Rows, key: str, order: list[Any]) -> list[dict[str, Any]]:
    """Rows as they are after a run, in an order; those that are not in it are gone."""
    found: Rows = {row[key]: row for row in before}
    found |= new
    return [row for name in order if (row := found.get(name)) is not None]


def update(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """Replace the object of a JSON file, empty if there is none; several runs may do so at once."""
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        body = change(json.loads(text) if text else {})
        file.truncate(0)
        file.write(json.dumps(body, indent=2) + "\n")
    return body


@cache
def commit() -> str:
    """The commit of the code under test; with "+" if files differ from it, other than results."""
    version, diff = code_version(Path(__file__).parent)
    changed = [line for line in diff.splitlines() if line.startswith("diff --git ")]
    others = [line for line in changed if " b/benchmarks/results/" not in line]
    return f"{(version['git_commit'] or 'unknown')[:9]}{'+' if others else ''}"


def place() -> Path:
    """Where results of this version of Slurm are kept: a folder for each that is newer than 22.05."""
    year, month, _ = slurm_version()
    found = RESULTS if (year, month) == (22, 5) else RESULTS / f"slurm-{year}.{month:02d}"
    found.mkdir(exist_ok=True)
    return found


def today() -> str:
    """As in every result."""
    return time.strftime("%Y-%m-%d")
