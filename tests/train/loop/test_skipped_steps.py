"""Steps that go wrong while training: skipped on all ranks, reported, and without a trace in the weights."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.train.ranks import train_on
from tests.train.runs import losses_of, make_corpus, make_run, steps_of
from zslurm.checkpoint_tools import list_checkpoints
from zslurm.train.jsonl import read_jsonl
from zslurm.train.loop import Trainer
from zslurm.train.schedule import Position

EVERY_STEP = {"every_steps": 1, "keep_last": 50}
TENSOR = "layers.1.router.first.weight"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data") / "tokens.h5")


def spoil(steps: Collection[int], ranks: Collection[int], factor: float) -> None:
    """Multiply the gradient of TENSOR by `factor`, in these steps (from 1) and on these ranks."""
    train_step = Trainer.train_step

    def spoiled(self: Trainer, here: Position) -> Any:
        if self.step + 1 not in steps or self.world.rank not in ranks:
            return train_step(self, here)
        hook = self.model.get_parameter(TENSOR).register_hook(lambda gradient: gradient * factor)
        try:
            return train_step(self, here)
        finally:
            hook.remove()

    Trainer.train_step = spoiled  # type: ignore[method-assign]


def skipped(run: Path) -> list[dict[str, Any]]:
    return [row for row in read_jsonl(run / "metrics.jsonl") if row["kind"] == "skipped"]


def shards_at(run: Path, step: int) -> dict[str, bytes]:
    directory = run / "checkpoints" / f"step-{step:08d}"
    return {path.name: path.read_bytes() for path in directory.glob("shard-*")}


def test_one_rank_with_a_gradient_that_is_not_finite_costs_one_step(tmp_path: Path, corpus: Path) -> None:
    run = make_run(tmp_path / "run", corpus, steps=5, checkpoint={"every_steps": 2})
    done = train_on(run, 2, partial(spoil, [3], [1], float("nan")))
    assert done.returncode == 0, done.stderr
    message = f"step 3 is skipped: gradient norm nan is not finite, first in {TENSOR} on rank 1 (1 in a row, of 5)"
    assert message in done.stdout.splitlines()
    (row,) = skipped(run)
    assert row["loss"] > 0
    expected = {
        "step": 3,
        "reason": "gradient norm nan is not finite",
        "grad_norm": None,
        "tensor": TENSOR,
        "rank": 1,
        "in_a_row": 1,
    }
    assert {key: row[key] for key in expected} == expected
    assert [row["step"] for row in steps_of(run)] == [1, 2, 4, 5]


def test_a_skipped_step_leaves_weights_moments_and_balancing_as_they_were(tmp_path: Path, corpus: Path) -> None:
    """The last step of a run is saved whether it was taken or not."""
    optim = {"spike_factor": 1.5, "spike_window": 2}
    run = make_run(tmp_path / "run", corpus, steps=4, checkpoint=EVERY_STEP, optim=optim)
    done = train_on(run, 2, partial(spoil, [4], [0, 1], 1e12))
    assert done.returncode == 0, done.stderr
    (row,) = skipped(run)
    assert "gradient norm" in row["reason"]
    assert "the median of 2 steps" in row["reason"]
    assert (row["tensor"], row["rank"]) == (None, None)
    assert row["grad_norm"] > 100
    assert shards_at(run, 4) == shards_at(run, 3)
    assert shards_at(run, 3) != shards_at(run, 2)


def test_a_resume_judges_a_spike_as_the_uninterrupted_run_does(tmp_path: Path, corpus: Path) -> None:
    """The window is part of the checkpoint: without it, step 5 would come too early to be compared."""
    optim = {"spike_factor": 3.0, "spike_window": 3}
    prepare = partial(spoil, [5], [0, 1], 1e12)
    whole = make_run(tmp_path / "whole", corpus, steps=6, checkpoint=EVERY_STEP, optim=optim)
    assert train_on(whole, 2, prepare).returncode == 0
    assert [row["step"] for row in skipped(whole)] == [5]
    for after in (4, 5):
        resumed = tmp_path / f"from-{after}"
        shutil.copytree(whole, resumed)
        (resumed / "metrics.jsonl").unlink()
        for step in range(after + 1, 7):
            shutil.rmtree(resumed / "checkpoints" / f"step-{step:08d}", ignore_errors=True)
        if after == 5:
            assert list_checkpoints(resumed / "checkpoints")[0].step == 4, "a skipped step is not saved"
        done = train_on(resumed, 2, prepare)
        assert done.returncode == 0, done.stderr
        assert [row["reason"] for row in skipped(resumed)] == [row["reason"] for row in skipped(whole)]
        assert losses_of(resumed) == losses_of(whole)[-1:]
        assert shards_at(resumed, 6) == shards_at(whole, 6)


def test_too_many_in_a_row_end_the_run(tmp_path: Path, corpus: Path) -> None:
    run = make_run(tmp_path / "run", corpus, steps=9, checkpoint=EVERY_STEP, optim={"skip_limit": 2})
    done = train_on(run, 2, partial(spoil, [2, 4, 5, 6, 7, 8, 9], [0], float("inf")))
    assert done.returncode == 1
    assert [row["in_a_row"] for row in skipped(run)] == [1, 1, 2, 3]
    assert done.stderr.count("error: step 6: gradient norm ") == 2
    assert f"is not finite, first in {TENSOR} on rank 0; it is the last of 3 in a row" in done.stderr
    assert "optim.skip_limit (2)" in done.stderr
    assert "Traceback" not in done.stderr
    assert list_checkpoints(run / "checkpoints")[0].step == 3, "nothing is saved while steps are skipped"


def test_a_save_that_was_due_is_made_up_for(tmp_path: Path, corpus: Path) -> None:
    run = make_run(tmp_path / "run", corpus, steps=5, checkpoint={"every_steps": 3})
    assert train_on(run, 1, partial(spoil, [3], [0], float("nan"))).returncode == 0
    assert [found.step for found in list_checkpoints(run / "checkpoints")] == [5, 4]


def test_the_z_loss_is_reported_beside_the_loss_and_changes_the_steps(tmp_path: Path, corpus: Path) -> None:
    plain = make_run(tmp_path / "plain", corpus, steps=3)
    with_z = make_run(tmp_path / "z", corpus, steps=3, optim={"z_loss": 0.1})
    for run in (plain, with_z):
        assert train_on(run, 1).returncode == 0
    assert all("z_loss" not in row for row in steps_of(plain))
    assert all(1 < row["z_loss"] < 3 for row in steps_of(with_z)), "a tenth of the square of about ln 64"
    ours, theirs = losses_of(with_z), losses_of(plain)
    assert ours[0] == theirs[0], "the loss is the cross-entropy alone"
    assert ours[1:] != theirs[1:]
