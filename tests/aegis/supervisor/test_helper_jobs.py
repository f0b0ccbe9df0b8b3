"""Helper jobs as the supervisor submits, watches and ends them; a recorded Slurm answers."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.waiting import wait_for
from zslurm.aegis.core.messages import AskForHelper, CoreEvent, HelperAsked, HelperEnded, HelperStarted
from zslurm.aegis.core.policy.history import history_of
from zslurm.aegis.core.policy.shrinking import Weighed
from zslurm.aegis.supervisor import helper_jobs
from zslurm.aegis.supervisor.agents.agents import Agents
from zslurm.aegis.supervisor.helper_jobs import HelperJobs, by_job
from zslurm.aegis.supervisor.job import Job
from zslurm.aegis.supervisor.node_pool import Nodes
from zslurm.core.errors import SlurmRefused, SlurmUnavailable
from zslurm.run.events import HelperJoined
from zslurm.run.events.event import Event
from zslurm.run.run_dir import RunDir
from zslurm.slurm.client import StartEstimate, SubmissionEnded
from zslurm.slurm.states import JobState

ONE = AskForHelper(1)


class Site:
    """A run on node0 to node2 in job 12, in its first start, and what Slurm answers about helper jobs."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run = RunDir(path)
        self.run.script.write_text("#!/bin/bash\n#SBATCH --partition=batch\n")
        self.refuses, self.cancelled, self.scripts = "", list[str](), list[str]()
        self.unanswered = 0
        self.is_away = self.loses_answer = False
        self.starts_in_s: float | None = None
        self.reasons: dict[str, str] = {}
        self.states: dict[str, JobState] = {}
        self.of_script: str | None = None
        self.left_s: float | None = 3600.0
        self.agents_on: list[tuple[tuple[str, ...], str]] = []
        self.adopted_on: list[str] = []
        self.forgotten: list[str] = []
        monkeypatch.setattr(helper_jobs, "SlurmClient", lambda *_, **__: self)
        monkeypatch.setattr(helper_jobs, "_LOOK_S", 0.01)
        monkeypatch.setattr(helper_jobs, "_ASK_SLURM_S", 0.01)
        monkeypatch.setattr(helper_jobs, "_LEAVE_S", 0.5)
        monkeypatch.setattr(helper_jobs, "_MOST_LOOKS", 10)

    def jobs(self, restart: int = 0) -> HelperJobs:
        """The helper jobs of a supervisor in a start of the job."""
        slurm = SimpleNamespace(exclude=None, job_name=None)
        job = SimpleNamespace(
            job_id="12", restart=restart, run=self.run, environ={}, on_slurm=True, record=self.record,
            excluded=lambda: {"node7"}, history=lambda: history_of(self.recorded),
            spec=SimpleNamespace(slurm=slurm, run=SimpleNamespace(name="first"), may_ask_for_helpers=True),
        )  # fmt: skip
        nodes = SimpleNamespace(every=("node0", "node1", "node2"), job_left_s=lambda: self.left_s)
        made = HelperJobs(cast(Job, job), cast(Nodes, nodes))
        liveness = SimpleNamespace(forget=self.forgotten.extend)
        made.use(cast(Agents, SimpleNamespace(add=self.add_agents, liveness=liveness)))
        return made

    def add_agents(self, nodes: tuple[str, ...], helper: str, *, adopted: bool = False) -> None:
        self.agents_on.append((nodes, helper))
        self.adopted_on += [helper] if adopted else []

    def record(self, event: Event) -> None:
        row = {"time": 1.0, "job_id": "12", **event.row}
        with self.run.events.open("a") as file:
            file.write(json.dumps(row) + "\n")

    @property
    def recorded(self) -> list[dict[str, Any]]:
        lines = self.run.events.read_text().splitlines() if self.run.events.exists() else ()
        return [json.loads(line) for line in lines]

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
        if self.loses_answer:
            raise SlurmUnavailable("sbatch did not answer within 10 s; it may have been done")
        self.states["40"] = JobState.PENDING
        return "40"

    def queue(self, names: list[str]) -> dict[str, Any]:
        known = {name: state for name, state in self.states.items() if name in names}
        return {
            name: SimpleNamespace(state=state, start_time=None, reason=self.reasons.get(name, ""))
            for name, state in known.items()
        }

    def job_of_script(self, _: str) -> str | None:
        if self.is_away:
            raise SlurmUnavailable("squeue: no answer")
        if self.of_script == "ended":
            raise SubmissionEnded("its job 40 ended")
        return self.of_script

    def estimate_start(self, script: str) -> StartEstimate | None:
        assert "zslurm.job.helper" in script
        if self.is_away:
            raise SlurmUnavailable("sbatch: no answer")
        if self.refuses:
            raise SlurmRefused(self.refuses)
        if self.starts_in_s is None:
            return None
        return StartEstimate(datetime.now(UTC) + timedelta(seconds=self.starts_in_s), "node5", None)

    def cancel(self, name: str) -> None:
        if self.is_away:
            raise SlurmUnavailable("scancel: no answer")
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
    assert list(jobs.ask(ONE)) == []
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
    assert list(jobs.ask(ONE)) == []
    refused = told(jobs, HelperAsked)
    assert not refused.waits and refused.again_at > 0
    (row,) = [row for row in site.recorded if row["event"] == "helper_refused"]
    assert "QOS policy" in row["reason"]


