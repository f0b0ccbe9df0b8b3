"""A backup controller that takes over when the first slurmctld is killed, and gives control back."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.on_slurm.cluster import hosts_file, processes
from tests.on_slurm.cluster.as_user import COMMAND_EVERY_S
from tests.on_slurm.cluster.config_files import Ports
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.on_slurm.cluster.user import ENDLESS, User, at_work, rank_process
from tests.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.soak, pytest.mark.usefixtures("slurm_possible")]

_HOST, _ADDRESS = "backup", "127.0.0.2"

_SETTINGS = f"""\
SlurmctldHost={_HOST}({_ADDRESS})
CommunicationParameters=NoCtldInAddrAny
DebugFlags=NO_CONF_HASH
SlurmctldTimeout=10
"""
"""Both controllers have the same port, so each listens on its own address."""


class WithBackup(SlurmCluster):
    """A cluster with a backup controller, which shares StateSaveLocation with the first."""

    def _start_daemons(self, ports: Ports) -> None:
        with hosts_file.machine_lock():
            hosts_file.add(self.instance.id, [_HOST], address=_ADDRESS)
        super()._start_daemons(ports)
        self._daemons.start_backup_controller(_HOST, _ADDRESS)
        wait_for(lambda: self.is_up("backup"), "the backup controller to answer", every_s=COMMAND_EVERY_S)

    def is_up(self, role: str) -> bool:
        """Return whether `scontrol ping` calls this controller up: `primary` or `backup`."""
        said = self.run(["scontrol", "ping"], check=False).stdout
        return any(f"({role})" in line and line.endswith(" UP") for line in said.splitlines())

    def save_state(self, job_id: str) -> None:
        """Wait until slurmctld has written this job and its steps to StateSaveLocation (every five seconds)."""
        job_state = self.instance.directory / "state" / "job_state"
        changed = time.time()
        self.run_as_root(["scontrol", "update", f"JobId={job_id}", "AdminComment=to-be-saved"])
        wait_for(lambda: job_state.stat().st_mtime > changed, "slurmctld to save its state")

    def kill_controller(self) -> None:
        """Kill the first slurmctld."""
        processes.kill_all(lambda: processes.daemons(self.instance, "slurmctld"))
        self._daemons.reap()


@pytest.fixture
def user() -> Iterator[User]:
    with WithBackup(nodes=3, settings=_SETTINGS) as cluster, at_work(cluster, "backup") as person:
        yield person


def test_a_backup_controller_takes_over(user: User) -> None:
    """A run continues, also with a rank that is killed meanwhile, and every command works at the backup."""
    cluster = user.cluster
    assert isinstance(cluster, WithBackup)
    user.zslurm("submit", user.write_run("run", steps=ENDLESS))
    user.wait_for_step("run", 5)
    job_id = str(user.wait_for_state("run", "running")["job_id"])
    cluster.save_state(job_id)
    cluster.kill_controller()
    before = user.stopped_at("run")
    user.wait_for_step("run", before + 5)
    rank_process(user, "run", 1).kill()
    wait_for(lambda: any(row["attempt"] == 2 for row in user.steps("run")), "the second attempt")
    wait_for(lambda: status_code(user) == 0, "the backup controller to take over", every_s=COMMAND_EVERY_S)
    assert not cluster.is_up("primary")
    assert user.state("run")["state"] == "running"
    causes = [event["kind"] for event in user.events("run") if event.get("role") == "root"]
    assert causes == ["rank_killed"]

    user.zslurm("submit", user.write_run("other", nodes=1))
    assert user.wait_for_state("other", "completed", "failed")["state"] == "completed"
    assert "ok: sbatch accepts a job of this profile" in user.zslurm("cluster", "check")
    user.zslurm("requeue", "run", "--now")
    wait_for(lambda: any(row["attempt"] == 3 for row in user.steps("run")), "the run after the requeue")
    assert user.state("run")["job_id"] == job_id

    cluster.save_state(job_id)
    cluster.start_controller()
    wait_for(lambda: cluster.is_up("primary"), "the first controller to take control back")
    assert user.state("run")["state"] == "running"
    user.zslurm("cancel", "run", "--wait")
    assert user.state("run")["state"] == "cancelled"
    assert {row["attempt"] for row in user.steps("run")} == {1, 2, 3}


def status_code(user: User) -> int:
    """Return the exit code of `zslurm status`."""
    return user.cluster.zslurm("status", cwd=user.directory, check=False).returncode
