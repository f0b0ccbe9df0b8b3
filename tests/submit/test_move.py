"""Requests to move ranks: what is refused before anything is asked, and how the supervisor's answers read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.submit.specs import run_spec
from zslurm.core.errors import ConfigError, NotFound, SlurmUnavailable, ZslurmError
from zslurm.run.run_dir import RunDir
from zslurm.run.state.run_state import RunState
from zslurm.run.state.state_events import AegisView
from zslurm.submit import move
from zslurm.submit.move import answers_to, ask_to_move
from zslurm.train.jsonl import read_jsonl

MEMORY = {"recovery": "memory"}


class Moved:
    """A run whose job has four nodes, of which n0 to n2 have ranks, as Slurm and its own files show it."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run = RunDir(directory / "runs" / "tiny")
        self.run.path.mkdir(parents=True)
        self.state = RunState(self.run, "running", "7", launcher="slurm", nodes="n[0-3]")
        self.directory = directory
        self.configure(aegis=MEMORY)
        self.event("attempt_started", attempt=1, nodes="n[0-2]")
        monkeypatch.setattr(move, "look", lambda run: self.state)
        monkeypatch.setattr(move, "_POLL_S", 0.0)
        monkeypatch.setattr(move, "_STATE_S", 0.0)

    def configure(self, **sections: dict[str, Any]) -> None:
        spec = run_spec(self.directory, **sections)
        self.run.config.write_text(spec.model_dump_json())

    def event(self, kind: str, **fields: Any) -> None:
        with self.run.events.open("a") as file:
            file.write(json.dumps({"time": 1.0, "event": kind, "job_id": "7", **fields}) + "\n")

    def now(self, **fields: Any) -> None:
        self.state = RunState(**(vars(self.state) | fields))


@pytest.fixture
def moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Moved:
    return Moved(tmp_path, monkeypatch)


def test_a_request_is_a_line_for_the_supervisor(moved: Moved) -> None:
    asked = ask_to_move(moved.run, "n1")
    (row,) = read_jsonl(moved.run.submissions)
    assert (row["action"], row["job_id"], row["off"], row["request"]) == ("move", "7", "n1", asked.request)


def test_ranks_are_where_they_moved_last(moved: Moved) -> None:
    moved.event("ranks_moved", attempt=1, generation=1, off="n1", ranks=[1], step=5, nodes="n0,n3,n2")
    with pytest.raises(NotFound, match="no rank of tiny is on n1"):
        ask_to_move(moved.run, "n1")


@pytest.mark.parametrize(
    ("sections", "off", "kind", "message"),
    [
        ({"aegis": MEMORY}, "n9", NotFound, r"no rank of tiny is on n9; ranks are on n\[0-2\]"),
        ({"aegis": MEMORY}, "n[0-1]", ConfigError, "the spares left are n3, and each node to leave takes one"),
        ({"aegis": {}}, "n1", ConfigError, "aegis.recovery is restart"),
        ({"aegis": MEMORY | {"mode": "observe"}}, "n1", ConfigError, "aegis.mode is observe"),
        ({"aegis": MEMORY | {"mode": "off"}}, "n1", ConfigError, "aegis.mode is off"),
        ({"aegis": MEMORY}, "n[", ZslurmError, r"n\["),
    ],
)
def test_what_the_run_s_settings_and_nodes_do_not_allow_is_refused(
    moved: Moved, sections: dict[str, Any], off: str, kind: type[Exception], message: str
) -> None:
    moved.configure(**sections)
    with pytest.raises(kind, match=message):
        ask_to_move(moved.run, off)
    assert not moved.run.submissions.exists(), "nothing was asked"


@pytest.mark.parametrize(
    ("state", "kind", "message"),
    [
        ({"job_id": None, "state": "prepared"}, NotFound, "never submitted"),
        ({"state": "pending"}, ZslurmError, "it is pending, and only the ranks of a run that runs can move"),
        ({"state": "completed"}, ZslurmError, "it is completed"),
        ({"state": "unknown", "reason": "no answer"}, SlurmUnavailable, "no answer"),
        ({"state": "copied", "reason": "a copy of x"}, ZslurmError, "a copy of x"),
        ({"launcher": "local"}, ConfigError, "this machine alone"),
        ({"job_id": "8"}, ZslurmError, "no ranks run yet"),
        ({"nodes": "n[0-2]"}, ConfigError, "the job has no spare node left"),
        ({"aegis": AegisView(excluded=("n3",))}, ConfigError, "the job has no spare node left"),
    ],
)
def test_a_run_that_cannot_move_is_refused(
    moved: Moved, state: dict[str, Any], kind: type[Exception], message: str
) -> None:
    moved.now(**state)
    with pytest.raises(kind, match=message):
        ask_to_move(moved.run, "n1")


def test_the_answers_come_node_by_node(moved: Moved) -> None:
    moved.now(nodes="n[0-4]")
    asked = ask_to_move(moved.run, "n[0-1]")
    moved.event("move_refused", attempt=1, off="n0", reason="of another request", request="other")
    where = {"generation": 1, "nodes": "n[1-3]", "reason": "asked for by ann", "request": asked.request}
    moved.event("ranks_moved", attempt=1, off="n0", ranks=[0], step=41, rolled_back=0, seconds=0.31, **where)
    moved.event("move_refused", attempt=1, off="n1", reason="no spare node", request=asked.request)
    assert [(answer.moved, answer.line) for answer in answers_to(moved.run, asked)] == [
        (True, "rank 0 moved off n0 after step 41, no step lost, a pause of 0.31 s: asked for by ann"),
        (False, "the ranks do not move off n1: no spare node"),
    ]


def test_a_run_that_ends_first_is_no_endless_wait(moved: Moved) -> None:
    asked = ask_to_move(moved.run, "n1")
    moved.now(state="failed")
    assert [(answer.moved, answer.line) for answer in answers_to(moved.run, asked)] == [
        (False, "tiny has ended before its ranks moved off n1")
    ]
