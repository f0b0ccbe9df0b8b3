"""Sites that are set up in other ways than the test cluster: what works there, and what is refused in one line."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.on_slurm.cluster import config_files
from tests.on_slurm.cluster.config_files import Ports, slurm_version
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.on_slurm.cluster.user import User, add_to_profile, at_work, rank_process
from tests.waiting import wait_for
from zslurm.slurm.client import SlurmClient

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("slurm_possible")]

_MUNGE = Path("/run/munge/munge.socket.2")


@contextmanager
def site(settings: str = "", files: Mapping[str, str] | None = None, *, nodes: int = 2) -> Iterator[User]:
    """A user at a cluster with these lines of slurm.conf and these files next to it."""
    with SlurmCluster(nodes=nodes, settings=settings, files=files) as cluster, at_work(cluster, "site") as user:
        yield user


def completes(user: User, name: str = "run", *options: str) -> None:
    """Submit a run on two nodes, and see it complete."""
    user.zslurm("submit", user.write_run(name), *options)
    state = user.wait_for_state(name, "completed", "failed")
    assert state["state"] == "completed", user.zslurm("logs", name, "--supervisor")


def needs(version: tuple[int, int, int], what: str) -> None:
    """Skip a test on a Slurm before this version."""
    if slurm_version() < version:
        pytest.skip(f"Slurm {slurm_version()} has no {what}")


class Configless(SlurmCluster):
    """A cluster whose user has no slurm.conf: commands ask slurmctld for it.

    They do so before they know where munge's socket is, so the usual path leads to it.
    """

    def _person_environment(self) -> dict[str, str]:
        environment = super()._person_environment()
        del environment["SLURM_CONF"]
        port = self.instance.claimed_ports()[0]
        return environment | {"SLURM_CONF_SERVER": f"127.0.0.1:{port}"}

    def _start_daemons(self, ports: Ports) -> None:
        _MUNGE.parent.mkdir(exist_ok=True)
        _MUNGE.symlink_to(self.instance.munge_socket)
        super()._start_daemons(ports)

    def stop(self) -> None:
        super().stop()
        if _MUNGE.is_symlink():
            _MUNGE.unlink()


def test_without_slurm_conf() -> None:
    with contextlib.suppress(FileNotFoundError):
        if _MUNGE.exists():
            pytest.skip(f"{_MUNGE}: this machine has its own munge")
        _MUNGE.unlink()  # of tests that were killed
    settings = "SlurmctldParameters=enable_configless\n"
    with Configless(nodes=2, settings=settings) as cluster, at_work(cluster, "site") as user:
        completes(user)
        assert "ok: sbatch accepts a job of this profile" in user.zslurm("cluster", "check")


def test_nodes_hidden_from_users() -> None:
    with site("PrivateData=nodes,jobs,usage,users,accounts,reservations\n") as user:
        profile = user.zslurm("init", "--yes", "--no-probe")
        assert "which the site does not show to users (PrivateData=nodes)" in profile
        assert "\n  # gpus_per_node: 8" in profile
        add_to_profile(user.cluster, "  gpus_per_node: 8\n")
        completes(user)
        checked = user.zslurm("cluster", "check")
        assert "ok: sbatch accepts a job of this profile" in checked


def test_jobs_that_slurm_does_not_requeue_by_itself() -> None:
    """JobRequeue=0 is the default of jobs that do not ask; zslurm asks."""
    with site("JobRequeue=0\n", nodes=3) as user:
        user.zslurm("submit", user.write_run("run", nodes=1, steps=100_000))
        user.wait_for_step("run", 1)
        job = user.state("run")["job_id"]
        assert "Requeue=1" in user.cluster.run(["scontrol", "show", "job", job]).stdout
        user.zslurm("cancel", "run", "--wait")


_WANTS_ACCOUNT = """\
function slurm_job_submit(job_desc, part_list, submit_uid)
    if job_desc.account == nil then
        slurm.log_user("name an account with --account")
        return slurm.ERROR
    end
    return slurm.SUCCESS
end
function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
    return slurm.SUCCESS