def test_none_is_asked_for_shortly_before_the_end_of_the_run_s_job(site: Site) -> None:
    site.left_s = 100.0
    jobs = site.jobs()
    (answer,) = jobs.ask(ONE)
    assert isinstance(answer, HelperAsked) and not answer.waits and not site.scripts
    list(jobs.events())
    assert site.recorded[-1]["reason"] == "the run's job ends in 100 s"


@pytest.mark.parametrize("reason", ["", "this node has another version of zslurm: 2, and the run 1"])
def test_one_that_never_joins_is_over(site: Site, reason: str) -> None:
    """It was cancelled in the queue, or its node is of no use."""
    jobs = site.jobs()
    list(jobs.ask(ONE))
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
    jobs = started(site)
    site.unanswered = 1
    for _ in range(20):
        jobs.dismiss("40", "no node of it is fit to train")
    assert told(jobs, HelperEnded).nodes == ("node5",)
    assert site.unanswered == 0 and site.cancelled == ["40"]
    assert site.recorded[-1]["reason"] == "no node of it is fit to train"


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


def test_agents_of_a_killed_supervisor_are_ended_on_its_nodes(site: Site) -> None:
    started(site)
    assert site.adopted_on == [], "there are no older ones in a helper job that has just started"
    site.jobs()
    assert site.adopted_on == ["40"]


def test_the_next_start_of_the_job_ends_it_once_slurm_answers(site: Site) -> None:
    started(site)
    site.unanswered = 3
    jobs = site.jobs(restart=1)
    assert list(jobs.begin_attempt()) == []
    wait_for(lambda: site.cancelled, "the cancellation")
    wait_for(lambda: list(jobs.events()) or site.kinds()[-1] == "helper_over", "its event")
    assert site.recorded[-1]["reason"] == "the run's job has started again"


@pytest.mark.parametrize("restart", [0, 1])
def test_one_whose_submission_was_not_recorded_is_found_by_its_script(site: Site, restart: int) -> None:
    """The supervisor died between the submission and its record; Slurm does not answer at first."""
    requested(site)
    site.of_script, site.is_away = "40", True
    site.states["40"] = JobState.PENDING
    jobs = site.jobs(restart)
    assert list(jobs.begin_attempt()) == ([HelperAsked(waits=True)] if restart == 0 else [])
    site.is_away = False
    if restart == 0:
        assert told(jobs, HelperAsked).waits
        assert site.kinds() == ["helper_requested", "helper_queued"]
    else:
        wait_for(lambda: site.cancelled, "the cancellation")


