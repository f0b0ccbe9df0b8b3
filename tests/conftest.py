"""Fixtures of all tests, and an environment in which no test sees the user's own runs, profiles or Slurm."""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

from tests import forked
from tests.end_of_tests import end_with

# Before torch is imported: what tests compute is tiny, and threads that spin for each other on a busy machine make
# it many times slower. Ranks that tests start have settings of their own.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A rank takes as many threads as its run file says, or all cores: they sleep while they wait for each other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

pytest_plugins = ["tests.on_slurm.cluster.fixtures", "tests.distribution"]

_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)

# What a job, a site or a user may have set in the shell that runs the tests.
_FOREIGN = ("SLURM_", "SBATCH_", "ZSLURM_", "PMI_", "PMIX_")


def pytest_configure(config: pytest.Config) -> None:
    """Let Ctrl-C reach what tests start, and the end of pytest too.

    What a shell runs in its background ignores Ctrl-C from its start.
    """
    if not hasattr(config, "workerinput"):  # xdist's workers inherit it
        end_with(os.getpid())
        atexit.register(shutil.rmtree, forked.place(), ignore_errors=True)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Give this process its handlers of signals back after each test: what a test starts inherits ignored ones."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        return (yield)
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A fresh home for each test; pytest's own numbers cost a look at all directories of all tests before it."""
    directory = tmp_path_factory.mktemp("homes")
    return (directory / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, homes: Iterator[Path]) -> None:
    """Configuration and state of zslurm in a fresh place; nothing of the surrounding shell."""
    home = next(homes)
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    for name in [name for name in os.environ if name.startswith(_FOREIGN)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ZSLURM_NICE", "0")
