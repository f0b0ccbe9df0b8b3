"""Saves of a run: in the background, with the same bytes; late when a disk is slow; survived when they fail."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.train.ranks import train_on
from tests.train.runs import losses_of, make_corpus
from tests.train.runs import make_run as make_any_run
from tests.waiting import wait_for
from zslurm.aegis.fault_kinds import STORAGE_FULL
from zslurm.aegis.logs.signatures import Signatures
from zslurm.checkpoint_tools import (
    NoSpace,
    ShardReport,
    WriteFailed,
    acquire,
    list_checkpoints,
    local_tier,
    verify,
    write_shard,
)
from zslurm.train import loop as loop_module
from zslurm.train.checkpointing import checkpointer as checkpoint_module
from zslurm.train.checkpointing import save_schedule
from zslurm.train.checkpointing import writer as writer_module
from zslurm.train.jsonl import read_jsonl

STATES = ["REQUESTED", "STAGED", "WRITTEN", "COMMITTED"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data") / "tokens.h5")


def make_run(directory: Path, corpus: Path, *, steps: int = 6, checkpoint: dict[str, Any] | None = None) -> Path:
    """A run that saves in the background, as by default, if `checkpoint` does not say otherwise."""
    return make_any_run(directory, corpus, steps=steps, checkpoint={"background": True} | (checkpoint or {}))


def records(run: Path, kind: str = "checkpoint") -> list[dict[str, Any]]:
    return [row for row in read_jsonl(run / "metrics.jsonl") if row["kind"] == kind]


def saved_steps(run: Path) -> list[int]:
    return [found.step for found in list_checkpoints(run / "checkpoints") if found.complete]


def shards(run: Path, step: int) -> dict[str, bytes]:
    directory = run / "checkpoints" / f"step-{step:08d}"
    return {path.name: path.read_bytes() for path in directory.glob("shard-*")}


def test_in_the_background_and_in_the_foreground_the_same_is_saved(tmp_path: Path, corpus: Path) -> None:
    runs = {}
    for background in (True, False):
        run = runs[background] = make_run(
            tmp_path / str(background),
            corpus,
            checkpoint={"every_steps": 2, "background": background, "keep_last": 9},
        )
        done = train_on(run, ranks=2)
        assert done.returncode == 0, done.stderr
        assert ("of host memory on each rank" in done.stdout) is background
        saved = saved_steps(run)
        # A save that is due while the one before it is still written waits for it.
        assert saved == [6, 4, 2] if not background else saved[0] == 6
        assert all(verify(found.path).sound for found in list_checkpoints(run / "checkpoints"))
        for step in saved:
            rows = [row for row in records(run) if row["step"] == step]
            assert [row["state"] for row in rows] == STATES
            assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)
            assert rows[-1]["bytes"] == sum(map(len, shards(run, step).values()))
        assert not (run / "checkpoints" / ".lock").exists()
    assert losses_of(runs[True]) == losses_of(runs[False])
    for step in set(saved_steps(runs[True])) & {2, 4, 6}:
        assert shards(runs[True], step) == shards(runs[False], step)


def _disk_that_waits_for_step_4() -> None:
    """Rank 1's first shard is written only when the run is so far: never, if training waited for it."""
    real, count = write_shard, 0

    def held_up(directory: Path, *arguments: Any) -> ShardReport:
        nonlocal count
        count += 1
        if os.environ["RANK"] == "1" and count == 1:
            metrics = directory.parents[1] / "metrics.jsonl"
            wait_for(
                lambda: any(row["kind"] == "step" and row["step"] >= 4 for row in read_jsonl(metrics)), "step 4"
            )
        return real(directory, *arguments)

    vars(writer_module)["write_shard"] = held_up


def test_a_slow_disk_delays_the_next_save_and_not_the_training(tmp_path: Path, corpus: Path) -> None:
    run = make_run(tmp_path / "run", corpus, steps=12, checkpoint={"every_steps": 1, "keep_last": 20})
    done = train_on(run, ranks=2, prepare=_disk_that_waits_for_step_4)
    assert done.returncode == 0, done.stderr
    rows = [row for row in read_jsonl(run / "metrics.jsonl") if row["kind"] in ("step", "checkpoint")]
    events = [(row["kind"], row["step"], row.get("state")) for row in rows]
    between = events[events.index(("checkpoint", 1, "REQUESTED")) : events.index(("checkpoint", 1, "COMMITTED"))]
    assert ("step", 4, None) in between, "training continued while the first save was in progress"
    assert saved_steps(run)[0] == 12
    assert len(saved_steps(run)) < 12


