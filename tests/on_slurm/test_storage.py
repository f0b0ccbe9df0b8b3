"""The benchmark of storage on a real Slurm when a node is lost."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator

import pytest

from tests import forked
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.on_slurm.cluster.user import User, at_work
from tests.waiting import DEADLINE_S, wait_for
from zslurm.bench.result import PARTIAL, read_result
from zslurm.checkpoint_tools.quantities import show_count
from zslurm.core.errors import Exit

pytestmark = pytest.mark.slurm

ENDLESS = 10**6
SIZES = ("--ranks", "1", "--size", "8MiB", "--checkpoint-size", "8MiB", "--files", "50")


@pytest.fixture
def user(slurm_cluster: SlurmCluster) -> Iterator[User]:
    with at_work(slurm_cluster, "storage-test") as user:
        yield user


def forks(user: User) -> dict[str, str]:
    return user.cluster.forking([*forked.RANKS, *forked.OTHERS], torch=True)


def test_two_nodes_measure_storage_and_leave_nothing(user: User) -> None:
    place, out = user.directory / "place", user.directory / "result.json"
    user.cluster.run(["mkdir", str(place)])
    words = ("bench", "storage", "--path", str(place), "--nodes", "2", "--quick", *SIZES, "--out", str(out))
    done = user.cluster.zslurm(*words, env=forks(user), cwd=user.directory, check=False)
    assert done.returncode == Exit.DONE, done.stderr
    result = read_result(out)
    assert result.complete and {(row["nodes"], row["ranks"]) for row in result.rows} == {(2, 2)}
    assert [row["operation"] for row in result.rows][-1] == "checkpoint"
    wait_for(lambda: not list(place.iterdir()), "the directory to be empty")

    user.zslurm("init", "--yes")
    applied = user.cluster.zslurm("bench", "apply", str(out), cwd=user.directory, check=True)
    pages = max(row["pages_per_s"] for row in result.rows if row.get("pages_per_s"))
    assert "storage_iops" in (applied.stdout + applied.stderr)
    words = ("plan", "io", str(user.write_run("measured", trainer="real")), "--step-time", "0.5")
    planned = user.cluster.zslurm(*words, cwd=user.directory, check=True)
    assert f"budget: {show_count(pages)} pages/s" in planned.stderr


def test_a_node_lost_in_mid_benchmark_leaves_a_part_of_the_result_and_no_files(user: User) -> None:
    place, out = user.directory / "place", user.directory / "result.json"
    user.cluster.run(["mkdir", str(place)])
    account = user.cluster.user
    depths = [word for depth in range(1, 65) for word in ("--depth", str(depth))]  # three seconds each
    argv = [
        str(user.cluster.installation().python),
        "-P",
        "-m",
        "zslurm",
        "bench",
        "storage",
        "--path",
        str(place),
    ]
    bench = subprocess.Popen(
        [*argv, "--nodes", "2", *SIZES, *depths, "--out", str(out)], cwd=user.directory,
        env=user.cluster.environment | forks(user), user=account.pw_uid, group=account.pw_gid, extra_groups=[],
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    partial = out.with_name(out.name + PARTIAL)
    wait_for(lambda: partial.exists() and len(partial.read_text().splitlines()) > 2, "the first rows")
    victim = json.loads(partial.read_text().splitlines()[0])["machine"]["nodes"][1]
    user.cluster.kill_node(victim)
    _, err = bench.communicate(timeout=DEADLINE_S)
    assert bench.returncode == Exit.INTERRUPTED, err
    result = read_result(out)
    assert (result.complete, result.lost_nodes) == (False, [victim])
    assert result.rows
    wait_for(lambda: not list(place.iterdir()), "the directory to be empty")
