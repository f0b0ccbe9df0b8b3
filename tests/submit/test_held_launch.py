"""When a held job is released by a command that shows it, and what is said if it is not. Slurm is scripted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.aegis.supervisor.test_requeue import RECORD, ScriptedSlurm
from tests.submit.specs import run_spec
from zslurm.core.errors import SlurmRefused, SlurmUnavailable, ZslurmError
from zslurm.run.events import Submitted
from zslurm.run.exclusions import read_exclusions
from zslurm.run.run_dir import RunDir
from zslurm.run.state.run_state import RunState
from zslurm.slurm.jobs import JobRecord
from zslurm.slurm.states import JobState
from zslurm.submit import control, held_launch
from zslurm.submit.held_launch import MOST_RELEASES, release_failed_launches
from zslurm.submit.submit import record_action
from zslurm.train.jsonl import read_jsonl

HELD = "launch failed requeued held"


class _Slurm(ScriptedSlurm):
    """Job 12 is held: its last run was on node[4-5]."""

    def __init__(self) -> None:
        super().__init__()
        self.record = replace(RECORD, state=JobState.PENDING, reason=HELD, restarts=1)
        self.past: list[JobRecord] = [replace(RECORD, nodes="node[4-5]")]
        self.refusal: Exception | None = None

    def history(self, job_ids: object) -> dict[str, list[JobRecord]]:
        return {"12": self.past}

    def release(self, job_id: str) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.done.append(("release", job_id))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    spec = run_spec(tmp_path, cluster={"name": "lab", "launcher": "slurm"})
    made = RunDir(tmp_path / "runs" / "tiny")
    made.create(group_readable=False)
    made.config.write_text(spec.model_dump_json())
    record_action(made, Submitted(job_id="12"), spec)
    return made


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> _Slurm:
    scripted = _Slurm()
    monkeypatch.setattr(held_launch, "SlurmClient", lambda **_: scripted)
    return scripted


def held(run: RunDir) -> list[RunState]:
    return [RunState(run, "held", job_id="12", launcher="slurm", reason=HELD)]


def test_the_first_node_of_the_last_run_is_excluded_for_as_long_as_a_fault_excludes_one(
    run: RunDir, slurm: _Slurm
) -> None:
    (line,) = release_failed_launches(held(run))
    assert line == (
        "tiny: job 12 could not be started on node4 and was held; it avoids node4 from now on and is released"
    )
    assert [deed[0] for deed in slurm.done] == ["update", "release"]
    exclusion = read_exclusions(run)["node4"]
    assert exclusion.expires - exclusion.since == pytest.approx(7 * 86400, abs=60)


def test_a_node_that_slurm_drained_since_is_the_one(
    run: RunDir, slurm: _Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    drained = replace(slurm.nodes()[0], name="node5", flags=frozenset({"drain"}))
    monkeypatch.setattr(slurm, "nodes_if_shown", lambda: [drained], raising=False)
    (line,) = release_failed_launches(held(run))
    assert "could not be started on node5 and was held" in line


@pytest.mark.parametrize(
    "record", [{"reason": "JobHeldUser"}, {"reason": ""}, {"state": JobState.RUNNING, "reason": ""}], ids=str
)
def test_a_job_that_is_not_held_so_any_more_is_left_alone(
    run: RunDir, slurm: _Slurm, record: dict[str, object]
) -> None:
    slurm.record = replace(slurm.record, **record)  # type: ignore[arg-type]
    assert release_failed_launches(held(run)) == [] and slurm.done == []


def test_the_job_of_another_user_is_left_alone(
    run: RunDir, slurm: _Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_launch.getpass, "getuser", lambda: "somebody")
    assert release_failed_launches(held(run)) == [] and slurm.done == []


def test_a_site_that_refuses_is_named_once_and_asked_once(run: RunDir, slurm: _Slurm) -> None:
    slurm.refusal = SlurmRefused("scontrol: Access/permission denied for job 12")
    (line,) = release_failed_launches(held(run))
    assert line == (
        "tiny: job 12 could not be started and stays held: Slurm refused to release it (scontrol: "
        "Access/permission denied for job 12): ask your site to release it"
    )
    slurm.refusal = AssertionError("asked again")
    assert release_failed_launches(held(run)) == [line]
    rows = [row["action"] for row in read_jsonl(run.submissions)]
    assert rows == ["submit", "nodes_excluded", "not_released"]


def test_a_slurm_that_does_not_answer_is_asked_again_at_the_next_look(run: RunDir, slurm: _Slurm) -> None:
    slurm.refusal = SlurmUnavailable("no answer")
    assert release_failed_launches(held(run)) == []
    slurm.refusal = None
    assert len(release_failed_launches(held(run))) == 1


def test_a_job_that_fails_on_node_after_node_waits_for_a_person(run: RunDir, slurm: _Slurm) -> None:
    lines = []
    for times in range(MOST_RELEASES + 1):
        slurm.record = replace(slurm.record, restarts=times + 1)
        slurm.past = [replace(RECORD, nodes=f"node[{20 + times}-99]")]
        lines += release_failed_launches(held(run))
    assert [line.endswith("and is released") for line in lines] == [True] * MOST_RELEASES + [False]
    assert "released 3 times in a row, so the job itself may be at fault; `zslurm requeue tiny`" in lines[-1]


def test_no_more_nodes_are_excluded_than_the_run_allows(run: RunDir, slurm: _Slurm, tmp_path: Path) -> None:
    spec = run_spec(tmp_path, cluster={"name": "lab", "launcher": "slurm"}, aegis={"max_excluded": 0})
    run.config.write_text(spec.model_dump_json())
    (line,) = release_failed_launches(held(run))
    assert "with node4 more than 0 nodes would be excluded (aegis.max_excluded)" in line
    assert slurm.done == []


def test_the_node_can_be_used_again_once_a_person_says_so(
    run: RunDir, slurm: _Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    release_failed_launches(held(run))
    slurm.record = replace(slurm.record, state=JobState.RUNNING)
    monkeypatch.setattr(control, "SlurmClient", lambda: slurm)
    monkeypatch.setattr(control, "look", lambda run: RunState(run, "running", job_id="12", launcher="slurm"))
    assert control.readmit(run, "node4") == ["node4"]
    assert read_exclusions(run) == {}


@pytest.mark.parametrize("mode", ["observe", "off"])
def test_a_watchdog_that_must_not_act_leaves_the_job_to_the_user(
    run: RunDir, slurm: _Slurm, tmp_path: Path, mode: str
) -> None:
    run.config.write_text(
        run_spec(tmp_path, cluster={"name": "lab", "launcher": "slurm"}, aegis={"mode": mode}).model_dump_json()
    )
    assert release_failed_launches(held(run)) == [
        f"tiny: job 12 could not be started and stays held, as aegis.mode is {mode}: "
        "`zslurm requeue tiny` releases it without the node"
    ]
    assert slurm.done == []


def test_a_run_directory_that_cannot_be_written_is_named_and_the_job_is_tried_again(
    run: RunDir, slurm: _Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        full.setattr(
            held_launch, "record_action", raises(ZslurmError("submissions.jsonl: No space left on device"))
        )
        (line,) = release_failed_launches(held(run))
    assert line == "tiny: job 12 could not be started and stays held: submissions.jsonl: No space left on device"
    assert [deed[0] for deed in slurm.done] == ["update"]
    (line,) = release_failed_launches(held(run))
    assert line.endswith("and is released")


def raises(error: Exception) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail
