"""What holds the nodes of a helper job: it ends with the run, and without its supervisor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zslurm.job import helper
from zslurm.run import supervisor_lease
from zslurm.run.run_dir import RunDir

JOB = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "node[3-4]"}


class Clock:
    """Seconds that pass only while the helper sleeps; then `happens` is called with the time."""

    def __init__(self, run: RunDir) -> None:
        self.now, self.run = 0.0, run
        self.renewed_until = self.over_at = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now < self.renewed_until:
            supervisor_lease.take(self.run, f"generation-{self.now}")
        if self.over_at and self.now >= self.over_at:
            self.run.job_exit("12").write_text("0\n")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (run := RunDir(tmp_path)).helpers.mkdir()
    return run


def report(run: RunDir) -> dict[str, object]:
    return dict(json.loads(run.helper_report("77").read_text()))


def test_it_ends_with_the_run(run: RunDir) -> None:
    clock = Clock(run)
    clock.renewed_until, clock.over_at = 1e9, 500.0
    assert helper.hold(run, "12", clock=clock, sleep=clock.sleep) == "the run is over in job 12"
    assert clock.now == 500.0


def test_it_ends_if_no_supervisor_renews_its_lease(run: RunDir) -> None:
    """A supervisor that is started again within a minute keeps it."""
    clock = Clock(run)
    clock.renewed_until = 300.0
    why = helper.hold(run, "12", clock=clock, sleep=clock.sleep)
    assert why.startswith("the run's supervisor cannot be reached")
    assert 300 + helper.LOST_S - 4 <= clock.now <= 300 + helper.LOST_S + 4


def test_it_reports_its_nodes(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper, "hold", lambda *_: "the run is over in job 12")
    assert helper.main([str(run.path), "12", helper.software()], JOB) == 0
    assert report(run) == {"nodes": ["node3", "node4"], "reason": ""}


def test_one_that_starts_after_the_end_of_the_run_ends_at_once(run: RunDir) -> None:
    run.job_exit("12").write_text("0\n")
    assert helper.main([str(run.path), "12", helper.software()], JOB) == 0
    assert report(run)["reason"] == "the run is over in job 12"


def test_a_node_with_another_version_is_not_used(run: RunDir) -> None:
    assert helper.main([str(run.path), "12", "0.0.9-00000000"], JOB) == 0
    assert str(report(run)["reason"]).startswith("this node has another version of zslurm")
