"""Evaluation on validation data: what it finds, and that the training does not notice."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.train.ranks import train_on
from tests.train.runs import MODEL, VOCAB, losses_of, make_corpus, make_run
from zslurm.train.config import ModelConfig, load_train_config
from zslurm.train.data.build.bundle_writer import BundleWriter
from zslurm.train.data.bundle import Corpus
from zslurm.train.data.schema import BundleHeader
from zslurm.train.evaluation.evaluate import Best, better
from zslurm.train.evaluation.validation_data import evenly
from zslurm.train.jsonl import read_jsonl
from zslurm.train.model.zaya import build
from zslurm.train.parallel.world import open_world
from zslurm.train.progress import Phase, ProgressWriter
from zslurm.train.schedule import due
from zslurm.train.setup import open_trainer
from zslurm.train.stop import StopRequest

STANDING_STILL: dict[str, Any] = {
    "phase": {"lr": 1e-30, "final_lr": 0.0, "warmup_steps": 0},
    "optim": {"balance_lr": 0.0},
}
"""A run that changes no bit of the weights, so that what it evaluates are the initial ones."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data") / "tokens.h5")


@pytest.fixture(scope="module")
def validation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("validation") / "tokens.h5", tokens=1000)


def rows_of(run: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_jsonl(run / "metrics.jsonl") if row["kind"] == kind]


def shards_of(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in sorted(run.glob("checkpoints/*/shard-*"))}


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_is_the_same_bits_with_and_without(
    tmp_path: Path, corpus: Path, validation: Path, ranks: int
) -> None:
    """Losses, and all of every checkpoint: weights, moments, balancing state and random number generators."""
    without = make_run(tmp_path / "without", corpus, steps=6)
    with_it = make_run(
        tmp_path / "with", corpus, steps=6, evaluation={"data": str(validation), "every_steps": 2, "sequences": 7}
    )
    for run in (without, with_it):
        done = train_on(run, ranks)
        assert done.returncode == 0, done.stderr
    assert len(rows_of(with_it, "evaluation")) == 3
    assert losses_of(with_it) == losses_of(without)
    assert shards_of(with_it) == shards_of(without)


def test_it_is_the_mean_cross_entropy_of_evenly_spread_sequences(
    tmp_path: Path, corpus: Path, validation: Path
) -> None:
    """Against torch's own cross-entropy of the logits."""
    evaluation = {"data": str(validation), "sequences": 5, "micro_batch": 2}
    run = make_run(tmp_path / "run", corpus, steps=1, evaluation=evaluation, **STANDING_STILL)
    assert train_on(run, ranks=1).returncode == 0
    (found,) = rows_of(run, "evaluation")

    text = Corpus.open(validation)
    chosen = [i * text.sequences(16) // 5 for i in range(5)]
    tokens_BS = torch.from_numpy(text.windows(chosen, 16))
    model = build(ModelConfig.model_validate(MODEL), seed=3, dtype=torch.float32)
    with torch.no_grad():
        logits_BSV, _ = model(tokens_BS[:, :-1], rope_base=1e4)
    expected = F.cross_entropy(logits_BSV.flatten(0, 1), tokens_BS[:, 1:].flatten()).item()
    assert found["loss"] == pytest.approx(expected, rel=1e-6)
    assert found["loss"] == pytest.approx(math.log(VOCAB), abs=0.1)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["bits_per_token"] == pytest.approx(found["loss"] / math.log(2))
    assert (found["step"], found["sequences"], found["context"], found["tokens"]) == (1, 5, 16, 80)


def test_masked_targets_do_not_count(tmp_path: Path, corpus: Path) -> None:
    """Every third token of the validation data counts: the mean is over these."""
    header = BundleHeader(vocab_size=VOCAB, tokenizer_sha256="a" * 64, end_token=1, source="tests")
    tokens = np.random.RandomState(5).randint(2, VOCAB, 200)
    counts = (np.arange(200) % 3 == 0).astype(np.uint8)
    for name, mask in (("third", counts), ("none", np.zeros(200, np.uint8))):
        with BundleWriter(tmp_path / f"{name}.h5", header, masked=True) as writer:
            writer.append(np.append(tokens, 1), np.append(mask, 0))
    run = make_run(
        tmp_path / "run", corpus, steps=1, evaluation={"data": str(tmp_path / "third.h5")}, **STANDING_STILL
    )
    assert train_on(run, ranks=2).returncode == 0
    (found,) = rows_of(run, "evaluation")

    text = Corpus.open(tmp_path / "third.h5")
    tokens_BS = torch.from_numpy(text.windows(range(12), 16))
    counted_BS = torch.from_numpy(np.append(counts, 0)[: 12 * 16 + 1])[1:].view(12, 16).bool()
    model = build(ModelConfig.model_validate(MODEL), seed=3, dtype=torch.float32)
    with torch.no_grad():
        logits_BSV, _ = model(tokens_BS[:, :-1], rope_base=1e4)
    losses_BS = F.cross_entropy(logits_BSV.transpose(1, 2), tokens_BS[:, 1:], reduction="none")
    assert found["tokens"] == counted_BS.sum().item() == 64
    assert found["loss"] == pytest.approx(losses_BS[counted_BS].mean().item(), rel=1e-6)

    evaluation = {"data": str(tmp_path / "none.h5")}
    nothing = make_run(tmp_path / "nothing", corpus, steps=1, evaluation=evaluation, **STANDING_STILL)
    done = train_on(nothing, ranks=2)
    assert done.returncode == 2
    assert "none.h5: none of its tokens counts as a target" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("sequences", "micro_batch"), [(7, 2), (2, 1)])
