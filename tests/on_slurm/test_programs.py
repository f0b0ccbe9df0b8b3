"""Runs whose trainer is another program, on a real Slurm: what the ranks get, how they stop, what they survive."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import programs
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.on_slurm.cluster.user import ENDLESS, User, at_work
from tests.on_slurm.test_environments import container
from tests.waiting import wait_for
from zslurm.run.run_dir import RunDir
from zslurm.slurm.hostlist import expand

pytestmark = pytest.mark.slurm

STEPS = 30


@pytest.fixture
def user(slurm_cluster: SlurmCluster) -> Iterator[User]:
    with at_work(slurm_cluster, "programs-test") as person:
        yield person


def write(
    user: User,
    name: str,
    *words: str,
    command: list[str] | None = None,
    trainer: dict[str, Any] | None = None,
    **sections: Any,
) -> Path:
    """A run file of a run without GPUs, with the program of tests/programs or with another command."""
    changes = (trainer or {}) | ({"command": command} if command else {})
    sections = {"steps": STEPS, "parallel": {"device": "cpu"}} | sections
    return user.write_run(name, *words, trainer_section=changes, **sections)


def decisions(user: User, run: str) -> list[tuple[str, str | None]]:
    made = [event for event in user.events(run) if event["event"] == "decision"]
    return [(event["action"], event.get("root", {}).get("kind")) for event in made]


def saved(user: User, run: str) -> int:
    return programs.saved_step(RunDir(user.directory / "runs" / run))


def test_ranks_get_torchruns_variables_the_networks_rules_and_their_own(user: User) -> None:
    """By the command line alone, without a file; the exit code of `--wait` is the program's."""
    script = user.directory / "show.py"
    script.write_text(
        "import json, os, pathlib, socket\n"
        "here = dict(os.environ)\n"
        "here['resolved'] = socket.gethostbyname(here['MASTER_ADDR'])\n"
        "pathlib.Path(f\"rank-{here['RANK']}.json\").write_text(json.dumps(here))\n"
    )
    words = ["--nodes", "2", "--time", "10", "--set", "slurm.ranks_per_node=2", "--set", "trainer.env.LR=1e-3"]
    out = user.zslurm("submit", *words, "--wait", "--", "python3", "show.py", "--config", "x")
    assert user.state("show")["state"] == "completed", out
    ranks = [json.loads((user.directory / f"rank-{rank}.json").read_text()) for rank in range(4)]
    names = "RANK LOCAL_RANK GROUP_RANK NODE_RANK WORLD_SIZE LOCAL_WORLD_SIZE NNODES LR ZSLURM_ATTEMPT".split()
    assert [[env[name] for name in names] for env in ranks] == [
        [str(rank), str(rank % 2), str(rank // 2), str(rank // 2), "4", "2", "2", "0.001", "1"]
        for rank in range(4)
    ]
    assert len({(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in ranks}) == 1
    rules = {row["name"]: row["value"] for row in json.loads(user.zslurm("cluster", "env", "--json"))}
    chosen = {name: value for name, value in rules.items() if name.startswith(("NCCL_", "RCCL_", "HSA_"))}
    assert chosen, "the profile of the cluster has rails"
    assert all({name: env.get(name) for name in chosen} == chosen for env in ranks)
    assert "PYTHONSAFEPATH" not in ranks[0]
    shown = user.zslurm("status", "show")
    assert "no steps (zslurm.progress.step was not called" in " ".join(shown.split())


def test_all_ranks_are_asked_by_the_signal_that_the_program_wants_and_continue_after_a_requeue(user: User) -> None:
    user.zslurm("submit", write(user, "stops", steps=ENDLESS, forked_ranks=False))
    user.wait_for_step("stops", 5)
    user.zslurm("requeue", "stops", "--now")
    wait_for(lambda: any(row["attempt"] == 2 for row in user.steps("stops")), "the second attempt to take a step")
    first = next(row["step"] for row in user.steps("stops") if row["attempt"] == 2)
    assert first == user.stopped_at("stops") + 1, "it saved where it was asked to stop"
    user.zslurm("cancel", "stops", "--wait")
    state = user.state("stops")
    assert (state["state"], state["attempt"]) == ("cancelled", 2)
    assert saved(user, "stops") >= user.stopped_at("stops", 2)
    for attempt in ("000001", "000002"):
        ends = (user.directory / "runs/stops/attempts" / attempt / "ranks").glob("*.json")
        assert [json.loads(path.read_text())["exit_code"] for path in ends] == [75, 75]


def test_a_lost_node_is_replaced_by_a_spare_and_the_program_continues_from_what_it_saved(user: User) -> None:
    slurm = {"spares": 1}
    trainer = {"env": {"STEP_S": "0.05"}}
    cluster = {"gpus_per_node": 0}  # a check of the spare would miss the GPUs
    run = write(user, "lost", steps=150, slurm=slurm, trainer=trainer, cluster=cluster)
    user.zslurm("submit", run)
    user.wait_for_step("lost", 25)
    victim = json.loads((user.directory / "runs/lost/attempts/000001/attempt.json").read_text())["nodes"]
    user.cluster.kill_node(expand(victim)[-1])
    state = user.wait_for_state("lost", "completed", "failed")
    assert (state["state"], state["attempt"], state["checkpoint_step"]) == ("completed", 2, 150), state
    assert ("swap", "node_dead") in decisions(user, "lost")
    assert min(row["step"] for row in user.steps("lost") if row["attempt"] == 2) > 20


def test_a_lost_node_is_noticed_without_any_sign_of_the_program(user: User) -> None:
    cluster = {"gpus_per_node": 0}
    trainer = {"checkpoints": None, "steps": None}
    command = ["sh", "-c", "[ {attempt} != 1 ] || sleep 1000"]
    run = write(user, "mute", command=command, slurm={"spares": 1}, trainer=trainer, cluster=cluster)
    user.zslurm("submit", run)
    wait_for(lambda: any(e["event"] == "agents_started" for e in user.events("mute")), "the agents to start")
    user.cluster.kill_node(user.nodes_of("mute")[1])
    state = user.wait_for_state("mute", "completed", "failed")
    assert (state["state"], state["attempt"]) == ("completed", 2), state
    assert decisions(user, "mute") == [("swap", "node_dead")]


def test_a_hang_is_found_by_a_log_that_grows_no_more(user: User) -> None:
    """The program calls nothing of ours. Rank 0 prints, and waits for rank 1, which stops."""
    line = (
        'if [ "$RANK$ZSLURM_ATTEMPT" = 11 ]; then sleep 999; fi; '
        'if [ "$RANK" = 1 ]; then touch there; exit; fi; '
        "for i in 1 2 3; do echo $i; sleep 0.2; done; until [ -e there ]; do sleep 0.1; done"
    )
    limits = {"hang": {"step_s": 6.0}, "sensors": {"progress_s": 0.5}}
    trainer = {"progress": {"grows": "log"}, "checkpoints": None, "steps": None}
    user.zslurm("submit", write(user, "quiet", command=["sh", "-c", line], aegis=limits, trainer=trainer))
    state = user.wait_for_state("quiet", "completed", "failed")
    assert (state["state"], state["attempt"]) == ("completed", 2), state
    assert decisions(user, "quiet") == [("restart", "rank_hang")]


def test_an_error_reaches_slurm_wait_why_and_what_depends_on_the_run(user: User) -> None:
    run = write(user, "wrong", "raise:3:1:*", aegis={"retries": 0})
    code, messages = user.fails("submit", run, "--wait")
    assert (code, "ValueError: a matrix has the wrong shape" in messages) == (93, True)
    answer = user.zslurm("why", "wrong")
    assert "ValueError: a matrix has the wrong shape" in " ".join(answer.split())
    assert "a matrix has the wrong shape" in user.zslurm("logs", "wrong", "--errors")
    after = write(user, "after", slurm={"flags": {"kill-on-invalid-dep": "yes"}})
    user.zslurm("submit", after, "--dependency", "wrong")
    assert user.wait_for_state("after", "cancelled", "completed")["state"] == "cancelled"


def test_a_sweep_of_programs_runs_one_after_the_other(user: User) -> None:
    command = ["sh", "-c", 'echo "lr=$LR into {output_dir}"; touch {output_dir}/done-$LR']
    run = write(user, "swept", command=command, nodes=1)
    user.zslurm("submit", run, "--sweep", "trainer.env.LR=1e-3,3e-4", "--max-concurrent", "1")
    for name, value in (("swept-LR1e-3", "0.001"), ("swept-LR3e-4", "0.0003")):
        assert user.wait_for_state(name, "completed", "failed")["state"] == "completed"
        assert f"lr={value}" in user.zslurm("logs", name)
        assert (user.directory / "runs" / name / "output" / f"done-{value}").exists()


def test_a_program_runs_in_a_container(user: User) -> None:
    apptainer, cluster = container(user)
    user.zslurm("submit", write(user, "inside", forked_ranks=False, cluster=cluster))
    state = user.wait_for_state("inside", "completed", "failed")
    assert (state["state"], state["step"]) == ("completed", STEPS), state
    inside = [call for call in apptainer.calls if "zslurm.job.program.rank" in call["command"]]
    assert sorted(call["rank"] for call in inside) == ["0", "1"]
    assert all(any(str(user.directory) in bind for bind in call["binds"]) for call in inside)
