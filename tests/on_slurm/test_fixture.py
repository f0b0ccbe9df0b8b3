"""The test cluster itself: it is a real Slurm, its nodes can die, and it leaves nothing behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.on_slurm.cluster import hosts_file, processes
from tests.on_slurm.cluster.as_user import COMMAND_EVERY_S
from tests.on_slurm.cluster.installation import CHECKOUT, mirror
from tests.on_slurm.cluster.layout import Instance
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.waiting import wait_for

pytestmark = pytest.mark.slurm


def test_a_checkout_that_the_user_cannot_enter_is_mirrored(slurm_cluster: SlurmCluster) -> None:
    directory = slurm_cluster.instance.directory / "mirror-test"
    mirrored = mirror(directory, lambda argv: slurm_cluster.run(argv, check=False))
    code = "import zslurm, sys; print(zslurm.__file__, sys.prefix)"
    found = slurm_cluster.run([mirrored.python, "-c", code]).stdout.split()
    assert found == [str(directory / "sources/zslurm/__init__.py"), str(directory / "venv")]
    pth_files = (CHECKOUT / ".venv").glob("lib/*/site-packages/*zslurm*.pth")
    assert not any(str(directory) in path.read_text() for path in pth_files), "the original was changed"
    subprocess.run(["rm", "-r", directory], check=True)


def test_the_end_leaves_no_process_no_directory_and_no_line(slurm_cluster: SlurmCluster) -> None:
    with SlurmCluster(nodes=2) as cluster:
        instance = cluster.instance
        cluster.sbatch("trap '' TERM; setsid sleep 600 & srun -n2 sleep 600", "-N2")
        wait_for(lambda: processes.tasks(instance, "node1"), "the job to run", every_s=COMMAND_EVERY_S)
        cluster.run(["bash", "-c", "setsid sleep 600 >/dev/null 2>&1 &"])
        assert instance.id in hosts_file.HOSTS.read_text()
    assert processes.members(instance) == []
    assert not instance.directory.exists()
    assert instance.id not in hosts_file.HOSTS.read_text()
    assert set(slurm_cluster.node_states().values()) == {"idle"}, "another cluster was hurt"


@pytest.mark.usefixtures("slurm_possible")
def test_what_a_killed_process_left_is_cleaned_at_the_next_start() -> None:
    code = (
        "import os, signal; from tests.on_slurm.cluster.slurm_cluster import SlurmCluster\n"
        "cluster = SlurmCluster(nodes=1); cluster.start(); print(cluster.instance.directory, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    crashed = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True)
    assert crashed.returncode == -signal.SIGKILL, crashed.stderr
    directory = Path(crashed.stdout.strip())
    (left,) = (instance for instance in Instance.all() if instance.directory == directory)
    assert left.abandoned
    assert processes.members(left)

    with SlurmCluster(nodes=1):
        assert processes.members(left) == []
        assert not directory.exists()


@pytest.mark.usefixtures("slurm_possible")
def test_up_prints_what_a_person_needs_and_down_finds_it_again() -> None:
    # Only this test's own instance is taken down: a person may have one up.
    program = [sys.executable, "-m", "tests.on_slurm"]
    up = subprocess.run([*program, "up", "--nodes", "1"], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    conf = Path(up.stdout.partition("export SLURM_CONF=")[2].split()[0])
    directory = conf.parents[1]
    assert json.loads((directory / "cluster.json").read_text())["owner_pid"] is None
    who = subprocess.run([directory / "as-user", "srun", "id", "-un"], capture_output=True, text=True, check=True)
    assert who.stdout.strip() == "zslurm-test"
    version = [directory / "as-user", "zslurm", "--version"]
    assert subprocess.run(version, capture_output=True, text=True, check=True).stdout.startswith("zslurm ")
    down = [*program, "down", str(directory)]
    stopped = subprocess.run(down, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert stopped.stdout == f"stopped {directory}\n"
    assert not directory.exists()
