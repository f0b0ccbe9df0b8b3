"""The stand-in next to the trainer: whatever surrounds the ranks sees the same of both."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import stand_in
from tests.submit.local_runs import LocalUser
from tests.waiting import wait_for
from zslurm.run.run_dir import RunDir
from zslurm.train.jsonl import read_jsonl

STEPS = 12


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalUser]:
    """Somebody with the complete runs `stand-in` and `real`, of two ranks each."""
    person = LocalUser(tmp_path_factory.mktemp("both"))
    for trainer in ("stand-in", "real"):
        checkpoint = {"every_steps": 5, "background": False}
        run = person.write_run(trainer, steps=STEPS, ranks=2, trainer=trainer, checkpoint=checkpoint)
        person.zslurm("submit", run, "--wait")
    yield person
    person.close()


def _both(user: LocalUser) -> tuple[RunDir, RunDir]:
    return user.run_dir("stand-in"), user.run_dir("real")


def _shape(value: Any) -> Any:
    """Names and types of a JSON value; what may be absent counts as a number."""
    if isinstance(value, dict):
        return {name: _shape(part) for name, part in value.items()}
    return "number" if isinstance(value, int | float | None) else type(value).__name__


def _rows(run: RunDir) -> list[tuple[str, int, str, Any]]:
    rows = read_jsonl(run.metrics)
    return [(row["kind"], row["step"], row.get("state", ""), _shape(row)) for row in rows]


def _lines(run: RunDir) -> list[str]:
    """The log of rank 0 without its numbers, and without lines on parts that the stand-in lacks."""
    text = run.attempt(1).rank_log(0).read_text().replace(run.name, "NAME")
    lines = [re.sub(r"[\d.,]+( [KM]iB| B)?", "#", line).partition(" mfu")[0] for line in text.splitlines()]
    return [line for line in lines if line.startswith(("starting", "step", "saved", "completed"))]


def test_rows_of_metrics_have_the_same_fields(user: LocalUser) -> None:
    ours, real = map(_rows, _both(user))
    assert ours == real
    assert {row[:3] for row in ours} >= {("step", 1, ""), ("checkpoint", 5, "COMMITTED")}


def test_logs_events_and_records_of_ends_are_the_same(user: LocalUser) -> None:
    ours, real = _both(user)
    assert _lines(ours) == _lines(real)
    events = [[(event["event"], sorted(event)) for event in read_jsonl(run.events)] for run in (ours, real)]
    assert events[0] == events[1]
    ends = [
        [_shape(json.loads(run.attempt(1).rank_end(rank).read_text())) for rank in range(2)]
        for run in (ours, real)
    ]
    assert ends[0] == ends[1]


def test_checkpoints_are_whole_and_have_the_same_names(user: LocalUser) -> None:
    names = [sorted(path.name for path in run.checkpoints.iterdir()) for run in _both(user)]
    assert names[0] == names[1] == ["step-00000005", "step-00000010", "step-00000012"]
    user.zslurm("checkpoint", "verify", str(user.run_dir("stand-in").checkpoints / names[0][-1]))


def test_a_curve_continues_from_the_state_in_a_checkpoint_and_not_from_a_damaged_one(user: LocalUser) -> None:
    run = user.write_run("again", steps=STEPS * 100, ranks=2, checkpoint={"every_steps": 5})
    user.zslurm("submit", run)
    user.wait_for_step("again", 12)
    user.zslurm("cancel", "again", "--wait")
    stopped = user.wait_for_end("again")
    assert (stopped["state"], stopped["checkpoint_step"]) == ("cancelled", stopped["step"])
    newest = user.run_dir("again").checkpoints / f"step-{stopped['step']:08d}"
    shard = next(newest.glob("shard-00001*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    user.zslurm("submit", run)
    user.wait_for_step("again", stopped["step"] + 2, attempt=2)
    user.zslurm("cancel", "again", "--wait")
    second = [row for row in user.steps("again") if row["attempt"] == 2]
    assert 1 < second[0]["step"] <= stopped["step"], "it went back to the checkpoint before"
    first = {row["step"]: row["loss"] for row in user.steps("again") if row["attempt"] == 1}
    assert second[0]["loss"] == first[second[0]["step"]] < first[1]
    log = user.run_dir("again").attempt(2).rank_log(0).read_text()
    assert f"checkpoint {newest.name} is passed over: " in log


def test_a_rank_whose_peer_is_lost_fails_as_gloos_do(user: LocalUser) -> None:
    user.zslurm("submit", user.write_run("lost", ranks=2, aegis={"mode": "off"}))
    user.wait_for_step("lost", 2)
    user.rank(1).kill()
    end = user.run_dir("lost").attempt(1).rank_end(0)
    wait_for(end.exists, "rank 0 to fail")
    record = json.loads(end.read_text())
    assert (record["exit_code"], record["error"]) == (1, "RuntimeError")
    assert "Connection closed by peer" in record["message"]
    assert user.wait_for_end("lost")["cause"]["rank"] == 1


def test_what_the_stand_in_lacks_it_refuses(user: LocalUser) -> None:
    run = user.write_run("more", steps=3, checkpoint={"local_dir": str(user.directory)}, aegis={"mode": "off"})
    assert "let this test use the trainer" in user.zslurm("submit", run, "--wait", exit_code=1).stderr


def test_only_ranks_get_it(tmp_path: Path) -> None:
    """Python elsewhere in a job, and the sitecustomize of a site, see nothing of it."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.site_was_here = True\n")
    code = "import sys, importlib.util as util; print(sys.site_was_here, util.find_spec('torch').origin)"
    env = stand_in.environment({"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path)})
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    site_was_here, torch = done.stdout.split()
    assert site_was_here == "True"
    assert torch == importlib.util.find_spec("torch").origin != str(stand_in.IN_RANKS / "torch_package.py")