def test_the_number_of_ranks_does_not_change_a_bit(
    tmp_path: Path, corpus: Path, validation: Path, sequences: int, micro_batch: int
) -> None:
    """Also if microbatches do not divide evenly, and if some ranks have none."""
    found = []
    evaluation = {"data": str(validation), "sequences": sequences, "micro_batch": micro_batch}
    for ranks in (1, 3):
        run = make_run(tmp_path / f"{ranks}", corpus, steps=1, evaluation=evaluation, **STANDING_STILL)
        done = train_on(run, ranks)
        assert done.returncode == 0, done.stderr
        (row,) = rows_of(run, "evaluation")
        (routing,) = rows_of(run, "routing")
        matrices = json.loads((run / "routing.json").read_text())
        found.append((row["loss"], row["tokens"], routing | {"time": 0}, matrices))
        assert routing["tokens"] == row["tokens"]
    assert found[0] == found[1]


def test_a_change_of_context_is_evaluated_at_that_context(tmp_path: Path, corpus: Path, validation: Path) -> None:
    evaluation = {"data": str(validation), "every_steps": 2}
    run = make_run(tmp_path / "run", corpus, steps=2, phase={"micro_batch": 1}, evaluation=evaluation)
    config = json.loads((run / "config.json").read_text())
    config["phases"].append(
        config["phases"][0] | {"name": "long", "context": 32, "global_batch": 3, "rope_base": 1e6}
    )
    (run / "config.json").write_text(json.dumps(config))
    assert train_on(run, ranks=1).returncode == 0
    assert [(row["step"], row["phase"], row["context"]) for row in rows_of(run, "evaluation")] == [
        (2, "train", 16),
        (4, "long", 32),
    ]


def test_the_best_checkpoint_stays_and_a_resumed_run_knows_it(
    tmp_path: Path, corpus: Path, validation: Path
) -> None:
    """The loss rises towards the end, because the learning rate is absurd: the best one is in the middle."""
    sections: dict[str, Any] = {
        "phase": {"lr": 3e-2, "final_lr": 3e-2, "warmup_steps": 0},
        "evaluation": {"data": str(validation), "every_steps": 2, "sequences": 10},
        "checkpoint": {"every_steps": 2, "keep_last": 1},
    }
    run = make_run(tmp_path / "run", corpus, steps=12, **sections)
    assert train_on(run, ranks=1).returncode == 0
    losses = {row["step"]: row["loss"] for row in rows_of(run, "evaluation")}
    assert sorted(losses) == [2, 4, 6, 8, 10, 12]
    best = min(losses, key=lambda step: losses[step])
    kept = {int(path.name[5:]) for path in (run / "checkpoints").iterdir()}
    assert kept == {best, 12}
    for row in [row for row in rows_of(run, "checkpoint") if row["state"] == "COMMITTED"]:
        so_far = {step: loss for step, loss in losses.items() if step <= row["step"]}
        assert row["best_step"] == min(so_far, key=lambda step: so_far[step])
        assert row["best_loss"] == min(so_far.values())

    again = make_run(run, corpus, steps=14, **(sections | {"evaluation": {"data": str(validation)}}))
    assert train_on(again, ranks=1).returncode == 0
    assert rows_of(again, "checkpoint")[-1]["best_step"] in (best, 14)


