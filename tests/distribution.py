"""pytest plugin: how `make test` spreads the tests over processes, and which tests get a second try.

A test on a real Slurm mostly waits, a test of the trainer computes: side by side they take half the time. Tests of
one file stay together, for they share what their module's fixtures made. The tests on a Slurm form four groups of
files; each group runs in one process and has a separate cluster (clusters share nothing but the machine). Files
that share a process with torch are grouped as well: each process of tests would start another one. The groups and
the longest files come first, so that no process is left with a long one in the end.

In CI (CI=true in the environment) a failed test runs again, and the summary lists it as RERUN: tests in every
room start real processes, and one hiccup of a busy machine in some thousand tests should not cost a whole run.
Elsewhere no test is repeated: what fails there fails.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import os
import sys
from collections.abc import Generator
from typing import Any

import pytest

_ON_SLURM = {
    f"tests/on_slurm/test_{name}.py": group
    for group, names in {
        "slurm-2": "agent_link agents lost_runs refusals submit_options submitit successor",
        "slurm-3": "doctor environments programs rails",
        "slurm-4": "accounting client everyday fixture outages preemption profiles topology",
    }.items()
    for name in names.split()
}
"""Groups of files on a Slurm; those with accounting belong together. slurm-1 has all others."""

_TOGETHER = {
    # With ranks from the server with torch that belongs to the user of this Slurm.
    "tests/faults/test_in_memory.py": "slurm-1",
    # They share a Slurm and the run to which nothing happens.
    "tests/faults/test_faults.py": "faults",
    "tests/faults/test_pairs.py": "faults",
    # Triton's interpreter (tests/kernels/implementations.py).
    "tests/cli/test_kernels.py": "kernels",
    "tests/kernels/": "kernels",
    # The server that forks ranks (tests/train/ranks.py).
    "tests/cli/bad_input/test_damaged_files.py": "train-1",
    "tests/cli/checkpoint/": "train-1",
    "tests/cli/niceness/": "train-1",
    "tests/train/evaluation/": "train-1",
    "tests/train/loop/": "train-1",
    "tests/train/recovery/": "train-1",
    "tests/train/telemetry/": "train-1",
    "tests/train/test_": "",
    "tests/train/": "train-2",
}
"""Groups of other files, by how their names begin; with an empty name, each file is a group."""

_SECONDS = {
    **dict.fromkeys(("slurm-1", "slurm-2", "slurm-3", "slurm-4"), 300),
    **dict.fromkeys(("train-1", "train-2"), 200),
    "kernels": 60,
    "tests/test_demo.py": 60,
    "tests/docs/test_commands.py": 100,
    "tests/train/test_processors.py": 60,
}
"""About how long a group takes where that is long: the longest is begun first."""


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collect after the first process has, as the others read the byte code that it leaves.

    To make pytest's own byte code of the tests takes half of the time of a collection on a fresh checkout. No
    garbage is collected meanwhile: what is imported and collected stays until the end.
    """
    with contextlib.ExitStack() as until_collected:
        if hasattr(session.config, "workerinput"):
            lock = until_collected.enter_context((session.config.rootpath / "pyproject.toml").open())
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fcntl.flock(lock, fcntl.LOCK_SH)
        gc.disable()
        try:
            return (yield)
        finally:
            gc.freeze()
            gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    atexit.register(_leave if hasattr(config, "workerinput") else gc.unfreeze)


def _leave() -> None:
    """End a worker without tearing the interpreter down, after all other exit handlers.

    To free what it has imported and collected takes about 3 seconds.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("CI", "").lower() == "true" and config.pluginmanager.hasplugin("rerunfailures"):
        for item in items:
            item.add_marker(pytest.mark.flaky(reruns=1))
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: -_SECONDS.get(_group(item.nodeid), 0))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One process for each core, and two more, as some mostly wait."""
    return min(len(os.sched_getaffinity(0)), 8) + 2


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """xdist's scheduler of scopes, where a scope is one of our groups."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    config.option.loadscopereorder = False  # `pytest_collection_modifyitems` has ordered them
    return ByGroup(config, log)


def _group(nodeid: str) -> str:
    """The tests that run one after the other in one process: those of a file, or of several on one Slurm."""
    file = nodeid.partition("::")[0]
    if file.startswith("tests/on_slurm/") or "::test_cluster_commands_of" in nodeid:
        return _ON_SLURM.get(file, "slurm-1")
    return next((group for start, group in _TOGETHER.items() if file.startswith(start)), "") or file
