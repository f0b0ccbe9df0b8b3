"""Each rank gets the cores of its GPU's NUMA node: by the profile, else by sysfs, and never none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fake_sysfs import FakeNode, mi300x_pollara
from tests.submit.specs import run_spec
from zslurm.job.numa_bind import SHARING_VARIABLE, VARIABLE, bind_variable
from zslurm.job.preparation.interpreter import Interpreter
from zslurm.job.step import local_step, slurm_step
from zslurm.run.run_dir import RunDir

MINE = sorted(os.sched_getaffinity(0))
# Binds itself, as a rank does, and tells its cores.
PROGRAM = """
import json, os, sys
from zslurm.job.numa_bind import bind
found = [bind(os.environ), sorted(os.sched_getaffinity(0))]
if sys.argv[1:]:  # imports torch
    from zslurm.train.parallel.world import cpu_threads
    found.append(cpu_threads(0))
print(json.dumps(found))
"""

pytestmark = pytest.mark.skipif(len(MINE) < 2, reason="needs two cores")


@pytest.fixture
def node(tmp_path: Path) -> FakeNode:
    """GPUs 0 to 3 are on NUMA node 0 with this machine's first core, 4 to 7 on node 1 with its last."""
    node = mi300x_pollara(tmp_path / "root")
    for numa, core in ((0, MINE[0]), (1, MINE[-1])):
        node.write(f"sys/devices/system/node/node{numa}/cpulist", f"{core},{10_000 + numa}-{10_007 + numa}")
    return node


def rank(node: FakeNode, local_rank: int, *more: str, **environ: str) -> list[Any]:
    """What a rank prints, its cores and, with "threads", how many it takes."""
    base = {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": "8", "ZSLURM_SYSROOT": str(node.root)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *more],
        env=os.environ | base | environ,
        capture_output=True,
        text=True,
        check=True,
    )
    return list(json.loads(done.stdout))


def test_a_rank_gets_the_cores_of_its_gpus_numa_node(node: FakeNode) -> None:
    for local_rank, numa, core in ((0, 0, MINE[0]), (7, 1, MINE[-1])):
        expected = [f"bound to NUMA node {numa} of its GPU: 1 core", [core]]
        assert rank(node, local_rank, **{VARIABLE: "auto"}) == expected


def test_a_bound_rank_takes_as_many_threads_as_it_has_cores(node: FakeNode) -> None:
    assert rank(node, 0, "threads", **{VARIABLE: "auto"})[1:] == [[MINE[0]], 1]


def test_the_profile_wins_over_sysfs(node: FakeNode) -> None:
    assert rank(node, 0, **{VARIABLE: "1,1,1,1,0,0,0,0"})[1] == [MINE[-1]]


def test_gpus_are_counted_as_the_step_sees_them(node: FakeNode) -> None:
    given = {VARIABLE: "auto", "ROCR_VISIBLE_DEVICES": "4,5,6,7"}
    assert rank(node, 0, **given)[1] == [MINE[-1]]
    assert rank(node, 0, **given | {"ROCR_VISIBLE_DEVICES": "GPU-uuid"})[1] == [MINE[0]]


def test_without_cores_of_that_node_nothing_is_bound_and_the_log_has_it(node: FakeNode) -> None:
    node.write("sys/devices/system/node/node1/cpulist", "10000-10007")
    said, cores = rank(node, 7, **{VARIABLE: "auto"})
    assert cores == MINE
    assert said == "not bound to NUMA node 1 of its GPU: the Slurm step has none of that node's cores"


def test_where_nothing_is_known_or_asked_nothing_is_done(node: FakeNode, tmp_path: Path) -> None:
    assert rank(node, 0) == [None, MINE]
    assert rank(FakeNode(tmp_path / "empty"), 0, **{VARIABLE: "auto"}) == [None, MINE]
    virtual = mi300x_pollara(tmp_path / "vm", layout="no tree")
    assert rank(virtual, 0, **{VARIABLE: "auto"}) == [None, MINE]


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, {VARIABLE: "auto"}),
        ({"cluster": {"gpu_numa": [0, 0, 0, 0, 1, 1, 1, 1]}}, {VARIABLE: "0,0,0,0,1,1,1,1"}),
        ({"slurm": {"cpu_bind": "cores"}}, {}),
        ({"slurm": {"cpu_bind": "none"}}, {}),
        ({"parallel": {"device": "cpu"}}, {}),
        ({"cluster": {"launcher": "local"}}, {}),
        ({"cluster": {"gpus_per_node": 0}}, {}),
    ],
    ids=str,
)
def test_which_runs_bind_their_ranks(
    tmp_path: Path, sections: dict[str, dict[str, Any]], expected: dict[str, str]
) -> None:
    cluster = {"launcher": "slurm", "gpus_per_node": 8} | sections.get("cluster", {})
    spec = run_spec(tmp_path, **{**sections, "cluster": cluster})
    assert bind_variable(spec) == expected
    run = RunDir(tmp_path / "run")
    python = Interpreter.own({"PATH": "/bin"})
    plan = slurm_step(spec, run, run.attempt(1), python, ["node0"])
    assert {name: value for name, value in plan.env.items() if name in (VARIABLE, SHARING_VARIABLE)} == expected
    assert VARIABLE not in local_step(spec, run, run.attempt(1), python).env
