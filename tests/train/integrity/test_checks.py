"""Runs with `integrity.every_steps`: nothing is reported in a sound one, and a flipped bit names its rank."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.integrity.flips import TENSOR, flip, inject
from tests.train.ranks import train_on
from tests.train.recovery.cluster import Cluster
from tests.train.recovery.test_recovery import all_output, losses, recover_once, showing
from tests.train.runs import losses_of, make_corpus, make_run
from zslurm.aegis.logs.signatures import Signatures
from zslurm.checkpoint_tools import NoSpace, ShardReport, list_checkpoints
from zslurm.train.checkpointing import writer
from zslurm.train.checkpointing.checkpointer import Checkpointer
from zslurm.train.errors import NumbersWrong
from zslurm.train.integrity.checks import Integrity
from zslurm.train.jsonl import read_jsonl
from zslurm.train.loop import Trainer
from zslurm.train.parallel.two_level import TwoLevel
from zslurm.train.parallel.zero import ZeroShards
from zslurm.train.stop import Ending

EVERY_3 = {"integrity": {"every_steps": 3}, "checkpoint": {"every_steps": 2, "keep_last": 9}}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data") / "tokens.h5")


def rows(run: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_jsonl(run / "metrics.jsonl") if row["kind"] == kind]


def saved(run: Path) -> list[int]:
    return [listing.step for listing in list_checkpoints(run / "checkpoints")]


@pytest.mark.parametrize(
    ("ranks", "local", "sections"),
    [
        (1, 1, {}),
        (2, 2, {"parallel": {"dtype": "bf16", "reduce_dtype": "bf16"}}),
        (4, 2, {"parallel": {"collectives": "two_level"}}),
        (4, 4, {"phase": {"context_parallel": 2}}),
    ],
)
def test_a_sound_run_is_as_without_checks(
    tmp_path: Path, corpus: Path, ranks: int, local: int, sections: dict[str, Any]
) -> None:
    checked = make_run(tmp_path / "checked", corpus, steps=7, **EVERY_3, **sections)
    plain = make_run(tmp_path / "plain", corpus, steps=7, **sections)
    for run in (checked, plain):
        done = train_on(run, ranks, local_size=local)
        assert done.returncode == 0, done.stderr
    assert losses_of(checked) == losses_of(plain)
    assert [row["step"] for row in rows(checked, "integrity") if row["products"]] == [2, 3, 6]
    assert not rows(plain, "integrity")
    assert not rows(checked, "integrity_off")


def test_a_rank_that_computes_other_numbers_is_named_and_its_steps_are_trained_again(
    tmp_path: Path, corpus: Path
) -> None:
    """The rank is wrong from step 5 on: the checkpoint of step 4, after the last check, is not trusted either."""
    run = make_run(tmp_path / "run", corpus, steps=8, **EVERY_3)
    done = train_on(run, 4, partial(inject, "product", 2, range(5, 9)), local_size=2)
    assert done.returncode == 1
    line = (
        f"error: step 6: a microbatch has another result on rank 2 than on two others, first in {TENSOR}; "
        "the numbers were last found right in step 3, 3 steps before"
    )
    assert done.stderr.splitlines().count(line) == 4
    assert "integrity: the run goes back to step 2, and trains 3 steps again" in done.stdout + done.stderr
    assert saved(run) == [2]
    assert train_on(run, 4, local_size=2).returncode == 0
    clean = make_run(tmp_path / "clean", corpus, steps=8)
    assert train_on(clean, 4, local_size=2).returncode == 0
    assert losses_of(run)[-6:] == losses_of(clean)[-6:]


def test_two_ranks_that_always_differ_are_reported_once_and_train_on(tmp_path: Path, corpus: Path) -> None:
    run = make_run(tmp_path / "run", corpus, steps=7, **EVERY_3)
    done = train_on(run, 2, partial(inject, "product", 1, range(2, 9)))
    assert done.returncode == 0, done.stderr
    (off,) = rows(run, "integrity_off")
    assert (off["step"], off["first"], off["reason"]) == (2, TENSOR, "two ranks differ, and there is no third")
    assert [row["products"] for row in rows(run, "integrity")] == [False] * 3
    (line,) = [text for text in (done.stdout + done.stderr).splitlines() if "do not repeat" in text]
    match = Signatures.load().match(line)
    assert match is not None
    assert (match.kind, match.role) == ("numbers_unrepeatable", "advisory")


def _spoil_one_product() -> None:
    """Have rank 0 compute one microbatch otherwise, once, in the second step; a `prepare` of ranks."""
    note = Integrity.note

    def spoiling(self: Integrity, losses: torch.Tensor) -> None:
        step = self._check.step if self._check is not None else 0
        note(self, losses + (self._world.rank == 0 and step == 1))

    Integrity.note = spoiling  # type: ignore[method-assign]


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_a_third_rank_a_rank_is_named_that_contradicts_itself(
    tmp_path: Path, corpus: Path, ranks: int
) -> None:
    run = make_run(tmp_path / "run", corpus, steps=3, **EVERY_3)
    done = train_on(run, ranks, _spoil_one_product)
    assert done.returncode == 1
    words = "a microbatch has another result on rank 0 than in its other computations, first in the loss"
    assert done.stderr.count(words) == ranks


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("received", "that arrived on rank 1 is not the sum of what all ranks sent"),
        ("weights", "value_previous.weight on rank 1 are not what their owners sent, or changed in memory"),
        ("masters", "masters or moments on rank 1 changed in memory after step 5"),
        ("moments", "masters or moments on rank 1 changed in memory after step 5"),
    ],
)
def test_a_bit_that_flips_names_its_rank(tmp_path: Path, corpus: Path, target: str, words: str) -> None:
    run = make_run(tmp_path / "run", corpus, steps=8, **EVERY_3)
    done = train_on(run, 3, partial(inject, target, 1, range(6, 7)))
    assert done.returncode == 1
    assert done.stderr.count(words) == 3
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("element", [12345, 123])
def test_of_two_ranks_the_one_is_named_whose_weights_are_not_the_owner_s(
    tmp_path: Path, corpus: Path, rank: int, element: int
) -> None:
    """There is no majority, and which of two digests is smaller must not decide."""
    run = make_run(tmp_path / "run", corpus, steps=8, **EVERY_3)
    done = train_on(run, 2, partial(inject, "weights", rank, range(6, 7), element))
    assert done.returncode == 1
    assert done.stderr.count(f"on rank {rank} are not what their owners sent") == 2


def test_a_gradient_that_arrives_as_nan_is_a_wrong_transfer(tmp_path: Path, corpus: Path) -> None:
    run = make_run(tmp_path / "run", corpus, steps=3, **EVERY_3)
    done = train_on(run, 2, _receive_nan)
    assert done.returncode == 1
    assert done.stderr.count("that arrived on rank 1 is not the sum of what all ranks sent") == 2


def _receive_nan() -> None:
    """Have rank 1 receive NaN from the second step on; a `prepare` of ranks."""
    reduce_gradients, calls = ZeroShards.reduce_gradients, list[int]()

    def receiving(self: ZeroShards) -> None:
        reduce_gradients(self)
        calls.append(len(calls))
        if self.rank == 1 and calls[-1] > 0:
            self.master_gradient[0] = torch.nan

    ZeroShards.reduce_gradients = receiving  # type: ignore[method-assign]


def test_the_last_bit_of_a_gradient_that_arrives_is_compared_too(tmp_path: Path, corpus: Path) -> None:
    run = make_run(tmp_path / "run", corpus, steps=8, **EVERY_3)
    done = train_on(run, 3, partial(inject, "received", 1, range(6, 7), bit=0))
    assert done.returncode == 1
    words = (
        "that arrived on rank 1 is another one than two further reductions give; sent again, all arrives "
        "between all pairs as it was sent"
    )
    assert done.stderr.count(words) == 3


def _receive_otherwise_each_time() -> None:
    """Have rank 1 receive sums whose last bits differ with each reduction; a `prepare` of ranks."""
    reduce_gradients, calls = ZeroShards.reduce_gradients, list[int]()

    def receiving(self: ZeroShards) -> None:
        reduce_gradients(self)
        calls.append(len(calls))
        if self.rank == 1:
            flip(self.master_gradient, 0, calls[-1] % 3)

    ZeroShards.reduce_gradients = receiving  # type: ignore[method-assign]


def test_sums_that_are_others_each_time_are_reported_once_and_train_on(tmp_path: Path, corpus: Path) -> None:
    run = make_run(tmp_path / "run", corpus, steps=7, **EVERY_3)
    done = train_on(run, 2, _receive_otherwise_each_time)
    assert done.returncode == 0, done.stderr
    (off,) = rows(run, "integrity_off")
    assert (off["step"], off["what"]) == (2, "the sums of gradients")
    assert [(row["products"], row["sums"]) for row in rows(run, "integrity")] == [(True, False)] * 3


def _send_wrong_from_0_to_3(*further: int) -> None:
    """Have all that rank 0 sends to rank 3 in exchanges arrive changed from step 5 on; a `prepare` of ranks.

    `further` ranks get it changed as well.
    """
    all_to_all, train_step = TwoLevel.all_to_all, Trainer.train_step
    steps: list[int] = []

    def stepping(self: Trainer, here: Any) -> Any:
        steps.append(self.step + 1)
        return train_step(self, here)

    def changing(self: Any, out: Any, out_splits: list[int], *others: Any) -> None:
        all_to_all(self, out, out_splits, *others)
        if self.rank in (3, *further) and steps[-1] >= 5 and len(out_splits) == 4 and out_splits[0]:
            flip(out[: out_splits[0]], 1, 20)

    def reducing(self: ZeroShards) -> None:
        reduce_gradients(self)
        if self.rank == 3 and steps[-1] == 6:
            flip(self.master_gradient, 100, 29)

    reduce_gradients = ZeroShards.reduce_gradients
    ZeroShards.reduce_gradients = reducing  # type: ignore[method-assign]
    TwoLevel.all_to_all, Trainer.train_step = changing, stepping  # type: ignore[assignment,method-assign]


def test_the_pair_of_ranks_between_which_gradients_change_is_named(tmp_path: Path, corpus: Path) -> None:
    sections = EVERY_3 | {"parallel": {"collectives": "two_level"}}
    run = make_run(tmp_path / "run", corpus, steps=8, **sections)
    done = train_on(run, 4, _send_wrong_from_0_to_3, local_size=2)
    assert done.returncode == 1
    words = (
        "that arrived on rank 3 is not the sum of what all ranks sent; "
        "what rank 0 sends to rank 3 (from rail 0 to rail 1) arrives changed"
    )
    assert done.stderr.count(words) == 4


def test_a_rank_whose_gradients_arrive_changed_on_several_is_the_one_at_fault(
    tmp_path: Path, corpus: Path
) -> None:
    """The supervisor takes the first rank that the line names."""
    sections = EVERY_3 | {"parallel": {"collectives": "two_level"}}
    run = make_run(tmp_path / "run", corpus, steps=8, **sections)
    done = train_on(run, 4, partial(_send_wrong_from_0_to_3, 2), local_size=2)
    assert done.returncode == 1
    words = "what is sent on rank 0 arrives changed, and the gradient of "
    assert done.stderr.count(words) == 4


def test_the_checkpoint_to_go_back_to_is_kept(tmp_path: Path, corpus: Path) -> None:
    """Checks are rarer here than checkpoints: the one of step 2 is the last that is known to be right."""
    checkpoint = {"every_steps": 1, "keep_last": 2}
    run = make_run(tmp_path / "run", corpus, steps=7, integrity={"every_steps": 50}, checkpoint=checkpoint)
    assert train_on(run, 1).returncode == 0
    assert saved(run) == [7, 6, 2]


def _fail_second_save() -> None:
    """Have the disk refuse a shard of the second save; a `prepare` of ranks."""
    write_shard, calls = writer.write_shard, list[int]()

    def refused(*arguments: Any) -> ShardReport:
        calls.append(len(calls))
        if calls[-1] == 1:
            raise NoSpace("the disk is full")
        return write_shard(*arguments)

    vars(writer)["write_shard"] = refused


def test_a_save_that_failed_is_not_the_checkpoint_to_go_back_to(tmp_path: Path, corpus: Path) -> None:
    """The numbers of step 2 are right, but only those of step 1 are in a checkpoint."""
    checkpoint = {"every_steps": 1, "keep_last": 1, "background": False}
    run = make_run(tmp_path / "run", corpus, steps=5, integrity={"every_steps": 50}, checkpoint=checkpoint)
    assert train_on(run, 1, _fail_second_save).returncode == 0
    assert saved(run) == [5, 1]


def _show_checkpoints_of_wrong_numbers() -> None:
    """Have rank 0 take its time for the renames, and all print what they leave; a `prepare` of ranks."""
    inject("product", 2, range(5, 9))
    advance, abandon_after = Trainer.advance, Checkpointer.abandon_after

    def showing_end(self: Trainer) -> Ending | None:
        try:
            return advance(self)
        except NumbersWrong:
            steps = [listing.step for listing in list_checkpoints(self.checkpointer.root)]
            print(f"rank {self.world.rank} exits with {steps}")
            raise

    def slow(self: Checkpointer, step: int) -> int:
        time.sleep(0.5)
        return abandon_after(self, step)

    Trainer.advance, Checkpointer.abandon_after = showing_end, slow  # type: ignore[method-assign]


def test_no_rank_exits_before_the_checkpoints_are_set_aside(tmp_path: Path, corpus: Path) -> None:
    """Slurm may end rank 0 as soon as another one exits."""
    run = make_run(tmp_path / "run", corpus, steps=8, **EVERY_3)
    done = train_on(run, 4, _show_checkpoints_of_wrong_numbers, local_size=2)
    assert [f"rank {rank} exits with [2]" in done.stdout for rank in range(4)] == [True] * 4


def _flip_while_saving() -> None:
    """Flip a bit of rank 1's moments just before the last save; a `prepare` of ranks."""
    save = Trainer._save

    def flipping(self: Trainer, *, wait: bool) -> None:
        if wait and self.world.rank == 1:
            flip(self.optimizer.states[1].values, 77, 3)
        save(self, wait=wait)

    Trainer._save = flipping  # type: ignore[method-assign]