def _disk_that_is_waited_for() -> None:
    """The same, and training waits for a save once it took a hundredth of a second."""
    _disk_that_waits_for_step_4()
    vars(save_schedule)["LONGEST_DELAY_S"] = 0.01


def test_a_save_that_takes_too_long_is_waited_for(tmp_path: Path, corpus: Path) -> None:
    checkpoint = {"every_steps": 2, "keep_last": 20}
    run = make_run(tmp_path / "run", corpus, steps=6, checkpoint=checkpoint)
    done = train_on(run, ranks=2, prepare=_disk_that_is_waited_for)
    assert done.returncode == 0, done.stderr
    assert saved_steps(run) == [6, 4, 2]
    rows = [row for row in read_jsonl(run / "metrics.jsonl") if row["kind"] in ("step", "checkpoint")]
    events = [(row["kind"], row["step"], row.get("state")) for row in rows]
    assert events.index(("checkpoint", 2, "COMMITTED")) < events.index(("step", 5, None))
    waited = {row["step"]: row["stall_s"] for row in records(run) if row["state"] == "COMMITTED"}
    assert waited[2] > 0


def _full_disk_for_a_while() -> None:
    real, count = write_shard, 0

    def full(*arguments: Any) -> ShardReport:
        nonlocal count
        count += 1
        if os.environ["RANK"] == "1" and count <= 2:
            raise NoSpace("the disk is full")
        return real(*arguments)

    vars(writer_module)["write_shard"] = full


def test_a_run_survives_failed_saves(tmp_path: Path, corpus: Path) -> None:
    checkpoint = {"every_steps": 1, "background": False, "keep_last": 9}
    run = make_run(tmp_path / "run", corpus, steps=5, checkpoint=checkpoint)
    done = train_on(run, ranks=2, prepare=_full_disk_for_a_while)
    assert done.returncode == 0, done.stderr
    failed = [row for row in records(run) if row["state"] == "FAILED"]
    reasons = [(row["step"], row["reason"].partition(";")[0]) for row in failed]
    assert reasons == [(1, "the disk is full"), (2, "the disk is full")]
    assert "the save of step 2 failed: the disk is full" in done.stdout
    assert saved_steps(run) == [5, 4, 3]
    assert all("tmp" not in path.name for path in (run / "checkpoints").iterdir()), "leftovers are cleaned"


def _full_disk() -> None:
    def full(*arguments: Any) -> ShardReport:
        raise NoSpace("the disk is full")

    vars(writer_module)["write_shard"] = full
    vars(writer_module)["free_bytes"] = lambda path: 1000


def _broken_disk() -> None:
    def broken(*arguments: Any) -> ShardReport:
        raise WriteFailed("cannot write shard: Input/output error")

    vars(writer_module)["write_shard"] = broken


def test_too_many_failed_saves_end_the_run_on_every_rank(tmp_path: Path, corpus: Path) -> None:
    checkpoint = {"every_steps": 1, "failures": 1, "background": False}
    run = make_run(tmp_path / "run", corpus, steps=9, checkpoint=checkpoint)
    done = train_on(run, ranks=2, prepare=_broken_disk)
    assert done.returncode == 1
    assert done.stderr.count("2 saves in a row failed, more than checkpoint.failures (1) allows") == 2
    assert "Input/output error" in done.stderr, "the cause is in the message"
    assert len(losses_of(run)) < 9
    assert saved_steps(run) == []


