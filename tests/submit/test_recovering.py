"""A program that calls `zslurm.recover` loses a rank, and neither its other processes nor a step."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from examples import recover_fsdp2
from tests.checkout import ROOT
from tests.submit.local_runs import LocalUser
from tests.waiting import wait_for

DDP, FSDP2 = "recover_ddp.py", "recover_fsdp2.py"
STEPS, RANKS = 30, 3
_STEP = re.compile(r"^step (\d+) loss \S+ pid (\d+)$", re.MULTILINE)


@pytest.fixture
def user(tmp_path: Path) -> Iterator[LocalUser]:
    person = LocalUser(tmp_path)
    yield person
    person.close()


def submit(
    user: LocalUser, name: str, script: str = DDP, retries: int = 3, ranks: int = RANKS, **trainer: Any
) -> None:
    command = [sys.executable, str(ROOT / "examples" / script), "--steps", str(STEPS), "--pace", "0.1"]
    body = {
        "run": {"name": name},
        "trainer": {"command": command, "env": {"OMP_NUM_THREADS": "1"}, **trainer},
        "slurm": {"ranks_per_node": ranks},
        "cluster": {"name": "local"},
        "aegis": {"grace_s": 1, "poll_s": 0.05, "settle_s": 0.5, "retries": retries},
    }
    path = user.directory / f"{name}.yaml"
    path.write_text(json.dumps(body))
    user.zslurm("submit", path)


def log(user: LocalUser, name: str, rank: int, attempt: int = 1) -> str:
    path = user.run_dir(name).attempt(attempt).rank_log(rank)
    return path.read_text() if path.exists() else ""


def steps(user: LocalUser, name: str, rank: int) -> list[tuple[int, int]]:
    """The steps of a rank, and the process that made each."""
    return [(int(step), int(pid)) for step, pid in _STEP.findall(log(user, name, rank))]


def weights(user: LocalUser, name: str) -> float:
    return float(log(user, name, 0).partition("weights ")[2].partition(" ")[0])


def expected_weights(script: str) -> float:
    """What the example comes to in one process, whose batch is that of all ranks."""
    torch.manual_seed(0)
    line, network = torch.nn.Linear(8, 1), recover_fsdp2.make_model()
    model = line if script == DDP else network
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 if script == DDP else 0.01)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        for rank in range(RANKS):
            inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(step * 1000 + rank))
            ((model(inputs) - inputs.sum(1, keepdim=True)).square().mean() / RANKS).backward()
        optimizer.step()
    parameters = [line.weight] if script == DDP else list(network.parameters())
    return sum(float(parameter.detach().double().sum().item()) for parameter in parameters)


def kill(user: LocalUser, name: str, rank: int, step: int) -> None:
    """Kill the program of a rank once it has made a step."""
    made = wait_for(lambda: [pid for n, pid in steps(user, name, rank) if n >= step], f"step {step}")
    os.kill(made[-1], signal.SIGKILL)
    wait_for(lambda: not psutil.pid_exists(made[-1]), "its end")


@pytest.mark.parametrize("script", [DDP, FSDP2])
def test_a_killed_rank_costs_no_step_and_no_other_process(script: str, user: LocalUser) -> None:
    submit(user, "killed", script)
    kill(user, "killed", 1, 5)
    wait_for(lambda: steps(user, "killed", 1)[-1][0] > 12, "more steps")
    kill(user, "killed", 0, 13)  # rank 0 too, which hosts the store
    assert user.wait_for_end("killed")["state"] == "completed", log(user, "killed", 0)
    assert user.state("killed")["attempt"] == 1
    for rank in range(RANKS):
        made = steps(user, "killed", rank)
        assert {step for step, _ in made} >= set(range(made[0][0], STEPS + 1))
        assert len({pid for _, pid in made}) == (1 if rank == 2 else 2)
    numbers = [step for step, _ in steps(user, "killed", 2)]
    assert sorted(set(numbers)) == list(range(1, STEPS + 1))
    assert len(numbers) <= STEPS + 2, "at most the step under way is made again"
    assert weights(user, "killed") == pytest.approx(expected_weights(script), rel=1e-5)


def test_a_program_that_fails_by_itself_is_left_to_the_supervisor(user: LocalUser) -> None:
    script = user.directory / "wrong.py"
    script.write_text("import zslurm\nprint('starts', flush=True)\nzslurm.recover(lambda: 1 / 0)\n")
    submit(user, "wrong", retries=1, ranks=2, command=[sys.executable, str(script)])
    assert user.wait_for_end("wrong")["state"] == "failed"
    assert "ZeroDivisionError" in str(user.state("wrong")["cause"])
    assert [log(user, "wrong", rank).count("starts") for rank in range(2)] == [1, 1]
