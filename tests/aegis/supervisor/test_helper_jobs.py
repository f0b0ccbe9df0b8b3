"""Helper jobs as the supervisor submits, watches and ends them; a recorded Slurm answers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.waiting import wait_for
from zslurm.aegis.core.messages import CoreEvent, HelperAsked, HelperEnded, HelperStarted
from zslurm.aegis.supervisor import helper_jobs
from zslurm.aegis.supervisor.agents.agents import Agents
from zslurm.aegis.supervisor.helper_jobs import HelperJobs, by_job
from zslurm.aegis.supervisor.job import Job
from zslurm.aegis.supervisor.node_pool import Nodes
from zslurm.core.errors import SlurmRefused, SlurmUnavailable
from zslurm.run.events.event import Event
from zslurm.run.run_dir import RunDir
from zslurm.slurm.states import JobState


class Site:
    """A run on node0 to node2 in job 12, in its first start, and what Slurm answers about helper jobs."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run = RunDir(path)
        self.run.script.write_text("#!/bin/bash\n#SBATCH --partition=batch\n")
        self.refuses, self.cancelled, self.scripts = "", list[str](), list[str]()
        self.unanswered = 0
        self.states: dict[str, JobState] = {}
        self.of_script: str | None = None
        self.left_s: float | None = 3600.0
        self.agents_on: list[tuple[tuple[str, ...], str]] = []
        self.forgotten: list[str] = []
        monkeypatch.setattr(helper_jobs, "SlurmClient", lambda *_, **__: self)
        monkeypatch.setattr(helper_jobs, "_LOOK_S", 0.01)
        monkeypatch.setattr(helper_jobs, "_ASK_SLURM_S", 0.01)

    def jobs(self, restart: int = 0) -> HelperJobs:
        """The helper jobs of a supervisor in a start of the job."""
        slurm = SimpleNamespace(exclude=None, job_name=None)
        job = SimpleNamespace(
            job_id="12", restart=restart, run=self.run, environ={}, on_slurm=True, record=self.record,
            excluded=lambda: {"node7"}, spec=SimpleNamespace(slurm=slurm, run=SimpleNamespace(name="first")),
        )  # fmt: skip
        nodes = SimpleNamespace(every=("node0", "node1", "node2"), job_left_s=lambda: self.left_s)
        made = HelperJobs(cast(Job, job), cast(Nodes, nodes))
        liveness = SimpleNamespace(forget=self.forgotten.extend)
        made.use(cast(Agents, SimpleNamespace(add=lambda *added: self.agents_on.append(added), liveness=liveness)))
        return made

    def record(self, event: Event) -> None:
        row = {"time": 1.0, "job_id": "12", **event.row}
        with self.run.events.open("a") as file:
            file.write(json.dumps(row) + "\n")

    @property
    def recorded(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.run.events.read_text().splitlines()]

    def kinds(self) -> list[str]:
        return [row["event"] for row in self.recorded]

    def report(self, reason: str = "") -> None:
        """Let the helper job start."""
        self.run.helper_report("40").write_text(json.dumps({"nodes": ["node5"], "reason": reason}))

    # --- Slurm

    def submit(self, script: Path) -> str:
        self.scripts.append(script.read_text())
        if self.refuses:
            raise SlurmRefused(self.refuses)
        self.states["40"] = JobState.PENDING
        return "40"

    def queue(self, names: list[str]) -> dict[str, Any]:
        known = {name: state for name, state in self.states.items() if name in names}
        return {name: SimpleNamespace(state=state, start_time=None) for name, state in known.items()}

    def job_of_script(self, _: str) -> str | None:
        return self.of_script

    def cancel(self, name: str) -> None:
        if self.unanswered:
            self.unanswered -= 1
            raise SlurmUnavailable("scancel: no answer")
        self.cancelled.append(name)
        self.states[name] = JobState.CANCELLED


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch)


def told(jobs: HelperJobs, kind: type[CoreEvent]) -> Any:
    """Wait until the core is told something of a kind, and return it."""
    return wait_for(
        lambda: next((event for event in jobs.events() if isinstance(event, kind)), None), kind.__name__
    )


