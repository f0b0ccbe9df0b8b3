"""Real ranks that leave by themselves before the end: they are named, and what they do is never "completed"."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkout import TESTS
from tests.submit.local_runs import LocalUser
from zslurm.core.errors import Exit

STEPS = 30
_HOOK = TESTS / "faults" / "in_ranks"


@pytest.fixture
def user(tmp_path: Path) -> Iterator[LocalUser]:
    person = LocalUser(tmp_path)
    yield person
    person.close()


def _train(
    user: LocalUser,
    name: str,
    *in_ranks: dict[str, Any],
    exit_code: int = 0,
    **aegis: Any,
) -> list[str]:
    """Train two ranks that do this to themselves (tests/faults/in_ranks); returns what `submit --wait` prints."""
    place = user.directory / f"{name}-faults"
    place.mkdir()
    (place / "plan.json").write_text(json.dumps({"pace_s": 0.0, "faults": list(in_ranks)}))
    env = {"PYTHONPATH": str(_HOOK), "ZSLURM_TEST_FAULTS": str(place)}
    saves = {"every_steps": 5, "background": False}
    run = user.write_run(
        name,
        steps=STEPS,
        ranks=2,
        trainer="real",
        forks=True,
        checkpoint=saves,
        cluster={"env": env},
        aegis=aegis,
    )
    return user.zslurm("submit", run, "--wait", exit_code=exit_code).stderr.splitlines()


def _roots(user: LocalUser, name: str) -> list[tuple[str, int, int]]:
    roots = [event["root"] for event in user.events(name, "decision") if "root" in event]
    return [(root["kind"], root["rank"], root.get("step", -1)) for root in roots]


def test_ranks_that_exit_with_0_too_early_are_named_and_the_run_goes_on(user: LocalUser) -> None:
    """One at once, so that it records nothing; then one by sys.exit; then all of them at once."""
    said = _train(
        user,
        "leaves",
        {"what": "exit", "step": 8, "rank": 1, "code": 0},
        {"what": "exit", "step": 14, "rank": 0, "code": 0, "raise": True},
        {"what": "exit", "step": 22, "code": 0, "together": True},
    )
    *alone, together = _roots(user, "leaves")
    assert alone == [("early_exit", 1, 7), ("early_exit", 0, 13)]
    assert together in [("early_exit", rank, 21) for rank in range(2)]
    first, second, third = (
        event["cause"] for event in user.events("leaves", "attempt_ended") if event["outcome"] == "failed"
    )
    assert (first["rank"], first["exit_code"], first["step"]) == (1, 0, 7)
    assert first["message"] == third["message"] == "exited with exit code 0 before the end of the run"
    assert (second["rank"], second["exit_code"]) == (0, 0)
    assert second["message"] == "SystemExit: sys.exit(0) before the end of the run"
    assert user.state("leaves")["step"] == STEPS

    told = [line for line in said if "attempt" in line]
    assert len(told) == 6, "each failure is a line, and what follows from it another"
    node = first["node"]
    assert f"attempt 1 failed (exit code 1): rank 1 on {node} after step 7: exited with exit code 0" in told[0]
    assert f"attempt 1: decided to start again in place on {node}, from step 5" in told[1]
    errors = user.zslurm("logs", "leaves", "--errors").stdout.splitlines()
    assert errors[1].split("\t")[:2] == ["root", "0-1"], "of attempt 3, the newest that has errors"


@pytest.mark.soak
def test_75_is_no_save_where_nobody_asked_for_one(user: LocalUser) -> None:
    _train(user, "tempfail", {"what": "exit", "step": 8, "code": 75, "together": True})
    assert [(kind, step) for kind, _, step in _roots(user, "tempfail")] == [("rank_exit", -1)]
    assert user.state("tempfail")["state"] == "completed"


def test_the_same_nan_at_the_same_step_stops_the_run_the_second_time(user: LocalUser) -> None:
    nan = {"what": "nan", "step": 12, "rank": 1, "times": 1000}
    said = _train(user, "nan", nan, exit_code=Exit.STOPPED)
    state = user.state("nan")
    assert (state["state"], state["exit_code"]) == ("failed", Exit.STOPPED)
    *restarts, stop = user.events("nan", "decision")
    # Two where the checkpoint before it was still being written when it came for the first time.
    assert 1 <= len(restarts) <= 2 and {event["action"] for event in restarts} == {"restart"}
    assert (stop["action"], stop["root"]["kind"], stop["root"]["rank"]) == ("stop", "nan_loss", 1)
    (tested,) = user.events("nan", "gpu_tested")[-1:]
    assert tested["ok"] is True
    assert any("to the last bit" in line and "stop for good" in line for line in said)
    assert "to the last bit" in user.zslurm("status", "nan").stdout
