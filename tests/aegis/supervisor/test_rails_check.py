"""The check of the rails: a table of decisions; if a node or Slurm does not answer, that is no fault."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.fake_sysfs import mi300x_pollara
from tests.slurm.recordings.scripts import Calls
from tests.submit.specs import run_spec
from zslurm.aegis.core.policy.outcome import AttemptOutcome
from zslurm.aegis.core.policy.rails import RailDecision, decide_rails, describe_rails
from zslurm.aegis.supervisor import rails_check
from zslurm.aegis.supervisor.job import Job, JobStop
from zslurm.cluster.rails.read_nodes import rails_of_answers
from zslurm.cluster.rails.types import Problem, RailMap
from zslurm.core.errors import Exit
from zslurm.hardware.facts import read_facts
from zslurm.run.run_dir import RunDir
from zslurm.slurm.on_nodes.run_on_nodes import NodeAnswer

JOB = {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_PARTITION": "batch", "PATH": "/nonexistent"}
NICS = [f"ionic_{index}" for index in range(8)]
EIGHT = [f"node{index}" for index in range(8)]


def check(
    directory: Path,
    policy: str,
    *,
    nodes: Sequence[str] = ("node0", "node1"),
    stopped: bool = False,
    into: list[dict[str, Any]] | None = None,
) -> tuple[AttemptOutcome | None, list[dict[str, Any]]]:
    """The outcome and the events of a job on two nodes."""
    cluster = {"launcher": "slurm", "gpus_per_node": 8, "nics": NICS, "rail_policy": policy}
    spec = run_spec(directory, slurm={"nodes": 2}, cluster=cluster)
    events: list[dict[str, Any]] = [] if into is None else into
    stop = JobStop(signal.SIGTERM if stopped else None)
    run = RunDir(directory / "run")
    job = Job(run, spec, JOB, "7", 0, lambda event: events.append(event.row), stop)
    return rails_check.check_rails(job, nodes), events


def answers(
    directory: Path, monkeypatch: pytest.MonkeyPatch, *, down: list[int], silent: str | None = None
) -> None:
    """What the nodes say: node1 is whole, node0 lacks some NICs or says nothing."""
    said = []
    for node, broken in (("node0", down), ("node1", [])):
        mi300x_pollara(directory / node, down=broken)
        said.append(NodeAnswer(node, asdict(read_facts(directory / node)) | {"node": node}))
    if silent:
        said[0] = NodeAnswer("node0", None, silent)
    monkeypatch.setattr(
        rails_check,
        "read_rails",
        lambda cluster, nodes, **where: rails_of_answers([one for one in said if one.node in nodes], cluster),
    )


def test_where_no_node_can_be_asked_the_ranks_start_and_it_is_recorded(tmp_path: Path) -> None:
    outcome, events = check(tmp_path, "refuse")
    assert outcome is None
    assert [event["event"] for event in events] == ["rails_unknown"]
    assert events[0]["reason"].startswith("srun: not found on PATH")


def test_a_silent_node_is_recorded_and_not_blamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(tmp_path, monkeypatch, down=[], silent="srun: error: Task launch failed")
    outcome, events = check(tmp_path, "refuse")
    assert outcome is None
    assert events == [{"event": "rails_unknown", "nodes": "node0", "reason": "srun: error: Task launch failed"}]


def test_without_slurms_commands_on_the_node_excluding_is_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(tmp_path, monkeypatch, down=[6])
    outcome, events = check(tmp_path, "exclude")
    assert outcome is not None
    assert (outcome.outcome, outcome.exit_code) == ("failed", Exit.STOPPED)
    assert outcome.cause is not None
    assert outcome.cause.node == "node0"
    assert outcome.cause.message.startswith(
        "node0: rail 6: ionic_6 is DOWN (Disabled); it cannot be excluded: squeue: not found on PATH"
    )
    assert [(event["event"], event["action"]) for event in events] == [("rails_incomplete", "refuse")]


def test_warnings_of_many_nodes_are_one_event_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = []
    for node in ("node0", "node1"):
        tree = mi300x_pollara(tmp_path / node)
        tree.write("sys/class/infiniband/ionic_1/ports/1/rate", "200 Gb/sec (4X HDR)")
        facts.append(NodeAnswer(node, asdict(read_facts(tmp_path / node)) | {"node": node}))
    monkeypatch.setattr(rails_check, "read_rails", lambda cluster, **where: rails_of_answers(facts, cluster))
    outcome, events = check(tmp_path, "exclude")
    assert outcome is None
    assert events == [
        {
            "event": "rails_doubtful",
            "nodes": "node[0-1]",
            "reason": "rail 1: ionic_1 runs at 200 Gb/s, others at 400",
        }
    ]


def test_the_policy_warn_records_the_fault_and_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(tmp_path, monkeypatch, down=[6])
    outcome, events = check(tmp_path, "warn")
    assert outcome is None
    assert [(e["event"], e["nodes"], e["action"]) for e in events] == [("rails_incomplete", "node0", "start")]


def test_the_requeue_is_recorded_before_the_list_of_excluded_nodes_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm may kill the supervisor meanwhile; without the record the next one would exclude the node again."""
    answers(tmp_path, monkeypatch, down=[6])
    calls = Calls(tmp_path, job_id="7", hides_nodes=True)
    monkeypatch.setitem(JOB, "PATH", str(calls.directory))
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def killed(*_: Any, **__: Any) -> None:
        raise SystemExit(137)

    monkeypatch.setattr("zslurm.slurm.exclusion.exclude_requeued", killed)
    events: list[dict[str, Any]] = []
    with pytest.raises(SystemExit):
        check(tmp_path, "exclude", into=events)
    assert [event["event"] for event in events] == ["rails_incomplete", "nodes_excluded", "requeued"]
    assert events[-1]["excluded"] == "node0"


