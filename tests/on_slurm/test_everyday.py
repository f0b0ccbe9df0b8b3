"""The everyday commands on a real Slurm: hold, release, requeue without nodes, exec, logs, events, watch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.on_slurm.cluster.user import ENDLESS, User, at_work, rank_process
from zslurm.slurm.hostlist import compress, expand

pytestmark = pytest.mark.slurm

WAITS = {"flags": {"begin": "now+1hour"}}
FIRST_TWO = {"nodelist": "node[0-1]"}
"""Else which nodes a run gets is Slurm's affair."""


@pytest.fixture
def user(slurm_cluster: SlurmCluster) -> Iterator[User]:
    """The user in a fresh directory with a profile; jobs end and nodes come back."""
    with at_work(slurm_cluster, "everyday-test") as person:
        yield person


def squeue_counted(user: User) -> tuple[Path, dict[str, str]]:
    """A squeue that notes each of its calls, first on the PATH of what is run with these variables."""
    tools, calls = user.directory / "counted", user.directory / "calls"
    user.cluster.run(["mkdir", tools])
    script = f'#!/bin/sh\necho "$@" >> {calls}\nexec {shutil.which("squeue")} "$@"\n'
    user.cluster.run(["sh", "-c", f"cat > {tools}/squeue; chmod +x {tools}/squeue"], input=script)
    return calls, {"PATH": f"{tools}:/usr/local/bin:/usr/bin:/bin"}


def test_requeue_releases_a_run_that_is_held(user: User) -> None:
    user.zslurm("submit", user.write_run("waits", slurm=WAITS))
    assert "BeginTime: must not start before its begin time; start expected " in user.zslurm("status", "waits")
    user.cluster.run(["scontrol", "hold", user.state("waits")["job_id"]])
    state = user.state("waits")
    assert (state["state"], state["reason"]) == ("held", "JobHeldUser")
    assert "`zslurm requeue` lets it start" in state["reason_words"]
    done = user.cluster.zslurm("requeue", "waits", cwd=user.directory)
    assert done.stderr.strip().endswith("of waits was held; it may start now")
    assert user.state("waits")["state"] == "pending"
    user.zslurm("cancel", "waits")
    user.wait_for_state("waits", "cancelled")
    shown = [event["action"] for event in map(json.loads, _json_lines(user, "waits")) if "action" in event]
    assert shown == ["submit", "release", "cancel"]


def _json_lines(user: User, run: str) -> list[str]:
    return user.zslurm("logs", "--events", run, "--json").splitlines()


def test_a_run_is_moved_off_its_nodes_and_the_list_grows(user: User) -> None:
    run_file = user.write_run("moved", steps=ENDLESS)
    job_id = user.zslurm("submit", "-q", run_file)
    user.wait_for_step("moved", 4)
    first, second = user.nodes_of("moved")
    user.zslurm("requeue", "moved", "--exclude", first, "--now")
    state = user.wait_for_state("moved", "running", "failed")
    assert (state["state"], state["job_id"], state["excluded_nodes"]) == ("running", job_id, first)
    assert first not in expand(state["nodes"])
    user.wait_for_step("moved", user.steps("moved")[-1]["step"] + 2)
    more = compress([second, "node7"])
    user.zslurm("requeue", "moved", "--exclude", more)
    state = user.state("moved")
    assert (state["state"], state["excluded_nodes"]) == ("requeued", compress([first, second, "node7"]))
    said = user.cluster.zslurm("requeue", "moved", "--exclude", "node6", cwd=user.directory).stderr
    assert said == f"moved waits on as job {job_id}, without node6\n", "it waits already: only its list grows"
    whole = compress([first, second, "node6", "node7"])
    assert user.state("moved")["excluded_nodes"] == whole
    assert f"  excluded    {whole}" in user.zslurm("status", "moved").splitlines()
    assert f"without {more} from now on" in user.zslurm("logs", "--events", "moved")


