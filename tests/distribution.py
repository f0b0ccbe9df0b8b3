"""pytest plugin: how `make test` spreads the tests over processes, and which tests get a second try.

A test on a real Slurm mostly waits, a test of the trainer computes: side by side they take half the time. Tests of
one file stay together, for they share what their module's fixtures made. The tests on a Slurm form four groups of
files; each group runs in one process, on a cluster of its own (clusters share nothing but the machine). The groups
and the longest files come first, so that no process is left with a long one in the end.

`--processes` forks so many processes after the collection (`tests/processes.py`).

In CI (CI=true in the environment) a failed test runs once more, and the summary lists it as RERUN: tests in every
room start real processes, and one hiccup of a busy machine in some thousand tests should not cost a whole run.
Elsewhere no test is repeated: what fails there fails.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import SHARED, Processes

_ON_SLURM = {
    f"tests/on_slurm/test_{name}.py": group
    for group, names in {
        "slurm-2": "agent_link refusals runs submit_options successor",
        "slurm-3": "doctor environments programs rails",
        "slurm-4": "accounting client everyday fixture outages preemption profiles topology",
    }.items()
    for name in names.split()
}
"""Groups of files on a Slurm; those with accounting belong together. slurm-1 has all others."""

_FAULTS = frozenset({"tests/faults/test_faults.py", "tests/faults/test_pairs.py"})
"""They share a Slurm and the run to which nothing happens."""

_SECONDS = {
    **dict.fromkeys(("slurm-1", "slurm-2", "slurm-3", "slurm-4"), 300),
    "tests/test_demo.py": 60,
    "tests/test_docs.py": 400,
    "tests/train/test_processors.py": 60,
}
"""About how long a group takes where that is long: the longest is begun first."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--processes",
        type=lambda text: min(len(os.sched_getaffinity(0)), 8) + 2 if text == "auto" else int(text),
        default=0,
        metavar="N",
        help="run the tests in N processes that are forked after the collection; "
        "auto: one for each core, and two more, as some mostly wait",
    )


@pytest.fixture(scope="session")
def shared_directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that all processes of this run of the tests share."""
    return request.config.stash.get(SHARED, None) or tmp_path_factory.getbasetemp()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without a search for garbage: what is imported and collected stays until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("CI", "").lower() == "true" and config.pluginmanager.hasplugin("rerunfailures"):
        for item in items:
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    options = session.config.option
    if not options.processes or options.collectonly or session.testsfailed:
        return None
    groups: dict[str, list[int]] = {}
    for number, item in enumerate(session.items):
        groups.setdefault(_group(item.nodeid), []).append(number)
    if session.config.pluginmanager.hasplugin("rerunfailures"):
        session.config.failures_db = _reruns_of_all_processes()  # type: ignore[attr-defined]
    longest_first = sorted(groups, key=lambda name: -_SECONDS.get(name, 0))
    Processes(session, [groups[name] for name in longest_first]).run(options.processes)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    return True


def _group(nodeid: str) -> str:
    """The tests that run one after the other in one process: those of a file, or of several on one Slurm."""
    file = nodeid.partition("::")[0]
    if file.startswith("tests/foreign/"):
        return "slurm-3"
    if file.startswith("tests/on_slurm/") or "::test_cluster_commands_of" in nodeid:
        return _ON_SLURM.get(file, "slurm-1")
    if file in _FAULTS:
        return "faults"
    return file


def _reruns_of_all_processes() -> Any:
    """What --max-suite-reruns counts by, in memory that all processes share."""
    from pytest_rerunfailures import StatusDB

    class Reruns(StatusDB):
        def __init__(self) -> None:
            super().__init__()
            self.count = multiprocessing.Value("i", 0)

        def get_suite_reruns(self) -> int:
            return self.count.value

        def try_increment_suite_reruns(self, max_cap: int) -> bool:
            with self.count.get_lock():
                allowed = self.count.value < max_cap
                self.count.value += allowed
                return allowed

    return Reruns()
