"""Each benchmark is found by its name, whatever folder it is in."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import psutil
import pytest

from benchmarks.__main__ import main, modules
from benchmarks.common import RESULTS
from tests.waiting import wait_for

OF_TESTS = {"faults", "fault_pairs", "slurm_versions", "tests_processor_time"}
"""Results of `make faults`, `make soak-slurm` and `-p tests.processor_time`."""


def test_each_result_is_of_a_benchmark() -> None:
    known = modules()
    results = {path.stem for path in RESULTS.glob("*.json") if not path.stem.startswith("gpu-")}  # of `... gpu`
    assert results - OF_TESTS <= known.keys()
    assert [name for name, module in known.items() if importlib.util.find_spec(module) is None] == []


def test_an_unknown_name_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train_steps"]) == 2
    assert "no benchmark called train_steps; there are: aegis_scale, " in capsys.readouterr().err


_SLEEPS = """
from benchmarks import __main__ as benchmarks
benchmarks.modules = lambda: {"sleeping": "tests.benchmarks.sleeping"}
benchmarks.main(["sleeping"])
"""


def test_what_a_killed_benchmark_has_started_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", _SLEEPS], stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        detached = int(benchmark.stdout.readline())
        assert psutil.pid_exists(detached)
        benchmark.kill()
        wait_for(lambda: not psutil.pid_exists(detached), "the process to end")
