"""The steps of warm processes, as their own supervisor and the next one see them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from zslurm.aegis.supervisor.in_memory.warm_pool import WarmPool
from zslurm.aegis.supervisor.job import Job
from zslurm.core.processes import DetachedProcess
from zslurm.job.preparation.interpreter import Interpreter
from zslurm.run.run_dir import RunDir


def test_steps_of_warm_processes_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process of three has failed."""
    attempt = RunDir(tmp_path).attempt(1)
    attempt.path.mkdir(parents=True)
    spec = SimpleNamespace(aegis=SimpleNamespace(recovery="memory"))
    job = cast(Job, SimpleNamespace(on_slurm=False, run=RunDir(tmp_path), slurm_id=None, spec=spec))
    started: list[dict[str, Any]] = []

    def start(
        command: Sequence[str], *, log: Path, record_file: Path, exit_file: Path, **_: Any
    ) -> DetachedProcess:
        started.append({"command": command})
        record_file.write_text(json.dumps({"pid": 1 << 22, "created": 1.0, "host": "gone"}))
        log.write_text("srun: error: n0: task 1: Killed\n")
        found = DetachedProcess.adopt(record_file, exit_file)
        assert found is not None
        return found

    monkeypatch.setattr(DetachedProcess, "start", start)
    python = Interpreter.own({})
    assert WarmPool(job, attempt, python).start(["n0"], 3) == ""
    pool = WarmPool(job, attempt, python)
    assert pool.adopt() == {"n0": 3}
    ((member, failure),) = pool.ended()
    assert (member, failure.what) == ("n0/w2", "Killed")
    assert pool.ended() == [], "reported once"
    pool.start(["n0"])
    assert (attempt.path / "warm-00004.json").exists(), "numbers are not given twice"
