"""Commands that compute are nice to others on a login node, and only there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = "import os; from zslurm.cli.options import lower_priority as lower; lower(); lower(); print(os.nice(0))"


@pytest.mark.parametrize(
    ("variables", "niceness"),
    [({}, 10), ({"ZSLURM_NICE": "3"}, 3), ({"ZSLURM_NICE": "0"}, 0), ({"SLURM_JOB_ID": "7"}, 0)],
)
def test_priority_goes_down_once_unless_it_is_a_job_or_not_wanted(
    variables: dict[str, str], niceness: int
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "ZSLURM_NICE"} | variables
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    here = os.nice(0)
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == max(here, niceness)
