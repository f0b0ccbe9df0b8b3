"""Events in words that a person understands at once; nothing that is missing or strange makes them fail."""

from __future__ import annotations

import getpass
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from zslurm.aegis.core.policy.policy import SLURM_REQUEUES
from zslurm.aegis.notify.recorder import Recorder
from zslurm.aegis.types import Decision, Fault
from zslurm.run.events import KINDS, AttemptEnded, ByUser, StopAsked, describe
from zslurm.run.events.by_user import record_by_user
from zslurm.run.events.event import CLASSES, UnknownEvent, from_row, select
from zslurm.run.events.event_text import describe_fault, kind_text
from zslurm.run.run_dir import RunDir

ECC = Fault(
    "gpu_ras_uncorrectable", "root", "gpu", 1.0, "gpu", "umc: 1 new uncorrectable error", node="node3", gpu="2"
)
LATE = Fault("rank_hang", "root", "unknown", 2.0, "agent", "no step for 184 s", node="node1", rank=9, step=120)


def detected(fault: Fault, **fields: Any) -> dict[str, Any]:
    return {"event": "fault_detected", "attempt": 3} | fault.fields() | fields


def decided(decision: Decision, **fields: Any) -> dict[str, Any]:
    return {"event": "decision", "attempt": 3, "mode": "act", "committed_step": 120} | decision.fields() | fields


