"""What tests have started ends with pytest, however that ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


_LIKE_A_TEST_ON_SLURM = """
import os, subprocess, time
from tests.end_of_tests import end_with
from tests.on_slurm.cluster.layout import Instance
from tests.on_slurm.cluster.processes import MARK
end_with(os.getpid())
instance = Instance.create(nodes=0, gpus_per_node=0, accounting=False, owner_pid=os.getpid())
daemon = subprocess.Popen(["sleep", "infinity"], env={MARK: instance.id}, start_new_session=True)
print(daemon.pid, instance.directory, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="clusters belong to root")
def test_a_cluster_ends_with_the_process_that_it_was_started_for() -> None:
    """Its daemons have environments of their own, without the mark of what pytest starts."""
    with subprocess.Popen(
        [sys.executable, "-c", _LIKE_A_TEST_ON_SLURM], stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        daemon, directory = program.stdout.readline().split()
        assert _is_alive(int(daemon))
        program.kill()
        wait_for(lambda: not (_is_alive(int(daemon)) or Path(directory).exists()), "the cluster to end")


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