end
"""


class ReservesCores(SlurmCluster):
    """A cluster whose nodes keep eight of their 32 cores for the system."""

    def _start_daemons(self, ports: Ports) -> None:
        written = config_files._slurm_conf

        def text(*arguments: Any) -> str:
            return written(*arguments).replace("ThreadsPerCore=1", "ThreadsPerCore=1 CoreSpecCount=8")

        with patch.object(config_files, "_slurm_conf", text):
            super()._start_daemons(ports)


def test_a_site_that_keeps_cores_for_the_system() -> None:
    """A node has eight GPUs, so that a rank gets three cores and not four, for which no node would do."""
    with ReservesCores(nodes=2) as cluster, at_work(cluster, "site") as user:
        profile = user.zslurm("init", "--yes", "--no-probe")
        assert "  cpus_per_node: 24       # sbatch takes no more of Slurm's 32 for a rank on each GPU" in profile
        run_file = user.write_run("run", nodes=1, ranks_per_node=8)
        run_file.write_text(run_file.read_text().replace('"global_batch": 6', '"global_batch": 8'))
        user.zslurm("submit", run_file)
        assert user.wait_for_state("run", "completed", "failed")["state"] == "completed"


def test_a_plugin_that_refuses_jobs_without_an_account() -> None:
    with site("JobSubmitPlugins=lua\n", {"job_submit.lua": _WANTS_ACCOUNT}) as user:
        code, message = user.fails("submit", user.write_run("run"))
        assert code == 1
        assert len(message.strip().splitlines()) == 1, message
        assert "name an account with --account" in message
        completes(user, "run", "--account", "physics")


def test_enforced_associations_and_limits() -> None:
    settings = "AccountingStorageEnforce=associations,limits,qos\n"
    with SlurmCluster(nodes=2, accounting=True, settings=settings) as cluster:
        user_name = cluster.user.pw_name
        manage = ["sacctmgr", "--immediate"]
        cluster.run_as_root([*manage, "add", "account", "physics"])
        cluster.run_as_root([*manage, "add", "user", user_name, "account=physics", "MaxSubmitJobs=1"])
        with at_work(cluster, "site") as user:
            asked = ["sbatch", "--test-only", "--wrap=true"]
            wait_for(lambda: cluster.run(asked, check=False).returncode == 0, "slurmctld to know the account")
            code, message = user.fails("submit", user.write_run("other"), "--account", "chemistry")
            assert (code, len(message.strip().splitlines())) == (1, 1), message
            assert "Invalid account" in message
            user.zslurm("submit", user.write_run("first", steps=100_000))
            user.wait_for_step("first", 1)
            code, message = user.fails("submit", user.write_run("second"))
            assert (code, len(message.strip().splitlines())) == (1, 1), message
            assert "AssocMaxSubmitJobLimit" in message or "accounting/QOS policy" in message, message
            user.zslurm("cancel", "first", "--wait")


@pytest.mark.parametrize("missing", ["sacct", "scontrol"])
def test_nodes_or_login_nodes_without_a_command(missing: str) -> None:
    with site() as user:
        programs = user.directory / "programs"
        programs.mkdir()
        for path in Path("/usr/bin").iterdir():
            if path.name not in (missing, "squeue" if missing == "scontrol" else missing):
                (programs / path.name).symlink_to(path)
        if missing == "scontrol":  # on compute nodes alone
            add_to_profile(user.cluster, f"  setup: ['export PATH={programs}']\n")
            completes(user)
            return
        run_file, env = user.write_run("run"), {"PATH": str(programs)}
        user.cluster.zslurm("submit", run_file, cwd=user.directory, env=env)
        status = ("status", "run", "--json")
        wait_for(
            lambda: '"completed"' in user.cluster.zslurm(*status, cwd=user.directory, env=env).stdout,
            "the run to complete",
        )


def test_steps_managed_on_the_node() -> None:
    """A rank dies while squeue lists none of a job's steps: the others are ended, and the run continues."""
    needs((24, 5, 0), "enable_stepmgr")
    with site("SlurmctldParameters=enable_stepmgr\nPrologFlags=Contain\n") as user:
        user.zslurm("submit", user.write_run("run", steps=100_000))
        user.wait_for_step("run", 5)
        rank_process(user, "run", 1).kill()
        wait_for(lambda: any(row["attempt"] == 2 for row in user.steps("run")), "the second attempt")
        user.zslurm("cancel", "run", "--wait")


_TOPOLOGY = """\
- topology: tree
  cluster_default: true
  tree:
    switches:
      - {switch: spine, children: 'leaf[0-1]'}
      - {switch: leaf0, nodes: 'node[0,2]'}
      - {switch: leaf1, nodes: 'node[1,3]'}
- topology: blocks
  cluster_default: false
  block:
    block_sizes: [2]
    blocks:
      - {block: b0, nodes: 'node[0,3]'}
      - {block: b1, nodes: 'node[1-2]'}
"""


def test_several_topologies() -> None:
    """Ranks follow the topology of the partition."""
    needs((25, 5, 0), "topology.yaml")
    settings = "PartitionName=blocks Nodes=ALL Topology=blocks\n"
    with site(settings, {"topology.yaml": _TOPOLOGY}, nodes=4) as user:
        assert "# Topology: tree, 2 leaf switches:" in user.zslurm("init", "--yes", "--no-probe")
        client = SlurmClient(user.cluster.environment)
        assert client.topology_of("blocks").leaves == {"b0": ["node0", "node3"], "b1": ["node1", "node2"]}
        for partition, order in (("batch", [0, 2, 1, 3]), ("blocks", [0, 3, 1, 2])):
            run_file = user.write_run(partition, steps=2, nodes=4)
            user.zslurm("submit", run_file, "--partition", partition)
            assert user.wait_for_state(partition, "completed", "failed")["state"] == "completed"
            ends = sorted((user.directory / "runs" / partition / "attempts/000001/ranks").glob("*.json"))
            assert [json.loads(path.read_text())["node"] for path in ends] == [f"node{index}" for index in order]
