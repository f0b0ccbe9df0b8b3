"""pytest plugin: the processor time of each test, with all that it started, also in jobs of a test cluster.

    python -m pytest -p tests.processor_time --processor-time times.json ...

Writes {file of tests: {test: seconds, user and system together}} as JSON. The process that runs the tests enters
a control group of its own (cgroup v2, as root), which whatever it starts inherits: daemons, their jobs, and
processes that outlive their parents. What a cluster does between two tests counts for the test that follows.
"""

from __future__ import annotations

import errno
import json
import os
from collections import defaultdict
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.waiting import wait_for


class ProcessorTime:
    """The seconds of each test of this process."""

    def __init__(self, to: Path) -> None:
        self.to = to
        self.group, self.parent = fresh_group(f"zslurm-tests-{os.getpid()}")
        (self.group / "cgroup.procs").write_text(str(os.getpid()))
        self.tests: defaultdict[str, dict[str, float]] = defaultdict(dict)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        before = getattr(self, "last", processor_s(self.group))
        try:
            return (yield)
        finally:
            self.last = processor_s(self.group)
            file, _, name = item.nodeid.partition("::")
            self.tests[file][name] = round(self.tests[file].get(name, 0.0) + self.last - before, 3)
            self.to.write_text(json.dumps(self.tests, indent=1))

    def pytest_unconfigure(self) -> None:
        (self.parent / "cgroup.procs").write_text(str(os.getpid()))
        remove(self.group, self.parent)


def fresh_group(name: str) -> tuple[Path, Path]:
    """Make a group below the one that this process is in; returns both."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    (root,) = [Path(where) for _, where, kind, *_ in mounts if kind == "cgroup2"][:1]
    own = Path("/proc/self/cgroup").read_text().splitlines()[-1].removeprefix("0::/")
    group = root / own / name
    group.mkdir()
    return group, root / own


def remove(group: Path, parent: Path) -> None:
    """Remove a group; what was started in it and still runs moves to the parent."""

    def removed() -> bool:
        for process in (group / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):  # it ended meanwhile
                (parent / "cgroup.procs").write_text(process)
        try:
            group.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY:  # a process that is ending counts until it is gone
                raise
            return False
        return True

    wait_for(removed, f"the processes of {group} to leave it")


def processor_s(group: Path) -> float:
    """Return the processor time of all that is or was in a group."""
    lines = (group / "cpu.stat").read_text().splitlines()
    return int(dict(line.split() for line in lines)["usage_usec"]) / 1e6


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processor-time", type=Path, metavar="FILE", help="write each test's processor time there")


def pytest_configure(config: pytest.Config) -> None:
    to = config.getoption("--processor-time")
    worker = getattr(config, "workerinput", {}).get("workerid")
    if to is not None and (worker or not config.getoption("numprocesses", None)):
        to = to.with_name(f"{to.stem}-{worker}{to.suffix}") if worker else to
        config.pluginmanager.register(ProcessorTime(to.resolve()), "processor-time-of-tests")
