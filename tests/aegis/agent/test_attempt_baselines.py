"""What agents of a node hand on: whatever became of the file, the next agent starts, and says what it lacks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from zslurm.aegis.agent.attempt_baselines import NodeMemory
from zslurm.run.run_dir import RunDir

ENVIRON = {"SLURMD_NODENAME": "node[0]"}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    run = RunDir(tmp_path)
    yield run
    NodeMemory(run, ENVIRON, 0).forget()


def test_the_next_agent_knows_what_the_one_before_left(run: RunDir) -> None:
    first = NodeMemory(run, ENVIRON, 0)
    assert (first.problem, first.known) == ("", {})
    first.keep(3, "nic", {"up": 8})
    first.keep(3, "gpu", [1, 2])
    first.keep(3, "disk", None)
    second = NodeMemory(run, ENVIRON, 3)
    assert (second.problem, second.known) == ("", {"nic": {"up": 8}, "gpu": [1, 2]})
    second.keep(3, "gpu", [3])
    assert NodeMemory(run, ENVIRON, 3).known == {"nic": {"up": 8}, "gpu": [3]}
    assert first.path(3).stat().st_mode & 0o777 == 0o600


def test_nodes_and_runs_share_nothing(run: RunDir, tmp_path: Path) -> None:
    NodeMemory(run, ENVIRON, 0).keep(1, "nic", 1)
    for other in (
        NodeMemory(run, {"SLURMD_NODENAME": "node[0]-1"}, 1),
        NodeMemory(RunDir(tmp_path / "b"), ENVIRON, 1),
    ):
        assert other.known == {}
        other.keep(2, "nic", 2)
        assert NodeMemory(run, ENVIRON, 1).known == {"nic": 1}, "another's is not removed"
        other.forget()
        assert NodeMemory(run, ENVIRON, 1).known == {"nic": 1}


def test_another_attempt_begins_anew_and_removes_what_was_before(run: RunDir) -> None:
    memory = NodeMemory(run, ENVIRON, 0)
    memory.keep(1, "nic", "old")
    memory.keep(2, "gpu", "new")
    assert not memory.path(1).exists()
    assert NodeMemory(run, ENVIRON, 2).known == {"gpu": "new"}
    memory.keep(1, "nic", "late")
    assert not memory.path(1).exists()


def test_without_an_attempt_nothing_is_kept(run: RunDir) -> None:
    memory = NodeMemory(run, ENVIRON, 0)
    memory.keep(0, "nic", 1)
    assert not memory.path(0).exists()


def test_what_nobody_hears_is_left_for_the_next_agent_to_see(run: RunDir) -> None:
    memory = NodeMemory(run, ENVIRON, 0)
    memory.keep(1, "nic", 1)
    memory.frozen = True
    memory.keep(1, "nic", 2)
    assert NodeMemory(run, ENVIRON, 1).known == {"nic": 1}


def test_nothing_is_left_of_a_run_that_is_over(run: RunDir) -> None:
    memory = NodeMemory(run, ENVIRON, 0)
    memory.keep(1, "nic", 1)
    memory.forget()
    memory.keep(1, "nic", 2)
    assert not memory.path(1).exists()


WHOLE = {"version": 1, "attempt": 1, "sensors": {}}


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"\x00\xff", b"[]", b"7", b"null", b"[" * 100_000,
        *(json.dumps(WHOLE | {name: value}).encode() for name, value in
          [("version", 2), ("attempt", 2), ("attempt", None), ("sensors", []), ("sensors", None)]),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named_and_replaced(run: RunDir, text: bytes) -> None:
    path = NodeMemory(run, ENVIRON, 0).path(1)
    path.write_bytes(text)
    memory = NodeMemory(run, ENVIRON, 1)
    assert memory.known == {}
    assert str(path) in memory.problem
    memory.keep(1, "nic", 1)
    assert NodeMemory(run, ENVIRON, 1).known == {"nic": 1}


def test_a_missing_file_is_said_to_be_missing(run: RunDir) -> None:
    assert NodeMemory(run, ENVIRON, 1).problem == "nothing was remembered"


def test_a_link_is_not_followed_and_a_directory_is_no_file(run: RunDir, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text(json.dumps(WHOLE | {"sensors": {"nic": "forged"}}))
    path = NodeMemory(run, ENVIRON, 0).path(1)
    path.symlink_to(other)
    memory = NodeMemory(run, ENVIRON, 1)
    assert memory.known == {}
    memory.keep(1, "nic", 1)
    assert "forged" in other.read_text(), "it is replaced, not written through"
    path.unlink()
    path.mkdir()
    memory = NodeMemory(run, ENVIRON, 1)
    assert memory.problem
    memory.keep(1, "nic", 1)
    path.rmdir()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_another_users_file_is_not_believed(run: RunDir) -> None:
    path = NodeMemory(run, ENVIRON, 0).path(1)
    path.write_text(json.dumps(WHOLE | {"sensors": {"nic": "forged"}}))
    os.chown(path, 65534, 65534)
    memory = NodeMemory(run, ENVIRON, 1)
    assert memory.known == {}
    assert "another user's" in memory.problem