SWAP = Decision("swap", "GPU 2 of node3 is broken", ECC, ("node3",), ("node0", "node1", "node4"))
SAID = [
    ({"event": "agents_started", "generation": "a1", "nodes": "node[0-3]"}, "agents watch on node[0-3]"),
    ({"event": "agents_started"}, "agents watch the nodes"),
    (
        {"event": "agent_lost", "node": "node3", "reason": "no word for 8 s, its ranks continue"},
        "the agent on node3 sends no heartbeats: no word for 8 s, its ranks continue",
    ),
    ({"event": "agent_lost", "node": "node3"}, "the agent on node3 sends no heartbeats"),
    (
        {
            "event": "agent_reports_ignored",
            "node": "node3",
            "count": 1,
            "reason": "no kind 'x'",
        },
        "ignored 1 unknown report from the agent on node3, which runs another version of zslurm: no kind 'x'",
    ),
    (
        {"event": "agent_reports_ignored", "count": 10, "damaged": True},
        "ignored 10 damaged reports from an agent",
    ),
    ({"event": "lease_lost", "generation": "g2"}, "another supervisor has taken over the run"),
    (
        {"event": "run_dir_lost", "attempt": 1, "reason": "the run directory /r/a was moved to /r/b"},
        "the run directory is gone, and the ranks are ended: the run directory /r/a was moved to /r/b",
    ),
    ({"event": "agent_restarted", "nodes": ["node3", "node4"]}, "the agents were started again on node[3-4]"),
    (
        {"event": "agents_unavailable", "reason": "srun refused"},
        "no agents watch the nodes: srun refused",
    ),
    (detected(ECC), "fault: GPU RAS uncorrectable on node3, GPU 2: umc: 1 new uncorrectable error"),
    (detected(LATE), "fault: rank hang on node1, rank 9 after step 120: no step for 184 s"),
    (
        detected(LATE, role="cascade", kind="peer_lost", node=None),
        "follows from another fault: peer lost, rank 9 after step 120: no step for 184 s",
    ),
    (detected(ECC, role="advisory"), "to note: " + describe_fault(ECC.fields())),
    (detected(ECC, role="teardown"), "part of the end that was asked for: " + describe_fault(ECC.fields())),
    (detected(ECC, cleared=True), "over: " + describe_fault(ECC.fields())),
    ({"event": "fault_detected", "kind": "nic_link_down"}, "fault: NIC link down"),
    (
        {"event": "stacks_dumped", "attempt": 1, "nodes": ["node0"], "ranks": [0, 1]},
        "the stacks of ranks 0, 1 on node0 are in the ranks' logs",
    ),
    ({"event": "stacks_dumped"}, "the stacks of every rank are in the ranks' logs"),
    (
        {"event": "attempt_cleared", "attempt": 3, "seconds": 1.24, "killed": 2, "left": 0},
        "every process of attempt 3 is gone in 1.2 s, 2 orphaned processes killed",
    ),
    ({"event": "attempt_cleared", "attempt": 3}, "every process of attempt 3 is gone"),
    (
        {"event": "attempt_cleared", "attempt": 3, "seconds": 60, "killed": 1, "left": {"node3": "2 left"}},
        "attempt 3 could not be ended everywhere in 60.0 s, 1 orphaned process killed: node3: 2 left",
    ),
    (
        {"event": "attempt_cleared", "attempt": 3, "killed": 0, "left": {}, "unseen": ["node3", "node4"]},
        "every process of attempt 3 is gone; not checked: node[3-4]",
    ),
    (
        {"event": "excluded_nodes_used", "nodes": "node3"},
        "node3 is used although excluded: there are no others",
    ),
    (
        {"event": "requeue_failed", "excluded": "node3", "reason": "no answer"},
        "the job could not be requeued: no answer",
    ),
    (
        {"event": "decision", "action": "restart", "wait_s": 60.0, "reason": "disk full"},
        "decided to start again in place, in 1m 00s: disk full",
    ),
    (
        decided(SWAP),
        "attempt 3: decided to start again with a spare node on node[0-1,4], without node3 from now on, "
        "from step 120: GPU 2 of node3 is broken",
    ),
    (
        decided(SWAP, mode="observe", committed_step=-1),
        "attempt 3: would (mode observe) start again with a spare node on node[0-1,4], without node3 from now on: "
        "GPU 2 of node3 is broken",
    ),
    (decided(Decision("restart", "Killed")), "attempt 3: decided to start again in place, from step 120: Killed"),
    (
        decided(Decision("requeue", "no spare is left", exclude=("node3",), n_nodes=3)),
        "attempt 3: decided to requeue the job with 3 nodes, without node3 from now on, from step 120: "
        "no spare is left",
    ),
    (
        decided(Decision("stop", "3 failures without progress")),
        "attempt 3: decided to stop for good: 3 failures without progress",
    ),
    (decided(Decision("finish", "completed")), "attempt 3: decided: nothing more to do: completed"),
    (
        decided(Decision("finish", SLURM_REQUEUES)),
        "attempt 3: decided: nothing to do here: Slurm puts the job back into the queue",
    ),
    (
        decided(Decision("restart", "NaN again", test_gpu=("node3", "2"))),
        "attempt 3: decided to start again in place, from step 120, after a test of GPU 2 on node3: NaN again",
    ),
    (
        {"event": "decision", "action": "stop", "root": ECC.fields()},
        "decided to stop for good: " + describe_fault(ECC.fields()),
    ),
    (
        {"event": "nodes_excluded", "nodes": "node3", "reason": "bad GPU"},
        "the run does not use node3 any more: bad GPU",
    ),
    ({"event": "exclusion_failed", "nodes": "node3", "reason": "no"}, "node3 could not be excluded: no"),
    (
        {"event": "requeued", "excluded": "node[3,7]", "reason": "x"},
        "put back into the queue, without node[3,7]: x",
    ),
    ({"event": "requeued"}, "put back into the queue"),
    ({"event": "spare_checked", "node": "node4", "ok": True}, "spare node node4 is in order"),
    (
        {"event": "spare_checked", "node": "node4", "ok": False, "reason": "NIC ionic_2 is down"},
        "spare node node4 is not usable: NIC ionic_2 is down",
    ),
    (
        {"event": "gpu_tested", "node": "node3", "gpu": "2", "ok": False, "reason": "3 of 100 products differ"}
        | {"device": "GPU 2 (MI300X, 0000:c1:00.0)"},
        "GPU 2 (MI300X, 0000:c1:00.0) of node3 computes wrongly: 3 of 100 products differ",
    ),
    (
        {"event": "gpu_tested", "node": "node3", "gpu": "2", "ok": True, "device": "GPU 2 (MI300X, 0000:c1:00.0)"},
        "GPU 2 (MI300X, 0000:c1:00.0) of node3 computes correctly",
    ),
    (
        {"event": "gpu_tested", "node": "node3", "gpu": "2", "ok": True, "device": "CPU"},
        "the CPU of node3, on which the run computes, computes correctly",
    ),
    (
        {"event": "gpu_tested", "node": "node3", "gpu": "2", "ok": False, "reason": "it is gone", "device": None},
        "GPU 2 of node3 fails its test: it is gone",
    ),
    (
        {"event": "gpu_tested", "node": "node3", "gpu": "2", "ok": None, "reason": "no answer within 300 s"},
        "GPU 2 of node3 could not be tested: no answer within 300 s",
    ),
    (
        {"event": "deputy_acted", "node": "node1", "reason": "no word for 20 s"},
        "the agent on node1 acted in place of the lost supervisor: no word for 20 s",
    ),
    (
        {"event": "notify_failed", "reason": "url: HTTP 404"},
        "a notification was not delivered: url: HTTP 404",
    ),
    (
        {
            "event": "rails_incomplete",
            "nodes": "node3",
            "reason": "rail 6",
            "policy": "exclude",
            "action": "exclude",
        },
        "rails are incomplete on node3: rail 6 (excluding)",
    ),
    ({"event": "rails_unknown", "reason": "timeout"}, "rails could not be checked: timeout"),
    ({"event": "rails_differ", "nodes": "n1", "reason": "x"}, "rails differ from those of other nodes on n1: x"),
    ({"event": "rails_doubtful", "nodes": "n1", "reason": "x"}, "rails look doubtful on n1: x"),
    (
        {"event": "container_checked", "nodes": "n[1-2]", "rdma_abi": {"ok: 8": "n[1-2]"}},
        "the container works on n[1-2]: RDMA ok: 8 (on n[1-2])",
    ),
    ({"event": "environment_staged", "path": "/tmp/e"}, "the Python environment is in /tmp/e on each node"),
    ({"event": "kernels_prepared", "path": "/tmp/k"}, "kernels are in /tmp/k on each node"),
    (
        {"event": "kernels_prepared", "path": "/tmp/k", "built": ["gfx942"], "problems": {"no GPU is seen": "n2"}},
        "kernels are in /tmp/k on each node, built for gfx942; ranks build others: no GPU is seen (on n2)",
    ),
]


