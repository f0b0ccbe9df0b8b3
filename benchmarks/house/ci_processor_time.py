"""The processor time of `.ci/run`, now and before ranks of tests were stand-ins and states read in process.

Each commit from a clean clone with a new environment, one after the other, in a control group (cgroup v2, as root)
that all its processes inherit: pytest's workers, the daemons of test clusters, their jobs. It takes an hour.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, write_result
from tests.processor_time import fresh_group, processor_s, remove

BEFORE = "6ce091c"


def run() -> None:
    """Measure and write results/ci_processor_time.json."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)  # jobs of the ordinary user look into it
        rows = [measure(commit, Path(directory) / commit) for commit in (BEFORE, _head())]
    share = round(rows[1]["processor_s"] / rows[0]["processor_s"], 3)
    write_result("ci_processor_time", {"rows": rows, "share": share})


def measure(commit: str, clone: Path) -> dict[str, Any]:
    """Run `.ci/run` of a commit in a fresh clone; failing tests are counted by its exit code, not raised."""
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
    subprocess.run(["git", "checkout", "-q", commit], cwd=clone, check=True)
    group, parent = fresh_group(f"zslurm-ci-{os.getpid()}")
    began = time.monotonic()
    shell = f'echo $$ > "{group / "cgroup.procs"}" && exec .ci/run'
    done = subprocess.run(["bash", "-c", shell], cwd=clone, check=False)
    row = {
        "commit": commit,
        "exit_code": done.returncode,
        "wall_s": round(time.monotonic() - began),
        "processor_s": round(processor_s(group)),
    }
    remove(group, parent)
    return row


def _head() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()
