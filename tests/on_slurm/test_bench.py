"""`zslurm bench` as a job on a real Slurm: CPUs and gloo between the nodes."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import bench, forked
from tests.checkout import ROOT
from tests.on_slurm.cluster.as_user import COMMAND_EVERY_S
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.on_slurm.cluster.user import User, at_work
from tests.waiting import DEADLINE_S, wait_for
from zslurm.bench.result import PARTIAL, BenchResult, read_result
from zslurm.bench.run.launch import JOB_PREFIX
from zslurm.core.errors import Exit

pytestmark = pytest.mark.slurm

BENCH = ("bench", "collectives", "--ranks", "2")


@pytest.fixture
def user(slurm_cluster: SlurmCluster) -> Iterator[User]:
    with at_work(slurm_cluster, "bench-test") as user:
        yield user


def forks(user: User, *, shortly: bool = False) -> dict[str, str]:
    """Variables with which ranks are forked; those that measure `shortly` end soon."""
    modules = [*forked.RANKS, *forked.OTHERS]
    if not shortly:
        return user.cluster.forking(modules, torch=True)
    in_ranks = user.cluster.installation().sources / bench.IN_RANKS.relative_to(ROOT)
    return user.cluster.forking(modules, {"PYTHONPATH": str(in_ranks)}, torch=True, customized=True)


def started(user: User, *arguments: str) -> subprocess.Popen[str]:
    """The command in the background, on so many points that it does not end by itself."""
    account = user.cluster.user
    argv = [str(user.cluster.installation().python), "-P", "-m", "zslurm", *BENCH, *arguments]
    return subprocess.Popen(
        argv, env=user.cluster.environment | forks(user), cwd=user.directory, user=account.pw_uid,
        group=account.pw_gid, extra_groups=[], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        # Tests that run in the background of a shell are born deaf to it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def wait_for_rows(file: Path) -> None:
    partial = file.with_name(file.name + PARTIAL)
    wait_for(lambda: partial.exists() and len(partial.read_text().splitlines()) > 2, "the first rows")


def queue(user: User) -> str:
    return user.cluster.run(["squeue", "--noheader", "--states=all", "--format=%j %T"]).stdout


def jobs_left(user: User) -> bool:
    return any(JOB_PREFIX in line and "RUNNING" in line for line in queue(user).splitlines())


def test_two_nodes_measure_whole_groups_and_rails_in_one_and_two_levels(user: User) -> None:
    words = ["--nodes", "2", "--min", "64KiB", "--max", "64KiB", "--out", "result.json"]
    words += ["--operation", "all_reduce", "--operation", "all_gather"]
    env = forks(user, shortly=True)
    done = user.cluster.zslurm(*BENCH, *words, env=env, cwd=user.directory, check=False)
    assert done.returncode == Exit.DONE, done.stderr
    result = read_result(user.directory / "result.json")
    assert (result.complete, len(result.machine.nodes), result.machine.ranks) == (True, 2, 4)
    assert result.versions["slurm"]
    found = {(row["operation"], row["scope"], row["levels"], row["ranks"], row["where"]) for row in result.rows}
    first, second = result.machine.nodes
    for operation in ("all_reduce", "all_gather"):
        assert {(operation, "node", "flat", 2, first), (operation, "node", "flat", 2, second)} <= found
        assert {(operation, "all", "flat", 4, ""), (operation, "all", "two_level", 4, "")} <= found
        assert {(operation, "rail", "flat", 2, "rail 0"), (operation, "rail", "flat", 2, "rail 1")} <= found
    assert {row["data"] for row in result.rows} == {"right"}
    assert not jobs_left(user)


def test_a_node_that_is_killed_leaves_a_part_of_the_result_and_is_named(user: User) -> None:
    out = user.directory / "lost.json"
    command = started(user, "--nodes", "2", "--out", str(out))
    wait_for_rows(out)
    victim = json.loads(out.with_name(out.name + PARTIAL).read_text().splitlines()[0])["machine"]["nodes"][1]
    user.cluster.kill_node(victim)
    _, err = command.communicate(timeout=DEADLINE_S)
    assert command.returncode == Exit.INTERRUPTED, err
    assert f"not complete: 1 node lost: {victim} does not answer any more" in err
    result = read_result(out)
    assert (result.complete, result.lost_nodes) == (False, [victim])
    assert result.rows
    wait_for(lambda: not jobs_left(user), "the job to be gone", every_s=COMMAND_EVERY_S)


def test_ctrl_c_cancels_the_job_and_keeps_what_was_measured(user: User) -> None:
    out = user.directory / "stopped.json"
    command = started(user, "--nodes", "1", "--out", str(out))
    wait_for_rows(out)
    command.send_signal(signal.SIGINT)
    _, err = command.communicate(timeout=DEADLINE_S)
    assert command.returncode == Exit.INTERRUPTED, err
    assert "not complete: stopped by Ctrl-C" in err
    result: BenchResult = read_result(out)
    assert (result.complete, bool(result.rows), result.lost_nodes) == (False, True, [])
    wait_for(lambda: not jobs_left(user), "the job to be gone", every_s=COMMAND_EVERY_S)


def test_a_calibration_whose_job_is_cancelled_continues_on_other_nodes(user: User) -> None:
    """One whole job: memory is kept before the end, collectives are measured by the same command afterwards."""
    words = ["calibrate", "zaya1-tiny", "--ranks", "1", "--only", "memory", "--only", "collectives"]
    words += ["--out", "lab.json", "--nodes", "2"]
    account = user.cluster.user
    argv = [str(user.cluster.installation().python), "-P", "-m", "zslurm", *words, "--time", "20"]
    command = subprocess.Popen(
        argv, env=user.cluster.environment | forks(user), cwd=user.directory, user=account.pw_uid,
        group=account.pw_gid, extra_groups=[], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    store = user.directory / "lab.json"
    wait_for(lambda: store.exists() and '"memory"' in store.read_text(), "the first part", every_s=COMMAND_EVERY_S)
    job_id = user.cluster.run(["squeue", "--noheader", "--name=zslurm-calibrate-zaya1-tiny", "--format=%i"]).stdout
    user.cluster.run(["scancel", job_id.strip()])
    _, err = command.communicate(timeout=DEADLINE_S)
    assert command.returncode == Exit.INTERRUPTED, err
    assert "interrupted; " in err and "the same command continues" in err
    env = forks(user, shortly=True)
    done = user.cluster.zslurm(*words, "--time", "0.3", "--json", env=env, cwd=user.directory, check=False)
    assert done.returncode == Exit.DONE, done.stderr
    assert "measured before: memory" in done.stderr and "[2/2] collectives" in done.stderr
    facts = json.loads(done.stdout)
    assert {name: part["complete"] for name, part in facts["parts"].items()} == {
        "memory": True,
        "collectives": True,
    }
    assert read_result(user.directory / "lab.results" / "collectives.json").machine.ranks == 2


def test_nodes_that_are_not_there_are_refused(user: User) -> None:
    code, err = user.fails(*BENCH, "--nodelist", "node[0,77]")
    assert (code, err.splitlines()) == (
        Exit.NOT_FOUND,
        ["zslurm: node77: Slurm has no such node; its nodes: node[0-7]"],
    )
    code, err = user.fails(*BENCH, "--nodes", "99")
    assert (code, "--nodes 99: of the 8 nodes" in err) == (Exit.USAGE, True)