def test_a_full_disk_pauses_saves_and_training_continues(tmp_path: Path, corpus: Path) -> None:
    """The message of the last save has what the supervisor needs: no space, where, how much is free and needed."""
    checkpoint = {"every_steps": 1, "failures": 1, "background": False}
    run = make_run(tmp_path / "run", corpus, steps=6, checkpoint=checkpoint)
    done = train_on(run, ranks=2, prepare=_full_disk)
    assert done.returncode == 1
    assert len(losses_of(run)) == 6, "all steps were trained"
    first, *others = [row["reason"] for row in records(run) if row["state"] == "FAILED"]
    assert first.startswith("the disk is full; a checkpoint needs about ")
    assert others
    assert all("1000 B free, and a checkpoint needs about" in reason for reason in others), others
    message = next(line for line in done.stderr.splitlines() if "the last save failed" in line)
    match = Signatures.load().match(message)
    assert match is not None
    assert match.kind == STORAGE_FULL


def _quota_for_a_while() -> None:
    writev, count = os.writev, 0

    def refuse(descriptor: int, pieces: list[memoryview]) -> int:
        nonlocal count
        count += 1
        if os.environ["RANK"] == "1" and count <= 3:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return writev(descriptor, pieces)

    vars(os)["writev"] = refuse


def test_a_full_quota_pauses_saves_until_there_is_space(tmp_path: Path, corpus: Path) -> None:
    """What is free under a quota is not known: each save is tried, and none counts as a failure."""
    checkpoint = {"every_steps": 1, "failures": 1, "background": False, "keep_last": 9}
    run = make_run(tmp_path / "run", corpus, steps=6, checkpoint=checkpoint)
    done = train_on(run, ranks=2, prepare=_quota_for_a_while)
    assert done.returncode == 0, done.stderr
    reasons = [row["reason"] for row in records(run) if row["state"] == "FAILED"]
    assert len(reasons) == 3
    for reason in reasons:
        assert "checkpoints" in reason
        assert "Disk quota exceeded" in reason
        assert "a checkpoint needs about" in reason
    assert saved_steps(run) == [6, 5, 4]


def _file_size_limit() -> None:
    def refuse(descriptor: int, pieces: list[memoryview]) -> int:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    vars(os)["writev"] = refuse


def test_a_limit_of_file_sizes_does_not_pause_saves(tmp_path: Path, corpus: Path) -> None:
    """It does not pass: the run ends, and not as one whose disk was full."""
    checkpoint = {"every_steps": 1, "failures": 1, "background": False}
    run = make_run(tmp_path / "run", corpus, steps=9, checkpoint=checkpoint)
    done = train_on(run, ranks=2, prepare=_file_size_limit)
    assert done.returncode == 1
    message = next(line for line in done.stderr.splitlines() if "2 saves in a row failed" in line)
    assert "File too large" in message
    assert "raise `ulimit -f`" in message
    match = Signatures.load().match(message)
    assert match is None or match.kind != STORAGE_FULL
    assert len(losses_of(run)) < 9


def _full_before_the_first_step() -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise NoSpace("cannot write .lock: No space left on device (0 B free)")

    vars(checkpoint_module)["acquire"] = full


def test_a_disk_that_is_full_at_the_start_says_what_a_checkpoint_needs(tmp_path: Path, corpus: Path) -> None:
    run = make_run(tmp_path / "run", corpus, steps=2)
    done = train_on(run, ranks=2, prepare=_full_before_the_first_step)
    assert done.returncode == 1
    assert "No space left on device (0 B free); a checkpoint needs about 198 KiB" in done.stderr
    assert losses_of(run) == []


def test_a_failed_last_save_is_a_failed_run(tmp_path: Path, corpus: Path) -> None:
    run = make_run(tmp_path / "run", corpus, steps=2, checkpoint={"every_steps": 9})
    done = train_on(run, ranks=1, prepare=_full_disk)
    assert done.returncode == 1
    assert "the last save failed" in done.stderr


def test_two_runs_in_one_directory_are_refused(tmp_path: Path, corpus: Path) -> None:
    run = make_run(tmp_path / "run", corpus, steps=2)
    lock = acquire(run / "checkpoints")
    refused = train_on(run, ranks=2)
    assert refused.returncode == 1
    assert f"is in use by process {os.getpid()} on" in refused.stderr
    assert not (run / "metrics.jsonl").exists()
    lock.release()
    assert train_on(run, ranks=2).returncode == 0


def _no_memory() -> None:
    vars(checkpoint_module)["available_memory"] = lambda: 1000


