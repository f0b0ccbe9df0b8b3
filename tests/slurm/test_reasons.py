"""Why a job waits, in words that say what to do, whatever code Slurm gives."""

from __future__ import annotations

import pytest

from tests.slurm.recordings import recorded
from zslurm.slurm.jobs import parse_queue
from zslurm.slurm.reasons import explain


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Priority", "Priority: jobs of higher priority come first"),
        ("(Resources)", "Resources: next in line; waits for nodes to become free"),
        ("JobHeldUser", "JobHeldUser: held by its owner; `zslurm requeue` lets it start"),
        (
            "ReqNodeNotAvail, UnavailableNodes:gpu-q-[2-47]",
            "ReqNodeNotAvail: a node that it needs is down, drained or reserved (gpu-q-[2-47])",
        ),
        ("AssocGrpNodeLimit", "AssocGrpNodeLimit: the account has reached its common limit (node)"),
        (
            "QOSMaxNodePerUserLimit",
            "QOSMaxNodePerUserLimit: outside the QOS's limits for one job or user (node per user)",
        ),
        ("MaxGRESPerAccount", "MaxGRESPerAccount: exceeds the QOS's limit for one account (gres)"),
    ],
)
def test_a_reason_is_explained_and_kept(reason: str, words: str) -> None:
    assert explain(reason) == words


@pytest.mark.parametrize("reason", ["SomethingOfALaterSlurm", "a site's own words, with a comma", ""])
def test_an_unknown_reason_is_passed_on(reason: str) -> None:
    assert explain(reason) == reason


def test_every_reason_that_was_recorded_is_explained() -> None:
    waiting = [job for job in parse_queue(recorded.SQUEUE).values() if job.state.is_waiting]
    assert {job.reason for job in waiting} == {"BeginTime", "job requeued in held state", "JobHeldUser"}
    assert all(explain(job.reason).startswith(f"{job.reason}: ") for job in waiting)


@pytest.mark.parametrize(
    "reason",
    ["ReservationInvalid", "SchedDefer", "MpiPortsBusy", "NvidiaImexChannels", "DeadLine", "RaisedSignal"],
)
def test_reasons_of_newer_versions_have_a_meaning(reason: str) -> None:
    assert explain(reason).startswith(f"{reason}: ")