def test_nodes_that_cannot_be_excluded_are_refused_before_anything_is_done(user: User) -> None:
    user.zslurm("submit", user.write_run("stays", steps=ENDLESS, slurm=FIRST_TWO))
    user.wait_for_step("stays", 2)
    code, message = user.fails("requeue", "stays", "--exclude", "node[7-9]")
    assert (code, message) == (3, "zslurm: --exclude: the cluster has no node node[8-9]\n")
    code, message = user.fails("requeue", "stays", "--exclude", "node1")
    assert (code, message) == (2, "zslurm: --exclude: the run asks for node1 by name (slurm.nodelist)\n")
    assert user.fails("requeue", "stays", "--exclude", "node[1")[0] == 2
    assert user.fails("requeue", "stays", "--exclude", "")[0] == 2
    assert (user.state("stays")["state"], user.state("stays")["restarts"]) == ("running", 0)


def test_a_command_runs_beside_the_ranks_on_every_node(user: User) -> None:
    user.zslurm("submit", user.write_run("host", steps=ENDLESS, slurm=FIRST_TWO))
    user.wait_for_step("host", 2)
    shown = user.zslurm(
        "exec", "host", "--", "sh", "-c", "echo $SLURMD_NODENAME sees $ROCR_VISIBLE_DEVICES; echo b"
    )
    lines = sorted(shown.splitlines())
    gpus = "0,1,2,3,4,5,6,7"
    assert lines == ["node0: b", f"node0: node0 sees {gpus}", "node1: b", f"node1: node1 sees {gpus}"]
    assert user.zslurm("exec", "host", "--nodelist", "node1", "--", "echo", "a  b; c") == "node1: a  b; c"
    code = "exit $(( SLURM_NODEID * 7 + 2 ))"
    done = user.cluster.zslurm(
        "exec", "host", "--", "sh", "-c", f"echo oh >&2; {code}", cwd=user.directory, check=False
    )
    assert done.returncode == 9, "the worst"
    assert {"node0: oh", "node1: oh"} <= set(done.stderr.splitlines())
    code, message = user.fails("exec", "host", "--nodelist", "node[1-2]", "--", "true")
    assert (code, "runs on node[0-1], not on node2" in message) == (3, True)
    before = user.steps("host")[-1]["step"]
    user.wait_for_step("host", before + 2)
    assert {row["attempt"] for row in user.steps("host")} == {1}, "the ranks noticed nothing"
    user.zslurm("cancel", "host", "--wait")
    assert "only while it is running" in user.fails("exec", "host", "--", "true")[1]


def test_the_logs_of_all_ranks_are_merged_and_the_root_of_a_failure_is_told(user: User) -> None:
    run_file = user.write_run("logged", steps=ENDLESS, ranks_per_node=2, slurm=FIRST_TWO, aegis={"mode": "off"})
    user.zslurm("submit", run_file)
    user.wait_for_step("logged", 4)
    rows = [json.loads(line) for line in user.zslurm("logs", "logged", "--rank", "all", "--json").splitlines()]
    assert [row["time"] for row in rows] == sorted(row["time"] for row in rows)
    steps = [row for row in rows if row["line"].startswith("step ")]
    assert {row["rank"] for row in steps} == {0}
    times = {row["step"]: row["time"] for row in user.steps("logged")}
    for row in steps[:-1]:
        # The note is made within a second after the line, and the machine may be slow.
        assert row["time"] >= times[int(row["line"].split()[1].partition("/")[0])] - 0.5
    assert " rank 0: step 1/" in user.zslurm("logs", "logged", "--rank", "0-3")
    rank_process(user, "logged", rank=3).kill()
    user.wait_for_state("logged", "failed")
    (root, *others) = json.loads(user.zslurm("logs", "logged", "--errors", "--json"))
    assert (root["role"], root["ranks"], root["nodes"], root["line"]) == ("root", [3], "node1", "Killed")
    assert "root" not in {error["role"] for error in others}
    assert "rank 3 on node1: Killed" in user.zslurm("logs", "--events", "logged")