def requested(site: Site) -> None:
    """A helper job is requested; nothing else is recorded."""
    jobs = site.jobs()
    list(jobs.ask(ONE))
    told(jobs, HelperAsked)
    jobs._closed.set()
    wait_for(lambda: jobs._worker is not None and not jobs._worker.is_alive(), "the end of its thread")
    rows = [row for row in site.recorded if row["event"] == "helper_requested"]
    site.run.events.write_text("".join(json.dumps(row) + "\n" for row in rows))
    site.cancelled.clear()


def test_a_submission_that_got_no_answer_is_found_and_not_repeated(site: Site) -> None:
    site.loses_answer = True
    jobs = site.jobs()
    site.is_away = True
    list(jobs.ask(ONE))
    wait_for(lambda: site.scripts, "the submission")
    assert list(jobs.events()) == [], "it is not refused: it may have arrived"
    site.of_script, site.is_away = "40", False
    site.states["40"] = JobState.PENDING
    assert told(jobs, HelperAsked).waits
    assert len(site.scripts) == 1 and site.kinds() == ["helper_requested", "helper_queued"]


def test_no_second_one_is_submitted_before_it_is_known_that_the_first_is_not_there(site: Site) -> None:
    site.loses_answer = True
    jobs = site.jobs()
    list(jobs.ask(ONE))
    refused = told(jobs, HelperAsked)
    assert not refused.waits, "Slurm shows no job of it so far"
    site.loses_answer, site.is_away = False, True
    list(jobs.ask(ONE))
    assert not told(jobs, HelperAsked).waits and len(site.scripts) == 1
    site.is_away, site.of_script = False, "40"
    site.states["40"] = JobState.PENDING
    list(jobs.ask(ONE))
    assert told(jobs, HelperAsked).waits and len(site.scripts) == 1, "it has arrived late"


@pytest.mark.parametrize("of_script", [None, "ended"])
def test_the_second_one_is_submitted_if_there_is_no_job_of_the_first(site: Site, of_script: str | None) -> None:
    site.loses_answer, site.of_script = True, of_script
    jobs = site.jobs()
    list(jobs.ask(ONE))
    assert not told(jobs, HelperAsked).waits
    site.loses_answer = False
    list(jobs.ask(ONE))
    assert told(jobs, HelperAsked).waits and len(site.scripts) == 2


@pytest.mark.parametrize("is_there", [False, True])
def test_the_next_supervisor_looks_for_no_job_that_is_known_not_to_be_there(site: Site, *, is_there: bool) -> None:
    """Of two requests one has a job: it is the second, or the first has arrived late."""
    site.loses_answer = True
    jobs = site.jobs()
    list(jobs.ask(ONE))
    assert not told(jobs, HelperAsked).waits
    site.loses_answer = False
    if is_there:
        site.of_script, site.states["40"] = "40", JobState.PENDING
    list(jobs.ask(ONE))
    assert told(jobs, HelperAsked).waits
    wait_for(lambda: list(jobs.events()) or len(jobs._present()) == 1, "the request without a job")
    list(jobs.events())
    site.of_script = None
    successor = site.jobs()
    assert [helper.name for helper in successor._present()] == ["40"]
    assert list(successor.begin_attempt()) == [HelperAsked(waits=True)]


def test_one_that_is_being_submitted_at_the_end_does_not_stay_in_the_queue(site: Site) -> None:
    site.loses_answer, site.of_script = True, "40"
    site.is_away = True
    jobs = site.jobs()
    list(jobs.ask(ONE))
    wait_for(lambda: site.scripts, "the submission")
    site.is_away = False
    jobs.close()
    assert site.cancelled == ["40"] and site.kinds()[-1] == "helper_over"