def test_held_out_text_of_another_tokenizer_is_refused(tmp_path: Path, corpus: Path) -> None:
    other = make_corpus(tmp_path / "other.h5", tokenizer="b" * 64)
    run = make_run(tmp_path / "run", corpus, evaluation={"data": str(other)})
    done = train_on(run, ranks=1)
    assert done.returncode == 2
    assert done.stderr == (
        f"error: evaluation.data: {other}: made with another tokenizer than the run's data; build it with their "
        "tokenizer.json (zslurm data build --tokenizer)\n"
    )


def test_held_out_text_that_is_too_short_is_refused(tmp_path: Path, corpus: Path) -> None:
    short = make_corpus(tmp_path / "short.h5", tokens=10)
    done = train_on(make_run(tmp_path / "run", corpus, evaluation={"data": str(short)}), ranks=1)
    assert done.returncode == 2
    assert "evaluation.data: " in done.stderr
    assert "holds 10 tokens, but one sequence of context 16 needs 17" in done.stderr


@pytest.mark.parametrize(
    ("available", "wanted", "chosen"),
    [
        (10, 5, [0, 2, 4, 6, 8]),
        (10, 3, [0, 3, 6]),
        (3, 3, [0, 1, 2]),
        (2, 64, [0, 1]),
        (10**15, 2, [0, 5 * 10**14]),
    ],
)
def test_sequences_are_spread_evenly(available: int, wanted: int, chosen: list[int]) -> None:
    assert evenly(available, wanted).tolist() == chosen


def test_the_lower_loss_is_better_and_only_at_the_same_context() -> None:
    first = Best(step=10, loss=3.0, context=16)
    assert better(Best(20, 2.9, 16), first) == Best(20, 2.9, 16)
    assert better(Best(20, 3.1, 16), first) == first
    assert better(Best(20, 3.0, 16), first) == first, "the earlier one of two equal ones"
    assert better(Best(20, 3.1, 32), first) == Best(20, 3.1, 32)
    assert better(Best(20, math.nan, 16), first) == first
    assert better(Best(20, math.inf, 16), None) is None
    assert better(first, None) == first


def test_a_watcher_sees_the_evaluation(
    tmp_path: Path, corpus: Path, validation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its phase is EVAL, with a sign of life for every microbatch, and then STEP again."""
    seen: list[Phase | None] = []
    monkeypatch.setattr(ProgressWriter, "update", lambda self, **given: seen.append(given.get("phase")))
    evaluation = {"data": str(validation), "sequences": 3, "micro_batch": 1}
    run = make_run(tmp_path / "run", corpus, steps=1, evaluation=evaluation, **STANDING_STILL)
    config = load_train_config(run / "config.json")
    with open_world(config.parallel) as world:
        open_trainer(run, config, world, StopRequest()).run()
    begun = seen.index(Phase.EVAL)
    assert seen[begun : begun + 5] == [Phase.EVAL, None, None, None, Phase.STEP]


def test_due() -> None:
    assert [step for step in range(1, 10) if due(3, step)] == [3, 6, 9]
    assert not any(due(0, step) for step in range(1, 10))


def test_ranks_that_share_sequences_count_each_token_of_the_router_once(
    tmp_path: Path, corpus: Path, validation: Path
) -> None:
    """A context of 17 has padding in the last chunk, which counts nowhere."""
    phase = {"context": 17, "context_parallel": 2, "tokens": 6 * 17, "warmup_steps": 0}
    evaluation = {"data": str(validation), "sequences": 5, "micro_batch": 2}
    run = make_run(tmp_path / "run", corpus, steps=1, evaluation=evaluation, phase=phase)
    done = train_on(run, ranks=2)
    assert done.returncode == 0, done.stderr
    (found,) = rows_of(run, "routing")
    assert found["tokens"] == rows_of(run, "evaluation")[0]["tokens"] == 5 * 17
