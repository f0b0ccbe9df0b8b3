"""pytest plugin `-p tests.on_slurm.version_table`: keep how the files of tests went on this version of Slurm.

They go to benchmarks/results/slurm_versions.json: version -> file -> passed, failed, skipped, day and commit.
"""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.common import RESULTS
from tests.faults.kept_results import commit, today, update
from tests.on_slurm.cluster.config_files import slurm_version

_OUTCOMES: dict[str, dict[str, str]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note the outcome of a test: a failure before or after it counts, too."""
    tests = _OUTCOMES.setdefault(report.nodeid.partition("::")[0], {})
    if (report.when == "call" or report.outcome != "passed") and tests.get(report.nodeid) != "failed":
        tests[report.nodeid] = report.outcome


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the files that ran whole; others keep their former row."""
    if session.config.option.keyword or any("::" in argument for argument in session.config.args):
        return
    rows = {
        file: {name: Counter(tests.values())[name] for name in ("passed", "failed", "skipped")}
        | {"date": today(), "commit": commit()}
        for file, tests in _OUTCOMES.items()
    }
    version = str(slurm_version())
    update(
        RESULTS / "slurm_versions.json",
        lambda body: body | {version: dict(sorted((body.get(version, {}) | rows).items()))},
    )
