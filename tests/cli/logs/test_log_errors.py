"""`zslurm logs --errors`: the root before what followed from it, over all ranks."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.cli.commands import Zslurm
from tests.run.stories import Story
from zslurm.aegis.core.policy.outcome import Cause
from zslurm.cli.logs.logs import details_of_root, rank_errors
from zslurm.train.jsonl import JsonLinesWriter

PEER_LEFT = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:6230"


def end(story: Story, rank: int, when: float, error: str, message: str, traceback: str = "") -> None:
    body = {"rank": rank, "node": f"node{rank // 2}", "exit_code": 1, "time": when, "step": 12, "error": error}
    path = story.run.attempt(1).rank_end(rank)
    path.write_text(json.dumps(body | {"message": message, "traceback": traceback}))


def ranks_ended(story: Story, ranks: list[int], node: str, what: str) -> None:
    with JsonLinesWriter(story.run.events) as lines:
        event = {"time": 50.0, "event": "ranks_ended", "job_id": "local-1", "attempt": 1}
        lines.append(event | {"ranks": ranks, "node": node, "what": what})


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path / "tiny", ranks=6).submitted().started()


def rows(story: Story) -> list[list[str]]:
    found = [error.as_row() for error in rank_errors(story.run, story.run.attempt(1))]
    return [[row[0], row[1], row[2], row[5]] for row in found]


def test_the_root_comes_first_and_its_cascade_shares_a_row(story: Story) -> None:
    for rank in (0, 1, 2, 4):
        end(story, rank, 10.0 + rank, "RuntimeError", PEER_LEFT)
    end(story, 3, 20.0, "OSError", "No space left on device", "Traceback ...\nOSError: No space left on device\n")
    end(story, 5, 30.0, "ValueError", "later, on its own")
    cause = Cause("OSError: No space left on device", rank=3, node="node1", exit_code=1, step=12)
    story.ended("failed", 1, cause)
    assert rows(story) == [
        ["root", "3", "node1", "OSError: No space left on device"],
        ["failed", "5", "node2", "ValueError: later, on its own"],
        ["cascade", "0-2,4", "node[0-2]", f"RuntimeError: {PEER_LEFT}"],
    ]
    assert list(details_of_root(rank_errors(story.run, story.run.attempt(1)))) == [
        "rank 3 on node1:", "  Traceback ...", "  OSError: No space left on device",
    ]  # fmt: skip


def test_ranks_that_failed_in_the_same_way_are_all_the_root(story: Story) -> None:
    for rank in range(4):
        end(story, rank, 10.0 + rank, "ConfigError", "parallel.device: cuda: there is none")
    story.ended("failed", 1, Cause("ConfigError: parallel.device: cuda: there is none", rank=1, node="node0"))
    assert rows(story) == [["root", "0-3", "node[0-1]", "ConfigError: parallel.device: cuda: there is none"]]


def test_a_killed_rank_is_reported_by_slurm_and_by_the_end_of_its_log(story: Story) -> None:
    for rank in (0, 1):
        end(story, rank, 10.0, "RuntimeError", PEER_LEFT)
    story.logged(3, "step 1\n\nHW Exception by GPU node-4\n")
    ranks_ended(story, [3], "node1", "Killed")
    ranks_ended(story, [0, 1], "node0", "Exited with exit code 1")
    story.ended("failed", 137, Cause("Killed", rank=3, node="node1", exit_code=137))
    assert [row[:3] for row in rows(story)] == [["root", "3", "node1"], ["cascade", "0-1", "node0"]]
    found = list(details_of_root(rank_errors(story.run, story.run.attempt(1))))
    assert found == ["rank 3 on node1, the end of its log:", "  step 1", "  HW Exception by GPU node-4"]


def test_a_failed_node_is_the_root_although_no_rank_said_so(story: Story) -> None:
    end(story, 0, 10.0, "RuntimeError", PEER_LEFT)
    story.ended("failed", 1, Cause("Slurm reports node node1 as failed", node="node1"))
    assert rows(story) == [
        ["root", "-", "node1", "Slurm reports node node1 as failed"],
        ["cascade", "0", "node0", f"RuntimeError: {PEER_LEFT}"],
    ]


def test_an_attempt_that_still_runs_shows_what_is_there(story: Story) -> None:
    end(story, 0, 10.0, "RuntimeError", PEER_LEFT)
    assert rows(story) == [["cascade", "0", "node0", f"RuntimeError: {PEER_LEFT}"]]


def test_a_rank_that_left_with_0_and_recorded_nothing_is_the_root(story: Story) -> None:
    end(story, 0, 10.0, "RuntimeError", PEER_LEFT)
    line = "exited with exit code 0 before the end of the run"
    with JsonLinesWriter(story.run.events) as lines:
        lines.append(
            {"time": 9.0, "event": "fault_detected", "job_id": "local-1", "attempt": 1, "kind": "early_exit"}
            | {"source": "srun", "line": line, "node": "node1", "rank": 3, "step": 12}
        )
    story.ended("failed", 1, Cause(line, rank=3, node="node1", exit_code=0, step=12))
    assert rows(story) == [["root", "3", "node1", line], ["cascade", "0", "node0", f"RuntimeError: {PEER_LEFT}"]]


def test_the_newest_attempt_that_has_errors_is_shown(
    story: Story, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    end(story, 3, 20.0, "OSError", "disk", "Traceback\n")
    story.ended("failed", 1, Cause("OSError: disk", rank=3, node="node1"))
    story.started(2).started(3)
    zslurm = Zslurm(monkeypatch, capsys)
    done = zslurm.ok("logs", story.run.path, "--errors")
    assert done.stdout.splitlines()[1].split("\t")[0] == "root"
    assert done.stderr == "tiny: attempt 1; no rank of a later one recorded an error\n"
    (found,) = zslurm.ok("logs", story.run.path, "--errors", "--json").json
    assert found["attempt"] == 1
    asked = zslurm.ok("logs", story.run.path, "--errors", "--attempt", "3")
    assert (asked.stdout, asked.stderr) == ("", "tiny: no rank of attempt 3 recorded an error\n")


def test_the_command(story: Story, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    zslurm = Zslurm(monkeypatch, capsys)
    done = zslurm.ok("logs", story.run.path, "--errors")
    assert (done.stdout, done.stderr) == ("", "tiny: no rank of attempt 1 recorded an error\n")
    end(story, 3, 20.0, "OSError", "disk", "Traceback\n")
    story.ended("failed", 1, Cause("OSError: disk", rank=3, node="node1"))
    when = time.strftime("%m-%d %H:%M:%S", time.localtime(20.0))
    assert zslurm.ok("logs", story.run.path, "--errors").stdout.splitlines() == [
        "role\tranks\tnode\ttime\tstep\tfirst line",
        f"root\t3\tnode1\t{when}\t12\tOSError: disk",
        "rank 3 on node1:",
        "  Traceback",
    ]
    (found,) = zslurm.ok("logs", story.run.path, "--errors", "--json").json
    assert (found["role"], found["ranks"], found["when"]) == ("root", [3], 20.0)
    for wrong in (["--errors", "-f"], ["--supervisor", "--json"], ["--rank", "x"]):
        assert zslurm("logs", story.run.path, *wrong).code == 2
    assert zslurm("logs", story.run.path, "--errors", "--attempt", "7").code == 3
