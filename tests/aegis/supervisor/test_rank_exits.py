"""What ranks and srun left behind, as faults."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zslurm.aegis.core.root_cause import first_cause, roots_of
from zslurm.aegis.fault_kinds import STORAGE_FULL
from zslurm.aegis.logs.signatures import Signatures
from zslurm.aegis.supervisor import rank_exits as findings
from zslurm.aegis.supervisor.rank_exits import (
    fault_of_end,
    faults_in_step_log,
    faults_of_failure,
    forget_former_end,
    full_disk,
    rank_ends,
)
from zslurm.aegis.types import AttemptSummary
from zslurm.config.aegis import AegisSection
from zslurm.core.files import read_json
from zslurm.run.run_dir import AttemptDir
from zslurm.slurm.on_nodes.srun_output import TaskFailure

NODES = ["node0", "node0", "node1", "node1"]
REFUSED = "srun: error: Unable to create step for job 2: Memory required by task is not available\n"


def attempt_in(directory: Path, number: int = 1) -> AttemptDir:
    attempt = AttemptDir(directory / f"{number:06d}")
    attempt.logs.mkdir(parents=True)
    attempt.ranks.mkdir()
    attempt.description.write_text("{}")
    return attempt


def end(**fields: Any) -> dict[str, Any]:
    return {"rank": 0, "node": "node0", "exit_code": 1, "time": time.time(), "step": 12, **fields}


@pytest.mark.parametrize(
    ("fields", "kind", "role"),
    [
        ({"error": "ZeroDivisionError", "message": "division by zero"}, "user_error", "root"),
        ({"error": "ModuleNotFoundError", "message": "No module named 'flash_attn'"}, "user_import", "root"),
        ({"error": "DataError", "message": "data.path: gone", "exit_code": 2}, "config_error", "root"),
        (
            {"error": "OutOfMemoryError", "message": "HIP out of memory. Tried to allocate 3 GiB."},
            "gpu_oom",
            "root",
        ),
        (
            {"error": "RuntimeError", "message": "Connection closed by peer [127.0.0.1]:641"},
            "peer_lost",
            "cascade",
        ),
        ({}, "rank_exit", "root"),
    ],
)
def test_what_a_rank_recorded(fields: dict[str, Any], kind: str, role: str) -> None:
    fault = fault_of_end(end(**fields), NODES, Signatures.load())
    assert (fault.kind, fault.role, fault.node, fault.rank, fault.step) == (kind, role, "node0", 0, 12)


def test_the_record_of_a_rank_that_was_replaced_is_removed_and_that_of_its_successor_stays(tmp_path: Path) -> None:
    """The successor may have trained the last step before the supervisor learns that it has the place."""
    attempt = attempt_in(tmp_path)
    for rank, member in ((1, "node0/1"), (2, "node1/w5")):
        attempt.rank_end(rank).write_text(json.dumps(end(rank=rank, member=member)))
    forget_former_end(attempt, 0, "node0/w3")  # it was killed, and recorded nothing
    forget_former_end(attempt, 1, "node0/w4")
    forget_former_end(attempt, 2, "node1/w5")
    assert [each["member"] for each in rank_ends(attempt)] == ["node1/w5"]


def test_a_diverged_loss_is_blamed_on_the_rank_where_it_began() -> None:
    message = "step 13: the gradient is not finite, first in layers.0.w on rank 2; it is the last of 3 in a row"
    fault = fault_of_end(end(error="Diverged", message=message), NODES, Signatures.load())
    assert (fault.kind, fault.rank, fault.node) == ("nan_loss", 2, "node1")


@pytest.mark.parametrize(
    ("error", "kind", "scope"),
    [
        ("WrongProduct", "numbers_wrong", "gpu"),
        ("ChangedMemory", "memory_changed", "gpu"),
        ("WrongTransfer", "transfer_wrong", "nic"),
    ],
)
def test_wrong_numbers_are_blamed_on_the_rank_that_all_ranks_name(error: str, kind: str, scope: str) -> None:
    message = "step 6: a microbatch has another result on rank 3 than on two others, first in layers.0.w"
    fault = fault_of_end(end(error=error, message=message), NODES, Signatures.load())
    assert (fault.kind, fault.scope, fault.rank, fault.node) == (kind, scope, 3, "node1")


def test_the_last_words_of_a_killed_rank_explain_it(tmp_path: Path) -> None:
    attempt = attempt_in(tmp_path)
    attempt.rank_log(3).write_text(
        "step 7 loss 2.1\nHW Exception by GPU node-9 (Agent handle: 0x63) reason :GPU Hang\n"
    )
    failure = TaskFailure("node1", (2, 3), "Aborted")
    silent, explained = faults_of_failure(attempt, failure, NODES, Signatures.load())
    assert (silent.kind, silent.rank, silent.line) == ("rank_killed", 2, "Aborted")
    assert (explained.kind, explained.rank, explained.node) == ("gpu_hang_reset", 3, "node1")


def test_only_the_records_of_the_ranks_that_srun_names_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an attempt of a thousand ranks srun tells line by line."""
    attempt, read = attempt_in(tmp_path), []
    for rank in range(4):
        said = end(rank=rank, node="node1", error="KeyError", message="'lr'")
        attempt.rank_end(rank).write_text(json.dumps(said))
    monkeypatch.setattr(findings, "read_json", lambda path: read.append(path) or read_json(path))
    (fault,) = faults_of_failure(attempt, TaskFailure("node1", (2,), "exit"), NODES, Signatures.load())
    assert (fault.kind, fault.rank, fault.line) == ("user_error", 2, "KeyError: 'lr'")
    assert read == [attempt.rank_end(2)]


def test_options_that_srun_refuses_are_the_users_only_in_the_first_attempt(tmp_path: Path) -> None:
    for number, kind in ((1, "slurm_launch_config"), (2, "slurm_step_refused")):
        attempt = attempt_in(tmp_path, number)
        attempt.step_log.write_text(REFUSED)
        (fault,) = faults_in_step_log(attempt)
        assert (fault.kind, fault.source) == (kind, "srun")
        json.dumps(fault.fields())


def _space(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    space = SimpleNamespace(f_bavail=free // 4096, f_frsize=4096, f_files=1000, f_favail=10)
    monkeypatch.setattr("os.statvfs", lambda path: space)


def test_a_full_disk_explains_a_rank_that_could_not_write_why_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = [fault_of_end(end(error="TrainError", message="the save failed"), NODES, Signatures.load())]
    _space(monkeypatch, 1 << 30)
    assert full_disk(tmp_path, ended) == []
    _space(monkeypatch, 8192)
    (full,) = full_disk(tmp_path, ended)
    assert (full.kind, full.line) == (STORAGE_FULL, f"{tmp_path}: No space left on device (8.00 KiB free)")
    state = AttemptSummary(time.time(), 1, "failed", (*ended, full), -1)
    assert first_cause(roots_of(state, AegisSection())) == full


def test_a_full_disk_does_not_hide_a_better_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _space(monkeypatch, 0)
    oom = end(error="OutOfMemoryError", message="HIP out of memory. Tried to allocate 3 GiB.")
    assert full_disk(tmp_path, [fault_of_end(oom, NODES, Signatures.load())]) == []
