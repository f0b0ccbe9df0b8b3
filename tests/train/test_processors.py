"""What depends on the processor is right on others too: the tests of it run once more, with another one forced."""

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
    "tests/kernels/matmul/test_matmul.py",
    "tests/train/loop/test_exactness.py::test_in_fp32_a_run_on_three_ranks_stays_inside_the_spread_of_perturbed_runs",
]
"""What failed on one processor and passed on another, or could. The compiler is not asked again."""

OPTIONS = ["-n", "0", "-q", "-p", "no:cacheprovider", "-m", "not soak", "-k", "not compiled and not traced"]


@pytest.mark.parametrize(
    "processor",
    [pytest.param(name, marks=pytest.mark.soak if name == "sse4" else ()) for name in OTHER_PROCESSORS],
)
def test_what_depends_on_the_processor_passes_on_others(processor: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *OPTIONS, *DEPENDENT],
        cwd=ROOT,
        env=os.environ | OTHER_PROCESSORS[processor],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:]
