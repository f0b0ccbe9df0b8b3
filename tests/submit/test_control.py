"""What is done to a run's job on a site that hides its nodes. Slurm is scripted; tests/on_slurm has a real one."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.aegis.supervisor.test_requeue import RECORD, ScriptedSlurm
from tests.submit.specs import run_spec
from zslurm.core.errors import NotFound, SlurmRefused, SlurmUnavailable
from zslurm.run.events import Submitted
from zslurm.run.run_dir import RunDir
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.inventory import Node
from zslurm.slurm.jobs import JobRecord
from zslurm.slurm.states import JobState
from zslurm.submit import control
from zslurm.submit.submit import record_action


class _Slurm(ScriptedSlurm):
    """Job 12 waits in the queue."""

    def __init__(self, *, hides_nodes: bool) -> None:
        super().__init__()
        self.record = replace(RECORD, state=JobState.PENDING)
        self.hides_nodes = hides_nodes

    def release(self, job_id: str) -> None:
        self.done.append(("release", job_id))

    def nodes(self) -> list[Node]:
        if self.hides_nodes:
            raise SlurmRefused("sinfo: slurm_load_node: Access/permission denied")
        return super().nodes()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    spec = run_spec(tmp_path, cluster={"name": "lab", "launcher": "slurm"})
    made = RunDir(tmp_path / "runs" / "tiny")
    made.create(group_readable=False)
    made.config.write_text(spec.model_dump_json())
    record_action(made, Submitted(job_id="12"), spec)
    return made


def _asks(slurm: SlurmClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "SlurmClient", lambda: slurm)


def _becomes_while_waiting(slurm: _Slurm, record: JobRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change the job when this thread sleeps; threads that other tests left behind sleep as before."""
    tested, pause = threading.get_ident(), time.sleep

    def sleep(seconds: float) -> None:
        if threading.get_ident() == tested:
            slurm.record = record
        else:
            pause(seconds)

    monkeypatch.setattr("time.sleep", sleep)


def test_nodes_that_the_site_hides_are_excluded_as_they_are_named(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = _Slurm(hides_nodes=True)
    _asks(slurm, monkeypatch)
    done = control.requeue(run, exclude="node[1,77]")
    assert done.action == "exclude"
    assert "PrivateData=nodes" in done.note
    assert slurm.done == [("update", "12", "ExcNodeList=node[1,8,77]")]


def test_nodes_that_the_cluster_does_not_have_are_refused_where_it_shows_them(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = _Slurm(hides_nodes=False)
    _asks(slurm, monkeypatch)
    with pytest.raises(NotFound, match="no node node77"):
        control.requeue(run, exclude="node[1,77]")
    assert slurm.done == []


def test_a_run_that_was_requeued_before_starts_now(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = _Slurm(hides_nodes=False)
    _asks(slurm, monkeypatch)
    assert control.requeue(run, now=True).action == "start"
    ((name, job_id, setting),) = slurm.done
    assert (name, job_id, setting.startswith("StartTime=now+")) == ("update", "12", True)


def test_a_run_that_still_leaves_its_nodes_after_a_requeue_starts_once_it_waits(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = _Slurm(hides_nodes=False)
    waits, slurm.record = slurm.record, replace(slurm.record, state=JobState.COMPLETING)
    _asks(slurm, monkeypatch)
    _becomes_while_waiting(slurm, waits, monkeypatch)
    assert control.requeue(run, now=True).action == "start"
    assert [deed[0] for deed in slurm.done] == ["update"]


def test_a_waiting_run_starts_now_without_the_nodes(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = _Slurm(hides_nodes=False)
    _asks(slurm, monkeypatch)
    assert control.requeue(run, now=True, exclude="node1").action == "exclude"
    assert [deed[2].partition("=")[0] for deed in slurm.done] == ["ExcNodeList", "StartTime"]


def test_a_release_that_slurm_did_not_take_is_no_release(tmp_path: Path) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho 'Unexpected message received for job 12' >&2\n")
    scontrol.chmod(0o755)
    with pytest.raises(SlurmUnavailable, match="Unexpected message received for job 12; job 12 was not released"):
        SlurmClient({"PATH": str(tmp_path)}).release("12")


def test_a_job_that_was_cancelled_meanwhile_is_not_recorded_as_requeued(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = _Slurm(hides_nodes=False)
    slurm.record = replace(RECORD, state=JobState.COMPLETING)
    _asks(slurm, monkeypatch)
    _becomes_while_waiting(slurm, replace(RECORD, state=JobState.CANCELLED), monkeypatch)
    before = run.submissions.read_text()
    with pytest.raises(SlurmRefused, match="job 12 ended meanwhile"):
        control.requeue(run, exclude="node1")
    assert run.submissions.read_text() == before


@pytest.mark.parametrize("reason", ["JobHeldUser", "JobHoldMaxRequeue"])
@pytest.mark.parametrize("now", [False, True])
def test_a_held_run_is_released_by_a_requeue(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, reason: str, now: bool
) -> None:
    slurm = _Slurm(hides_nodes=False)
    slurm.record = replace(slurm.record, reason=reason)
    _asks(slurm, monkeypatch)
    assert control.requeue(run, now=now).action == "release"
    assert [deed[:2] for deed in slurm.done] == [("release", "12"), ("update", "12")][: 1 + now]


@pytest.mark.parametrize("known", [True, False])
def test_a_job_that_is_held_after_a_failed_launch_avoids_the_node(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    slurm = _Slurm(hides_nodes=False)
    slurm.record = replace(slurm.record, reason="launch failed requeued held")
    runs = [replace(RECORD, nodes=nodes) for nodes in ("node[1-2]", "node[4-5]")] if known else []
    monkeypatch.setattr(slurm, "history", lambda ids: {"12": runs}, raising=False)
    _asks(slurm, monkeypatch)
    done = control.requeue(run)
    assert done.action == "release" and slurm.done[-1] == ("release", "12")
    assert slurm.done[:-1] == ([("update", "12", "ExcNodeList=node[4,8]")] if known else [])
    assert ("could not be started on node4, which it avoids" in done.note) == known and done.note
