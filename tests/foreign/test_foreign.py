"""Real trainers of others on a real Slurm: killed, hanging, out of memory, their node lost.

`make faults` and `make soak` run them. What must become of a run is what the fault matrix
(tests/faults) says of runs of zslurm's own trainer.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests import forked
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.on_slurm.cluster.user import User, at_work
from zslurm.slurm.hostlist import expand

pytestmark = [pytest.mark.slurm, pytest.mark.faults, pytest.mark.timeout(900)]

STEPS, AT = 40, 25
DEADLINE_S = 420.0
TORCHRUN = [
    "-m", "torch.distributed.run", "--nnodes={nodes}", "--node-rank={node_rank}", "--max-restarts=0",
    "--nproc-per-node={ranks_per_node}", "--master-addr={master_addr}", "--master-port={master_port}",
]  # fmt: skip


@dataclass(frozen=True)
class Foreign:
    """A program: its script, what matches its checkpoints, who starts its processes, and whether it is warm."""

    script: str
    checkpoints: str
    torchrun: bool = False
    warm: bool = False
    needs: str = "torch"


PROGRAMS = {
    "ddp": Foreign("plain_ddp.py", "step-*.pt"),
    "warm": Foreign("plain_ddp.py", "step-*.pt", warm=True),
    "recovering": Foreign("recovering_ddp.py", "step-*.pt", warm=True),
    "transformers": Foreign("hf_trainer.py", "checkpoint-*/trainer_state.json", needs="accelerate"),
    "lightning": Foreign("lightning_fit.py", "step=*.ckpt", needs="lightning"),
    "torchrun": Foreign("plain_ddp.py", "step-*.pt", torchrun=True),
}
ENDS = {
    "kill": ("completed", {"rank_killed"}),
    "hang": ("completed", {"rank_hang"}),
    "oom": ("completed", {"host_oom"}),
    "node": ("completed", {"node_dead"}),
}
"""How a run ends after a fault, and the kinds of the root that are right."""


@pytest.fixture
def user(slurm_cluster: SlurmCluster) -> Iterator[User]:
    with at_work(slurm_cluster, "foreign-test") as person:
        yield person


def submit(user: User, name: str, program: Foreign, fault: str) -> None:
    """One rank on each of two nodes, which must not be the first rank that the fault happens to."""
    installation = user.cluster.installation()
    script = str(installation.sources / "tests/foreign/programs" / program.script)
    words = [*(TORCHRUN if program.torchrun else ()), script, "--steps", str(STEPS), "--out", "{output_dir}"]
    environment = {"PACE_S": "0.1", "OMP_NUM_THREADS": "1"}
    if fault != "node":
        environment["FAULT"] = f"{fault}:{AT}:1"
    body: dict[str, Any] = {
        "run": {"name": name},
        "trainer": {
            "command": [str(installation.python), *words],
            "launcher": "node" if program.torchrun else "rank",
            "env": environment,
            "checkpoints": f"{{output_dir}}/{program.checkpoints}",
            "steps": STEPS,
            "stop_s": 10,
            "warm": program.warm,
        },
        "slurm": {"nodes": 2, "ranks_per_node": 1, "time": "20:00", "spares": 1 if fault == "node" else 0},
        "cluster": {"gpus_per_node": 0, "env": user.cluster.forking([*forked.OTHERS, *forked.PROGRAM_RANKS])},
        "parallel": {"device": "cpu"},
        "aegis": {"grace_s": 5, "lost_peer_s": 90, "hang": {"setup_s": 200, "step_s": 25}},
    }
    path = user.directory / f"{name}.yaml"
    path.write_text(json.dumps(body))
    user.zslurm("submit", path)


def test_a_killed_rank_of_a_program_that_recovers_costs_no_step(user: User) -> None:
    submit(user, "recovers", PROGRAMS["recovering"], "kill")
    state = user.wait_for_state("recovers", "completed", "failed", deadline_s=DEADLINE_S)
    story = json.dumps(user.events("recovers"), indent=1)[-6000:]
    assert (state["state"], state["attempt"], state["step"]) == ("completed", 1, STEPS), story
    steps = [row["step"] for row in user.steps("recovers")]
    assert (sorted(set(steps)), len(steps) - len(set(steps)) <= 1) == (list(range(1, STEPS + 1)), True), steps
    logs = user.directory / "runs/recovers/attempts/000001/logs"
    assert "continues in generation 1" in (logs / "rank-00000.log").read_text()
    assert "by signal 9; it is started again" in (logs / "rank-00001.log").read_text()


@pytest.mark.parametrize("fault", ENDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_foreign_trainer_ends_as_the_matrix_says(name: str, fault: str, user: User) -> None:
    program = PROGRAMS[name]
    if (name, fault) == ("recovering", "kill"):
        pytest.skip("no fault of the run: see above")
    if importlib.util.find_spec(program.needs) is None:
        pytest.skip(f"{program.needs} is not installed")
    run = f"{name}-{fault}"
    submit(user, run, program, fault)
    if fault == "node":
        user.wait_for_step(run, AT)
        nodes = json.loads((user.directory / f"runs/{run}/attempts/000001/attempt.json").read_text())["nodes"]
        user.cluster.kill_node(expand(nodes)[-1])
    state = user.wait_for_state(run, "completed", "failed", deadline_s=DEADLINE_S)
    expected, kinds = ENDS[fault]
    story = json.dumps(user.events(run), indent=1)[-6000:]
    roots = [event["root"] for event in user.events(run) if event["event"] == "decision" and "root" in event]
    assert state["state"] == expected, story
    assert roots and {root["kind"] for root in roots} <= kinds, story
    if expected == "completed":
        assert (state["attempt"], state["step"], state["checkpoint_step"]) == (2, STEPS, STEPS), story
        assert min(row["step"] for row in user.steps(run) if row["attempt"] == 2) > AT - 10
        if program.warm and fault != "node":
            log = user.directory / f"runs/{run}/attempts/000002/logs/rank-00000.log"
            assert "the program was started in a warm process" in log.read_text()
    if fault in ("kill", "oom"):
        log = user.zslurm("logs", run, "--errors", "--attempt", "1")
        assert "SIGKILL" in log or "Killed" in log or "memory" in log