def started(site: Site) -> HelperJobs:
    """Helper jobs of which one has started."""
    jobs = site.jobs()
    assert list(jobs.ask(1)) == []
    assert told(jobs, HelperAsked).waits
    site.states["40"] = JobState.RUNNING
    site.report()
    assert told(jobs, HelperStarted) == HelperStarted("40", ("node5",))
    return jobs


def test_a_helper_job_is_asked_for_started_and_ended_with_the_run(site: Site) -> None:
    jobs = started(site)
    assert site.kinds() == ["helper_requested", "helper_queued", "helper_joined"]
    assert site.agents_on == [(("node5",), "40")]
    assert '--exclude="node[0-2,7]"' in site.scripts[0], "neither a node of the run nor one that it excludes"
    assert by_job(["node0", "node5", "node1"], jobs.job_of()) == [(None, ["node0", "node1"]), ("40", ["node5"])]
    jobs.close()
    assert site.cancelled == ["40"] and site.kinds()[-1] == "helper_over"


def test_one_that_is_refused_is_not_asked_for_again_soon(site: Site) -> None:
    site.refuses = "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy"
    jobs = site.jobs()
    assert list(jobs.ask(1)) == []
    refused = told(jobs, HelperAsked)
    assert not refused.waits and refused.again_at > 0
    (row,) = [row for row in site.recorded if row["event"] == "helper_refused"]
    assert "QOS policy" in row["reason"]


def test_none_is_asked_for_shortly_before_the_end_of_the_run_s_job(site: Site) -> None:
    site.left_s = 100.0
    jobs = site.jobs()
    (answer,) = jobs.ask(1)
    assert isinstance(answer, HelperAsked) and not answer.waits and not site.scripts
    list(jobs.events())
    assert site.recorded[-1]["reason"] == "the run's job ends in 100 s"


@pytest.mark.parametrize("reason", ["", "this node has another version of zslurm: 2, and the run 1"])
def test_one_that_never_joins_is_over(site: Site, reason: str) -> None:
    """It was cancelled in the queue, or its node is of no use."""
    jobs = site.jobs()
    list(jobs.ask(1))
    told(jobs, HelperAsked)
    if reason:
        site.report(reason)
    else:
        site.states["40"] = JobState.CANCELLED
    assert told(jobs, HelperEnded).nodes == ()
    (over,) = [row for row in site.recorded if row["event"] == "helper_over"]
    assert over["reason"] == (reason or "Slurm calls it CANCELLED")
    assert "40" in site.cancelled, "its nodes are given back"


def test_one_that_the_core_does_not_want_is_cancelled_once(site: Site) -> None:
    jobs = site.jobs()
    site.unanswered = 1
    jobs.dismiss("40")
    wait_for(lambda: site.unanswered == 0 and not jobs._dismissed, "the cancellation that Slurm does not answer")
    for _ in range(20):
        jobs.dismiss("40")
    wait_for(lambda: site.cancelled, "the cancellation")
    assert site.cancelled == ["40"]


def test_one_that_is_cancelled_takes_its_nodes_away(site: Site) -> None:
    jobs = started(site)
    site.states["40"] = JobState.CANCELLED
    assert told(jobs, HelperEnded).nodes == ("node5",)
    assert site.forgotten == ["node5"]


def test_the_next_supervisor_takes_a_helper_job_over(site: Site) -> None:
    started(site)
    site.agents_on.clear()
    (event,) = site.jobs().begin_attempt()
    assert event == HelperStarted("40", ("node5",))
    assert site.agents_on == [(("node5",), "40")]


def test_the_next_start_of_the_job_ends_it(site: Site) -> None:
    started(site)
    assert list(site.jobs(restart=1).begin_attempt()) == []
    assert site.cancelled == ["40"] and site.kinds()[-1] == "helper_over"


def test_one_whose_submission_was_not_recorded_is_found_by_its_script(site: Site) -> None:
    """The supervisor died between the submission and its record."""
    jobs = site.jobs()
    list(jobs.ask(1))
    told(jobs, HelperAsked)
    rows = [row for row in site.recorded if row["event"] == "helper_requested"]
    site.run.events.write_text("".join(json.dumps(row) + "\n" for row in rows))
    site.of_script = "40"
    assert list(site.jobs().begin_attempt()) == [HelperAsked(waits=True)]
    assert site.kinds() == ["helper_requested", "helper_queued"]
