"""What tests have started ends with pytest, however that ends."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from tests.end_of_tests import VARIABLE
from tests.waiting import wait_for

_LIKE_PYTEST = """
import os, subprocess, sys, time
from tests.end_of_tests import end_with
ends = end_with(os.getpid())
detached = subprocess.Popen(["sleep", "infinity"], start_new_session=True)
print(ends.pid, detached.pid, flush=True)
time.sleep(float(sys.argv[1]))
"""


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "in order"])
def test_what_has_detached_itself_ends_with_the_process_that_it_was_started_for(killed: bool) -> None:
    bystander = subprocess.Popen(["sleep", "infinity"], env=os.environ | {VARIABLE: "of another pytest"})
    program = subprocess.Popen(
        [sys.executable, "-c", _LIKE_PYTEST, "600" if killed else "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert program.stdout is not None
        ends, detached = map(int, program.stdout.readline().split())
        if killed:
            assert _is_alive(detached)
            program.kill()
        wait_for(lambda: not (_is_alive(ends) or _is_alive(detached)), "both to end")
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
        program.communicate()
