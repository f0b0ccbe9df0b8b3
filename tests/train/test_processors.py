"""What depends on the processor is right on others too: the tests of it run again, with another one forced."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.checkout import ROOT
from tests.processors import OTHER_PROCESSORS

DEPENDENT = [
    "tests/train/plan/test_memory.py::test_the_peak_of_a_microbatch_is_the_profilers",
    "tests/train/plan/test_memory.py::test_muon_takes_no_more_than_planned",
]
"""What failed on one processor and passed on another, or could. The compiler is not asked again, nor is
the memory of products in fp64, which oneDNN does not make."""

LONG = (
    "tests/train/loop/test_exactness.py",
    "-k", "test_in_fp32_a_run_on_three_ranks_stays_inside_the_spread_of_perturbed_runs",
)  # fmt: skip
"""The same; it takes as long as all others together, so `make test` runs it on this processor alone."""

OPTIONS = [
    "-n", "0", "-q", "-p", "no:cacheprovider", "-m", "not soak", "-k", "not compiled and not traced and not fp64"
]  # fmt: skip


def passes_on(processor: str, *tests: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *OPTIONS, *tests],
        cwd=ROOT,
        env=os.environ | OTHER_PROCESSORS[processor],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:]


@pytest.mark.parametrize(
    "processor",
    [pytest.param(name, marks=() if name.startswith("avx512") else pytest.mark.soak) for name in OTHER_PROCESSORS],
)
def test_what_depends_on_the_processor_passes_on_others(processor: str) -> None:
    passes_on(processor, *DEPENDENT)


@pytest.mark.soak
@pytest.mark.parametrize("processor", OTHER_PROCESSORS)
def test_a_run_on_three_ranks_stays_inside_the_spread_on_others(processor: str) -> None:
    passes_on(processor, *LONG)