def test_status_of_many_runs_is_one_question_and_a_loop_of_it_too(user: User) -> None:
    for name in ("one", "two", "three"):
        user.zslurm("submit", user.write_run(name, slurm=WAITS))
    calls, environment = squeue_counted(user)
    for _ in range(3):
        shown = user.cluster.zslurm("status", cwd=user.directory, env=environment).stdout
        assert shown.count("\tpending\t") == 3
    asked = calls.read_text().split("\n")[:-1]
    assert 1 <= len(asked) <= 3, "a slow machine may take longer than an answer is young"
    assert all("--user=" in line and "--jobs" not in line for line in asked)
    calls.unlink()
    user.zslurm("cancel", "two")
    shown = user.cluster.zslurm("status", cwd=user.directory, env=environment).stdout
    assert ("two\tcancelled\t" in shown, calls.read_text().count("\n")) == (True, 1)


def test_jobs_that_are_no_runs_are_told_apart(user: User) -> None:
    script = user.directory / "job.sh"
    user.cluster.run(["sh", "-c", f"printf '#!/bin/sh\\nsleep 600\\n' > {script}"])
    own = user.cluster.sbatch("sleep 600", "--job-name", "mine", "--hold", cwd=user.directory)
    array = user.cluster.sbatch("sleep 600", "--array=0-3", "--hold", cwd=user.directory)
    het = user.cluster.run(["sbatch", "--parsable", "--hold", "-N1", ":", "-N1", script], cwd=user.directory)
    het_id = het.stdout.strip()
    other = user.cluster.run_as_root(
        ["sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap=true"]
    ).strip()
    try:
        expected = {
            own: "a job of yours `mine`, pending, and no run of yours",
            f"{array}_0": "a task of a job array, and no run: a run is one plain job (a job of yours",
            f"{array}_[0-3]": "a task of a job array",
            array: "a job of yours",
            f"{het_id}+1": "a part of a heterogeneous job, and no run: a run is one plain job (a job of yours",
            other: "root's job `wrap`, pending, and no run of yours",
            "987654": "no run of yours has this job id",
            "987654_7": "a task of a job array",
        }
        for reference, words in expected.items():
            for command in ("status", "cancel", "requeue"):
                code, message = user.fails(command, reference)
                assert (code, message.count("\n")) == (3, 1)
                assert message.startswith(f"zslurm: {reference}: {words}")
    finally:
        user.cluster.run_as_root(["scancel", other])


def test_a_node_that_another_run_of_the_group_excludes_is_left_out(user: User) -> None:
    directory = user.directory / "group"
    user.cluster.run(["mkdir", directory])
    first, later = "node0", "node7"
    other = {"user": "ann", "run": "/runs/night", "reason": "it died", "since": 1.0}
    config = user.cluster.run(["scontrol", "show", "config"]).stdout
    other["cluster"] = next(line.split()[-1] for line in config.splitlines() if line.startswith("ClusterName"))

    def share(node: str) -> None:
        text = json.dumps(other | {"node": node, "expires": 4e9})
        user.cluster.run(["sh", "-c", f"cat > {directory}/{node}.other.excluded.json"], input=text)

    share(first)
    cluster = {"exclusions": str(directory)}
    run_file = user.write_run("shares", cluster=cluster, slurm=WAITS)
    done = user.cluster.zslurm("submit", run_file, cwd=user.directory)
    assert f"1 node left out, which other runs of the group exclude: {first}" in done.stderr
    assert user.state("shares")["excluded_nodes"] == first
    share(later)  # after Slurm got its list
    user.cluster.run(["scontrol", "update", f"JobId={user.state('shares')['job_id']}", "StartTime=now"])
    assert user.wait_for_state("shares", "completed", "failed")["state"] == "completed"
    assert not {first, later} & set(user.nodes_of("shares"))
    kinds = [event for event in map(json.loads, _json_lines(user, "shares")) if event.get("shared")]
    assert [(event["nodes"], event["reason"]) for event in kinds] == [
        (compress([first, later]), "run night of ann: it died")
    ]
    listed = json.loads(user.zslurm("cluster", "exclude", "ls", "shares", "--json"))
    assert [(row["nodes"], row["by"]) for row in listed if row["by"] == "group"] == [
        (compress([first, later]), "group")
    ]
