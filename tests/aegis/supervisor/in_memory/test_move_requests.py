"""What asks the ranks of an attempt to leave nodes: people of this job, and Slurm."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from tests.waiting import wait_for
from zslurm.aegis.core.messages import DrainsRead, MoveRequested
from zslurm.aegis.supervisor.in_memory.move_requests import MoveRequests
from zslurm.aegis.supervisor.job import Job
from zslurm.run.run_dir import RunDir
from zslurm.slurm.inventory import Node


def test_a_request_for_this_job_is_one_for_each_node_and_comes_once(tmp_path: Path) -> None:
    job = cast(Job, SimpleNamespace(run=RunDir(tmp_path), job_id="7"))
    row = {"time": 1.0, "action": "move", "user": "ann", "off": "n[0-1]", "request": "r1"}
    rows = [row | {"job_id": "6"}, row | {"job_id": "7"}]
    job.run.submissions.write_text("".join(json.dumps(each) + "\n" for each in rows))
    requests = MoveRequests(job, ask_drains=False)
    found = [event for event in requests.events() if isinstance(event, MoveRequested)]
    assert [(each.node, each.reason, each.request) for each in found] == [
        ("n0", "asked for by ann", "r1"), ("n1", "asked for by ann", "r1"),
    ]  # fmt: skip
    requests._look_at = 0.0
    assert list(requests.events()) == []


def test_requests_that_any_supervisor_has_answered_are_known(tmp_path: Path) -> None:
    job = cast(Job, SimpleNamespace(run=RunDir(tmp_path), job_id="7"))
    refused = {"event": "move_refused", "time": 2.0, "off": "n9", "reason": "no", "request": "r2"}
    job.run.events.write_text(json.dumps(refused) + "\n")
    assert MoveRequests(job, ask_drains=False).answered() == {("r2", "n9")}


def test_slurm_is_asked_which_nodes_it_drains(tmp_path: Path) -> None:
    job = cast(Job, SimpleNamespace(run=RunDir(tmp_path), job_id="7"))
    nodes = [
        Node(name, "idle", frozenset({"drain"} if name == "n1" else ()), 8, None, 96, 1000, ("batch",), "fan")
        for name in ("n0", "n1")
    ]
    requests = MoveRequests(job, ask_drains=True, drained=lambda: nodes)
    (read,) = wait_for(lambda: list(requests.events()), "the answer of Slurm")
    requests.close()
    assert isinstance(read, DrainsRead) and read.nodes == {"n1": "fan"}
    assert list(requests.events()) == []