def test_a_job_that_was_cancelled_meanwhile_is_not_brought_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(tmp_path, monkeypatch, down=[6])
    assert check(tmp_path, "exclude", stopped=True) == (None, [])


def test_nodes_that_are_not_used_are_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(tmp_path, monkeypatch, down=[6])
    assert check(tmp_path, "refuse", nodes=["node1"]) == (None, [])


def test_nodes_that_differ_are_one_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two names exchanged on node2: two rails, each at another place; the ranks start."""
    said = []
    for node, names in (("node0", NICS), ("node1", NICS), ("node2", [NICS[1], NICS[0], *NICS[2:]])):
        mi300x_pollara(tmp_path / node, names=names)
        said.append(NodeAnswer(node, asdict(read_facts(tmp_path / node)) | {"node": node}))
    monkeypatch.setattr(rails_check, "read_rails", lambda cluster, **where: rails_of_answers(said, cluster))
    outcome, events = check(tmp_path, "exclude")
    assert outcome is None
    assert events[0] == {
        "event": "rails_differ",
        "nodes": "node2",
        "reason": "node2 differs from the other 2: rail 0 is GPU 0 - 0000:28:00.0, not GPU 0 - 0000:08:00.0 "
        "(and 1 more)",
    }
    assert [(event["event"], event["nodes"]) for event in events[1:]] == [("rails_doubtful", "node2")] * 2


# --- the decision: a table ------------------------------------------------------------------------------------


def faulty(*nodes: str) -> dict[str, RailMap]:
    down = Problem("nic-down", "rail 6: ionic_6 is DOWN (Disabled)", 6, "ionic_6")
    slow = Problem("slow", "rail 1: ionic_1 runs at 200 Gb/s, others at 400", 1, "ionic_1")
    return {node: RailMap(node, "profile", (), problems=(down, slow)) for node in nodes}


def test_whole_rails_start_under_every_policy() -> None:
    for policy in ("exclude", "refuse", "warn"):
        assert decide_rails(policy, {}, needed=4) == RailDecision("start")


def test_the_reason_names_node_and_nic() -> None:
    assert describe_rails(faulty("node3")) == "node3: rail 6: ionic_6 is DOWN (Disabled)"
    assert describe_rails(faulty("node3", "node5", "node6")) == (
        "node3: rail 6: ionic_6 is DOWN (Disabled) (and faults on node[5-6])"
    )


@pytest.mark.parametrize(("policy", "action"), [("exclude", "exclude"), ("refuse", "refuse"), ("warn", "start")])
def test_the_policy_decides(policy: str, action: str) -> None:
    decision = decide_rails(policy, faulty("node3"), needed=4, usable=EIGHT)  # type: ignore[arg-type]
    assert decision.action == action
    assert decision.nodes == ("node3",)
    assert decision.reason == "node3: rail 6: ionic_6 is DOWN (Disabled)"


def test_all_faulty_nodes_go_at_once() -> None:
    assert decide_rails("exclude", faulty("node3", "node5"), needed=6, usable=EIGHT).nodes == ("node3", "node5")


@pytest.mark.parametrize(
    ("needed", "usable", "demanded", "before", "why"),
    [
        (8, EIGHT, (), (), "; without it 7 usable nodes are left, and the run needs 8"),
        (1, (), (), (), "; without it 0 usable nodes are left, and the run needs 1"),
        (4, EIGHT, ("node3",), (), "; slurm.nodelist demands node3, so it cannot be excluded"),
        (4, EIGHT, (), ("node3", "node9"), "; node3 was excluded before and is in the job again"),
    ],
)
def test_where_excluding_would_not_help_it_stops_and_says_why(
    needed: int, usable: list[str], demanded: tuple[str, ...], before: tuple[str, ...], why: str
) -> None:
    decision = decide_rails(
        "exclude", faulty("node3"), needed=needed, usable=usable, demanded=demanded, excluded_before=before
    )
    assert decision.action == "refuse"
    assert decision.reason == f"node3: rail 6: ionic_6 is DOWN (Disabled){why}"


def test_where_the_site_hides_its_nodes_the_faulty_one_is_excluded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(tmp_path, monkeypatch, down=[6])
    calls = Calls(tmp_path, job_id="7", hides_nodes=True)
    monkeypatch.setitem(JOB, "PATH", str(calls.directory))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    outcome, events = check(tmp_path, "exclude")
    assert (outcome is not None and outcome.exit_code) == Exit.INTERRUPTED
    assert calls.made == ["requeue 7", "update JobId=7 ExcNodeList=node0"]
    assert [event["event"] for event in events] == ["rails_incomplete", "nodes_excluded", "requeued"]


@pytest.mark.parametrize(
    ("requeued", "code", "made"),
    [
        (False, Exit.INTERRUPTED, ["requeue 7", "update JobId=7 ExcNodeList=node0"]),
        (True, Exit.STOPPED, []),
    ],
    ids=["before the requeue", "after it"],
)
def test_a_supervisor_that_died_while_it_excluded_a_node_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requeued: bool, code: Exit, made: list[str]
) -> None:
    """Only a node that is in the job again after the requeue was excluded in vain."""
    answers(tmp_path, monkeypatch, down=[6])
    calls = Calls(tmp_path, job_id="7", hides_nodes=True)
    monkeypatch.setitem(JOB, "PATH", str(calls.directory))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    (tmp_path / "run").mkdir()
    rows = [{"event": "nodes_excluded", "nodes": "node0", "reason": "ionic_6", "expires": time.time() + 60}]
    rows += [{"event": "requeued", "excluded": "", "reason": "ionic_6"}] if requeued else []
    told = [json.dumps({"time": time.time() - 1, "job_id": "7", **row}) + "\n" for row in rows]
    (tmp_path / "run" / "events.jsonl").write_text("".join(told))
    outcome, _ = check(tmp_path, "exclude")
    assert (outcome is not None and outcome.exit_code, calls.made) == (code, made)


def test_exclusion_ends_however_many_nodes_are_bad() -> None:
    """Every start finds the next bad node: after some exclusions too few are left, and it stops."""
    excluded: set[str] = set()
    for node in EIGHT:
        usable = set(EIGHT) - excluded
        if (
            decide_rails("exclude", faulty(node), needed=5, usable=usable, excluded_before=excluded).action
            == "refuse"
        ):
            break
        excluded.add(node)
    assert excluded == {"node0", "node1", "node2"}
