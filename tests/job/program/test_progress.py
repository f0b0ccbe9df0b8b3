"""What a program shows, as the record that agents read and the metrics that commands show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zslurm.config.trainer import TrainerSection
from zslurm.job.program.progress import ProgramProgress
from zslurm.run.run_dir import AttemptDir, RunDir
from zslurm.train.jsonl import read_jsonl
from zslurm.train.progress import Phase, Progress, read_progress


class Watched:
    """A rank of a program, looked at once."""

    def __init__(self, directory: Path, rank: int = 0, world_size: int = 2, **trainer: Any) -> None:
        self.run = RunDir(directory / "run")
        attempt = self.run.attempt(1)
        for place in (attempt.logs, self.run.output):
            place.mkdir(parents=True, exist_ok=True)
        section = TrainerSection.model_validate({"command": ["true"], "directory": str(directory), **trainer})
        self.records, self.file = directory, directory / f"shown-{rank}"
        self.log, self.rank = AttemptDir(attempt.path).rank_log(rank), rank
        self.progress = ProgramProgress(section, self.run, attempt, rank, world_size, self.file)
        self.progress.begin(self.records, 1234)

    def look(self, log: str | None = None, shown: dict[str, Any] | None = None) -> Progress:
        if log is not None:
            with self.log.open("a") as file:
                file.write(log)
        if shown is not None:
            self.file.write_text(json.dumps(shown))
        self.progress.look()
        record = read_progress(self.records, self.rank)
        assert record is not None
        return record

    def metrics(self, kind: str = "step") -> list[dict[str, Any]]:
        return [row for row in read_jsonl(self.run.metrics) if row["kind"] == kind]


COLOURED = "[titan] \x1b[31mstep:  7  \x1b[32mloss:  2.5000  \x1b[39mtps: 1,234\n"
PATTERN = r"step:\s*(?P<step>\d+).*?loss:\s*(?P<loss>[\d.]+).*?tps: (?P<tokens_per_s>[\d,]+)"


def test_a_pattern_sees_through_colours_and_waits_for_whole_lines(tmp_path: Path) -> None:
    watched = Watched(tmp_path, progress={"pattern": PATTERN})
    assert watched.look("[titan] starts\n").phase is Phase.SETUP
    assert watched.look(COLOURED[:30]).step == -1
    record = watched.look(COLOURED[30:])
    assert (record.phase, record.step, record.pid) == (Phase.STEP, 7, 1234)
    (row,) = watched.metrics()
    assert (row["step"], row["loss"], row["tokens_per_s"]) == (7, 2.5, 1234.0)


@pytest.mark.parametrize(("rank", "reads"), [(0, False), (1, True)])
def test_a_log_is_read_on_the_rank_that_prints(tmp_path: Path, rank: int, reads: bool) -> None:
    """On the others nothing can be said: they are no hang."""
    watched = Watched(tmp_path, rank, progress={"pattern": PATTERN, "rank": -1})
    record = watched.look(COLOURED)
    assert record.phase is (Phase.STEP if reads else Phase.UNOBSERVED)
    assert len(watched.metrics()) == int(reads)


def test_growth_is_a_sign_of_life_and_no_step(tmp_path: Path) -> None:
    watched = Watched(tmp_path, progress={"grows": "{output_dir}/log"})
    assert watched.look().phase is Phase.SETUP
    (watched.run.output / "log").write_text("x")
    first = watched.look()
    assert (first.phase, first.step) == (Phase.ALIVE, -1)
    assert watched.look().monotonic_ns == first.monotonic_ns
    (watched.run.output / "log").write_text("xx")
    assert watched.look().monotonic_ns > first.monotonic_ns
    assert watched.metrics() == []


def test_steps_of_the_program_have_their_own_times_and_the_last_one_may_save_for_long(tmp_path: Path) -> None:
    watched = Watched(tmp_path, steps=3)
    assert watched.look().phase is Phase.UNOBSERVED
    watched.look(shown={"step": 1, "time": 100.0, "loss": 3.0})
    assert watched.look(shown={"step": 2, "time": 100.5, "loss": 2.0}).phase is Phase.STEP
    assert watched.look(shown={"step": 3, "time": 102.5}).phase is Phase.SAVE
    assert [row.get("step_time_s") for row in watched.metrics()] == [None, 0.5, 2.0]


@pytest.mark.parametrize("shown", ["", "no json", "[1]", '{"step": "x"}', '{"steps": 3}', "\x00\xff"])
def test_what_is_no_step_changes_nothing(tmp_path: Path, shown: str) -> None:
    watched = Watched(tmp_path, progress={"pattern": r"it (?P<step>\S+)"})
    watched.file.write_bytes(shown.encode("latin-1"))
    assert watched.look("it is no number\n" + "x" * 100_000).step == -1
    assert watched.metrics() == []


def test_a_checkpoint_that_appears_is_noted_once(tmp_path: Path) -> None:
    (tmp_path / "step-5.pt").touch()
    watched = Watched(tmp_path, checkpoints="step-*.pt")
    watched.look()
    assert watched.metrics("checkpoint") == [], "it was there before"
    (tmp_path / "step-9.pt").touch()
    watched.progress.close()
    (row,) = watched.metrics("checkpoint")
    assert (row["step"], row["state"]) == (9, "COMMITTED")