def test_a_copy_that_does_not_fit_into_memory_is_refused_before_training(tmp_path: Path, corpus: Path) -> None:
    run = make_run(tmp_path / "run", corpus, steps=2)
    refused = train_on(run, ranks=2, prepare=_no_memory)
    assert refused.returncode == 2
    assert "set checkpoint.background: false" in refused.stderr
    assert losses_of(run) == []
    again = make_run(tmp_path / "run", corpus, steps=2, checkpoint={"background": False})
    assert train_on(again, ranks=2, prepare=_no_memory).returncode == 0


def _killed_at_step_5() -> None:
    real = loop_module.Trainer.train_step

    def killed(self: Any, here: Any) -> Any:
        if self.step == 4:
            self.checkpointer.writer.finish()  # so that step 3 is there
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, here)

    loop_module.Trainer.train_step = killed  # type: ignore[method-assign]


def test_a_restart_on_the_same_node_reads_its_own_copies(tmp_path: Path, corpus: Path) -> None:
    tier = local_tier(tmp_path / "nvme", tmp_path / "run" / "checkpoints")
    run = make_run(tmp_path / "run", corpus, checkpoint={"local_dir": str(tmp_path / "nvme")})
    train_on(run, ranks=2, prepare=_killed_at_step_5)
    assert saved_steps(run) == [3]
    assert len(list(tier.iterdir())) == 2
    for shard in (run / "checkpoints" / "step-00000003").glob("shard-*"):
        shard.write_bytes(bytes(shard.stat().st_size))  # not needed, while the copies are there
    done = train_on(run, ranks=2)
    assert done.returncode == 0, done.stderr
    assert "resuming tiny from step-00000003" in done.stdout
    assert not tier.exists(), "a completed run leaves nothing on the node"
    whole = make_run(tmp_path / "whole", corpus)
    assert train_on(whole, ranks=2).returncode == 0
    assert shards(run, 6) == shards(whole, 6)


# In the background, a save that is due before the one before it has ended is made later.
EVERY_SECOND = {"every_steps": 2, "keep_last": 9, "background": False}


def resumed(run: Path, corpus: Path, checkpoint: Path) -> Any:
    make_run(run, corpus, checkpoint={**EVERY_SECOND, "resume_from": str(checkpoint)})
    return train_on(run, ranks=1)


def test_a_run_can_be_taken_back_to_one_checkpoint_and_no_other(tmp_path: Path, corpus: Path) -> None:
    run = make_run(tmp_path / "run", corpus, checkpoint=EVERY_SECOND)
    assert train_on(run, ranks=1).returncode == 0
    before = {step: shards(run, step) for step in (2, 4, 6)}
    asked = run / "checkpoints" / "step-00000002"
    done = resumed(run, corpus, asked)
    assert done.returncode == 0, done.stderr
    assert "resuming tiny from step-00000002" in done.stdout
    assert saved_steps(run) == [6, 4, 2]
    assert {step: shards(run, step) for step in (2, 4, 6)} == before
    aside = sorted(path.name for path in (run / "checkpoints").glob("abandoned-*"))
    assert [name[-13:] for name in aside] == ["step-00000004", "step-00000006"]
    again = resumed(run, corpus, asked)
    assert "resuming tiny from step-00000006" in again.stdout, "a requeue resumes from what was saved since"


def test_a_checkpoint_that_was_asked_for_and_cannot_be_read_is_an_error(tmp_path: Path, corpus: Path) -> None:
    run = make_run(tmp_path / "run", corpus, checkpoint=EVERY_SECOND)
    assert train_on(run, ranks=1).returncode == 0
    asked = run / "checkpoints" / "step-00000004"
    shard = next(asked.glob("shard-*"))
    shard.write_bytes(bytes(shard.stat().st_size))
    refused = resumed(run, corpus, asked)
    assert refused.returncode == 1
    assert "checkpoint.resume_from: " in refused.stderr
    assert "no other checkpoint is taken for it" in refused.stderr
    assert [path.name for path in (run / "checkpoints").glob("abandoned-*")] == []
    missing = resumed(run, corpus, tmp_path / "nothing")
    assert missing.returncode == 1
    assert "nothing" in missing.stderr