def test_one_that_is_asked_for_at_the_end_is_not_submitted(site: Site) -> None:
    jobs = site.jobs()
    jobs.close()
    list(jobs.ask(ONE))
    jobs.close()
    assert site.scripts == []


def test_one_is_submitted_again_if_the_run_s_job_could_not_be_requeued(site: Site) -> None:
    jobs = started(site)
    jobs.close()
    jobs.reopen()
    list(jobs.ask(ONE))
    assert told(jobs, HelperAsked).waits and len(site.scripts) == 2


def test_one_that_could_not_be_cancelled_at_the_end_is_ended_by_the_next_start(site: Site) -> None:
    jobs = started(site)
    site.is_away = True
    jobs.close()
    assert site.kinds()[-1] == "helper_joined", "it is not over"
    site.is_away = False
    site.jobs(restart=1)
    wait_for(lambda: site.cancelled == ["40"], "the cancellation")


def test_the_nodes_of_one_that_is_over_may_be_used_again(site: Site) -> None:
    jobs = started(site)
    list(jobs.ask(ONE))
    wait_for(lambda: len(site.scripts) == 2, "the second submission")
    assert '--exclude="node[0-2,5,7]"' in site.scripts[1], "it is in use"
    site.states["40"] = JobState.CANCELLED
    told(jobs, HelperEnded)
    list(jobs.ask(AskForHelper(1, avoid=("node6",))))
    wait_for(lambda: len(site.scripts) == 3, "the third submission")
    assert '--exclude="node[0-2,6-7]"' in site.scripts[2], "nor a node that the core cannot use"


def test_why_one_does_not_start_is_recorded_once(site: Site) -> None:
    jobs = site.jobs()
    list(jobs.ask(ONE))
    told(jobs, HelperAsked)
    site.reasons["40"] = "AssocGrpNodeLimit"
    wait_for(lambda: list(jobs.events()) or len(site.kinds()) > 2, "the reason")
    for _ in range(3):
        jobs._ask_slurm()
    list(jobs.events())
    (row,) = [row for row in site.recorded if row.get("reason")]
    assert row["event"] == "helper_queued"
    assert row["reason"] == "AssocGrpNodeLimit: the account has reached its common limit (node)"


def test_the_expected_wait_is_slurm_s_estimate_or_that_of_earlier_helper_jobs(site: Site) -> None:
    jobs = site.jobs()
    assert jobs.expected_wait_s(1, 3600.0) is None, "nothing is known"
    site.record(HelperJoined(helper="39", nodes="node4", waited_s=90.0))
    assert jobs.expected_wait_s(1, 3600.0) == 90.0
    site.is_away = True
    assert jobs.expected_wait_s(1, 3600.0) == 90.0
    site.is_away, site.starts_in_s = False, 300.0
    assert jobs.expected_wait_s(1, 3600.0) == pytest.approx(300.0, abs=30)
    assert jobs.expected_wait_s(0, 3600.0) is None, "no node is missing"
    site.refuses = "sbatch: error: allocation failure: Requested node configuration is not available"
    assert jobs.expected_wait_s(1, 3600.0) is None, "there can be none, whatever was once"


def test_none_is_expected_shortly_before_the_end_of_the_run_s_job(site: Site) -> None:
    site.starts_in_s = 5.0
    assert site.jobs().expected_wait_s(1, 100.0) is None
    assert site.jobs().expected_wait_s(1, None) is not None


def test_a_request_has_the_numbers_that_it_was_weighed_with(site: Site) -> None:
    jobs = site.jobs()
    list(jobs.ask(AskForHelper(1, weighed=Weighed(7, 1.25, 1000.04, 3600.0, 300.0, 72.0))))
    requested = site.recorded[0]
    assert [requested[name] for name in ("lost_s", "helper_wait_s", "helper_lost_s")] == [1000.0, 300.0, 72.0]
