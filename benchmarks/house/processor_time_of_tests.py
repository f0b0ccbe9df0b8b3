"""The processor time of tests that start runs, now and before ranks were stand-ins and states read in process.

Tests on a real Slurm (needs root) and of the supervisor, each with everything that it started, as
tests/processor_time.py counts it: one after the other, from this checkout and from an export of the commit before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, export, write_result

BEFORE = "d94fa5f"
SAMPLE = (
    *(f"tests/on_slurm/test_{name}.py" for name in ("runs", "everyday", "successor")),
    *(f"tests/aegis/supervisor/test_{name}.py" for name in ("recovery", "exits", "supervisor")),
)
_PLUGIN = "tests/processor_time.py"
_OPTIONS = ("-n", "0", "-q", "-p", "no:cacheprovider", "-m", "not soak and not faults")

Seconds = dict[str, dict[str, float]]
"""Of each test, by file."""


def run() -> None:
    """Measure and write results/processor_time_of_tests.json."""
    with tempfile.TemporaryDirectory() as directory:
        before = seconds(*export_with_python(Path(directory)))
    write_result("processor_time_of_tests", figures(before, seconds(ROOT, Path(sys.executable))))


def export_with_python(directory: Path) -> tuple[Path, Path]:
    """Put the commit before into `directory`; returns that and a Python that imports zslurm from there."""
    directory.chmod(0o755)  # jobs of the ordinary user look into it
    export(BEFORE, directory)
    (directory / _PLUGIN).write_text((ROOT / _PLUGIN).read_text())
    venv.create(directory / ".venv", symlinks=True)
    (packages,) = (directory / ".venv").glob("lib/python*/site-packages")
    (packages / "rest.pth").write_text(f"{directory}\n{sysconfig.get_path('purelib')}\n")
    return directory, directory / ".venv" / "bin" / "python"


def seconds(root: Path, python: Path) -> Seconds:
    """Run the sample in a checkout."""
    with tempfile.NamedTemporaryFile(suffix=".json") as times:
        command = [python, "-m", "pytest", "-p", "tests.processor_time", "--processor-time", times.name]
        subprocess.run([*command, *_OPTIONS, *SAMPLE], cwd=root, env=os.environ | {"CI": "true"}, check=True)
        return dict(json.loads(Path(times.name).read_text()))


def figures(before: Seconds, now: Seconds) -> dict[str, Any]:
    """Seconds of each file, of the tests that both have, and of all."""
    rows: list[dict[str, Any]] = []
    for file in SAMPLE:
        both = before[file].keys() & now[file].keys()
        used = {
            name: sum(times[file][test] for test in both) for name, times in (("before_s", before), ("now_s", now))
        }
        rows.append({"file": file, "tests": len(both)} | {name: round(total, 1) for name, total in used.items()})
    whole = {name: round(sum(row[name] for row in rows), 1) for name in ("before_s", "now_s")}
    return {"before": BEFORE, "rows": rows, **whole, "share": round(whole["now_s"] / whole["before_s"], 3)}
