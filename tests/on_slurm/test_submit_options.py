"""Options of submit on a real Slurm: what jobs wait for, spares, exports, secrets, estimates, commands as jobs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.on_slurm.cluster.user import ENDLESS, User, at_work
from tests.waiting import wait_for
from zslurm.slurm.hostlist import expand

pytestmark = pytest.mark.slurm

TOKEN = "hf_" + "AbCd" * 8 + "xY"


@pytest.fixture
def user(slurm_cluster: SlurmCluster) -> Iterator[User]:
    with at_work(slurm_cluster, "options-test") as person:
        yield person


def job(user: User, job_id: str) -> dict[str, str]:
    """What scontrol says of a job."""
    text = user.cluster.run(["scontrol", "--oneliner", "show", "job", job_id]).stdout
    return dict(word.split("=", 1) for word in text.split() if "=" in word)


def test_a_run_waits_for_the_one_before_and_then_starts(user: User) -> None:
    gate = user.directory / "gate"
    hold = {"setup": [f"until [ -e {gate} ]; do sleep 0.1; done"]}
    user.zslurm("submit", user.write_run("first", steps=4, cluster=hold))
    second = user.write_run("second", steps=4)
    job_id = user.zslurm(
        "submit", "-q", second, "--dependency", "first", "--time", "30", "--", "--comment=two words"
    )
    assert (user.state("second")["state"], user.state("second")["reason"]) == ("pending", "Dependency")
    shown = job(user, job_id)
    assert shown["TimeLimit"] == "00:30:00"
    assert "Comment=two words" in user.cluster.run(["scontrol", "show", "job", job_id]).stdout
    gate.touch()
    assert user.wait_for_state("first", "completed", "failed")["state"] == "completed"
    assert user.wait_for_state("second", "completed", "failed")["state"] == "completed"


def test_a_sweep_runs_one_member_after_the_other(user: User) -> None:
    run_file = user.write_run("sweep", steps=4, nodes=1)
    arguments = ("--sweep", "run.seed=1,2,3", "--max-concurrent", "1", "--json")
    rows = json.loads(user.zslurm("submit", run_file, *arguments))
    assert [row["run"] for row in rows] == ["sweep-seed1", "sweep-seed2", "sweep-seed3"]
    for before, row in itertools.pairwise(rows):
        assert f"afterany:{before['job_id']}" in job(user, row["job_id"])["Dependency"]
    for row in rows:
        assert user.wait_for_state(row["run"], "completed", "failed")["state"] == "completed"


def test_a_job_with_a_spare_outlives_a_node_that_the_ranks_do_not_use(user: User) -> None:
    run_file = user.write_run("spared", steps=ENDLESS, nodes=2)
    job_id = user.zslurm("submit", "-q", run_file, "--spares", "1")
    user.wait_for_step("spared", 2)
    assert job(user, job_id)["NumNodes"] == "3"
    nodes = user.nodes_of("spared")
    assert len(nodes) == 3
    used = user.cluster.run(
        ["squeue", "--steps", "--noheader", f"--jobs={job_id}", "--Format=StepName:20,Nodes:20"]
    )
    (attempt,) = [line.split() for line in used.stdout.splitlines() if "attempt-1" in line]
    assert expand(attempt[1]) == nodes[:2]
    user.cluster.kill_node(nodes[2], noticed_at_once=True)
    reached = user.steps("spared")[-1]["step"]
    user.wait_for_step("spared", reached + 20)
    assert user.state("spared")["state"] == "running"
    user.zslurm("cancel", "spared", "--wait")


def test_a_secret_reaches_the_job_and_nothing_that_others_see(user: User) -> None:
    seen = user.directory / "seen"
    cluster = {"env": {"HF_TOKEN": TOKEN}, "setup": [f'printf %s "$HF_TOKEN" > {seen}']}
    job_id = user.zslurm("submit", "-q", user.write_run("secret", steps=4, cluster=cluster))
    kept = user.cluster.run(["scontrol", "write", "batch_script", job_id, "-"]).stdout
    assert TOKEN not in kept
    assert "secrets.env" in kept
    assert user.wait_for_state("secret", "completed", "failed")["state"] == "completed"
    assert seen.read_text() == TOKEN
    run = user.directory / "runs" / "secret"
    holders = [path.name for path in run.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert holders == ["secrets.env"]


@pytest.mark.parametrize(("export", "reaches"), [("ALL", True), ("PATH,SLURM_CONF,OTHER", False)])
def test_the_export_policy_is_slurms(user: User, export: str, reaches: bool) -> None:
    seen = user.directory / "seen"
    cluster = {"setup": [f'echo "${{LOGIN_ONLY:-nothing}} ${{OTHER:-nothing}}" > {seen}']}
    run_file = user.write_run("exports", steps=4, nodes=1, slurm={"export": export}, cluster=cluster)
    user.cluster.zslurm("submit", run_file, cwd=user.directory, env={"LOGIN_ONLY": "a", "OTHER": "b"})
    assert user.wait_for_state("exports", "completed", "failed")["state"] == "completed"
    assert seen.read_text() == f"{'a' if reaches else 'nothing'} b\n"


def preview(user: User, *arguments: Any) -> dict[str, Any]:
    return dict(json.loads(user.zslurm("submit", *arguments, "--dry-run", "--json")))


def test_a_dry_run_asks_slurm_when_it_would_start_and_submits_nothing(user: User) -> None:
    run_file = user.write_run("looks")
    start = preview(user, run_file)["start"]
    assert len(expand(start["nodes"])) == 2
    assert start["partition"] == "batch"
    assert start["words"].startswith("about 20")
    assert "start: about" in user.zslurm("submit", run_file, "--dry-run")
    assert user.cluster.run(["squeue", "--noheader"]).stdout == ""
    refused = preview(user, run_file, "--nodes", "3", "--exclude", "node[0-6]")["start"]
    assert refused["words"].startswith("never; ")


def test_a_command_runs_as_a_job_with_its_output_and_its_exit_code(user: User) -> None:
    user.zslurm("submit", user.write_run("checked", nodes=1, trainer="real"))
    assert user.wait_for_state("checked", "completed", "failed")["state"] == "completed"
    verify = ("checkpoint", "verify", "checked", "--slurm", "--json")
    done = user.cluster.zslurm(*verify, cwd=user.directory)
    assert json.loads(done.stdout)
    assert "zslurm checkpoint verify checked --json --workers" in done.stderr
    shard = next((user.directory / "runs" / "checked" / "checkpoints").glob("step-00000012/*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    damaged = user.cluster.zslurm(*verify, cwd=user.directory, check=False)
    assert damaged.returncode == 5
    tools = user.cluster.instance.user / "home" / ".local" / "state" / "zslurm" / "tools"
    wait_for(lambda: not list(tools.iterdir()), "the files of the jobs to go")