@pytest.mark.parametrize(
    ("event", "words"), SAID, ids=lambda value: value.get("event") if isinstance(value, dict) else ""
)
def test_an_event_as_a_sentence(event: dict[str, Any], words: str) -> None:
    assert describe(event) == words


def test_an_exclusion_says_until_when() -> None:
    said = describe({"event": "nodes_excluded", "nodes": ["node3"], "expires": 1_780_000_000.0, "reason": "x"})
    assert " any more until 2026-05-28 " in said or " any more until 05-28 " in said


def test_many_ranks_are_not_all_listed() -> None:
    said = describe({"event": "ranks_ended", "ranks": list(range(1024)), "node": "n1", "what": "Killed"})
    assert said == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 1016 more on n1: Killed"


def test_kinds_as_text() -> None:
    assert kind_text("gpu_ras_uncorrectable") == "GPU RAS uncorrectable"
    assert kind_text("nan_loss") == "NaN loss"
    assert kind_text("rccl_timeout") == "RCCL timeout"


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_missing_or_of_the_wrong_type_there_is_text(kind: str) -> None:
    whole = {"event": kind} | {
        name: value for event, _ in SAID for name, value in event.items() if name != "event"
    }
    whole |= {
        "attempt": 1,
        "user": "ada",
        "job_id": "7",
        "outcome": "failed",
        "exit_code": 1,
        "host": "n",
        "signal": "S",
    }
    random.seed(kind)
    for _ in range(100):
        event = {name: value for name, value in whole.items() if name == "event" or random.random() < 0.7}
        for name in random.sample(sorted(set(event) - {"event"}), 3 if len(event) > 4 else 0):
            event[name] = random.choice([None, 7, "x", [], {}, [None], -1.5, "node["])
        assert isinstance(describe(event), str)


RECORDED = [json.loads(line) for line in Path(__file__).with_name("recorded.jsonl").read_text().splitlines()]
"""Lines of each kind as versions until November 2026 wrote them; `notify_test` is in no file."""


def test_there_is_a_recorded_line_of_each_kind() -> None:
    assert {row.get("event") or row["action"] for row in RECORDED} == CLASSES.keys() - {"notify_test"}


@pytest.mark.parametrize("row", RECORDED, ids=lambda row: str(row.get("event") or row["action"]))
def test_a_recorded_line_is_read_and_written_as_it_is(
    row: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The format on disk: names, values and order of fields."""
    read = from_row(row)
    assert type(read) is CLASSES[read.tag]
    run, by_user = RunDir(tmp_path), isinstance(read, ByUser)
    own = {"time", "user"} if by_user else {"time", "job_id"}
    fields = read.fields()
    made = type(read)(**{name: fields[name] for name in row if name in fields and name not in own})
    monkeypatch.setattr(time, "time", lambda: row["time"])
    monkeypatch.setattr(getpass, "getuser", lambda: row.get("user"))
    if isinstance(made, ByUser):
        record_by_user(run, made)
    else:
        with Recorder(run) as recorder:
            monkeypatch.setattr(recorder, "_job_id", row["job_id"])
            recorder.record(made)
    (line,) = (run.submissions if by_user else run.events).read_text().splitlines()
    assert line == json.dumps(row, separators=(",", ":"))


def test_a_row_of_another_version_is_read_as_far_as_it_goes() -> None:
    row = {"time": 1.0, "event": "attempt_ended", "outcome": "failed", "exit_code": "one", "mood": "bad"}
    event = from_row(row)
    assert isinstance(event, AttemptEnded)
    assert (event.outcome, event.exit_code, event.row) == ("failed", None, row)
    assert isinstance(from_row(row | {"outcome": 7}), UnknownEvent), "it needs an outcome"
    assert from_row({"event": "of_the_future", "sentence": "x"}).tag == "of_the_future"
    assert describe({"event": "of_the_future", "sentence": "x"}) == "sentence=x"


def test_each_event_has_a_line_that_says_what_it_means() -> None:
    for name, cls in CLASSES.items():
        assert (cls.__doc__ or "").strip().endswith("."), name


def test_only_events_of_some_kinds_are_made_of_many_rows() -> None:
    rows = [
        {"event": "fault_detected", "kind": "x"},
        {"event": "signal", "signal": "SIGUSR2"},
        {"event": "signal"},
    ]
    assert [event.signal for event in select(rows, StopAsked)] == ["SIGUSR2"]