def test_a_bit_that_flips_before_the_last_save_is_found_and_the_checkpoint_set_aside(
    tmp_path: Path, corpus: Path
) -> None:
    run = make_run(tmp_path / "run", corpus, steps=4, **EVERY_3)
    done = train_on(run, 2, _flip_while_saving)
    assert done.returncode == 1
    assert done.stderr.count("masters or moments on rank 1 changed in memory after step 4") == 2
    assert saved(run) == [2]


@pytest.mark.parametrize("shrinks", [False, True])
def test_a_recovery_in_memory_and_fewer_ranks_raise_no_alarm(
    tmp_path: Path, corpus: Path, *, shrinks: bool
) -> None:
    """A process that joins knows no digests, and the ranks that stay go back behind theirs."""
    sections = {"integrity": {"every_steps": 2}, "checkpoint": {"every_steps": 4, "background": True}}
    expected, run = (make_run(tmp_path / name, corpus, steps=12, **sections) for name in ("undisturbed", "run"))
    assert train_on(expected, 3, local_size=1).returncode == 0
    cluster = Cluster(run, 3, warm=0 if shrinks else 1, faults={"1": "reduce_scatter:20:KILL"})
    with showing(cluster):
        if shrinks:
            cluster.shrink(cluster.wait_lost())
            assert cluster.outcome()["event"] == "recovered"
        else:
            assert recover_once(cluster)["event"] == "recovered"
        assert set(cluster.finish().values()) == {0}, all_output(cluster)
    assert losses(run) == pytest.approx(losses(expected), rel=1e-3 if shrinks else 0)
    assert rows(run, "integrity")[-1]["step"] == 12
    assert not rows(run, "integrity_off")
