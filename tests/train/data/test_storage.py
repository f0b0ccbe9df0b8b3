"""What a run asks of its storage: the published example, our own layout, and checkpoints."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.train.ranks import train_on
from tests.train.runs import make_corpus, make_run
from zslurm.train.config import ModelConfig, OptimConfig, TrainConfig, load_train_config
from zslurm.train.data.schema import BundleHeader
from zslurm.train.plan.io import PAGE_BYTES, PUBLISHED_BUDGET, Reads, checkpoint_bytes, plan_storage
from zslurm.train.sections.phases import PhaseConfig
from zslurm.train.shapes import parameter_counts


def run(**sections: object) -> TrainConfig:
    """ZAYA1-base with the batch and context of its first phase."""
    phase = PhaseConfig(tokens=10**12, context=4096, global_batch=4096, micro_batch=4, lr=1e-3)
    return TrainConfig.model_validate({"model": ModelConfig(), "phases": (phase,), **sections})


def test_the_published_example() -> None:
    plan = plan_storage(run(), step_time=2.5, ranks=1024)
    (reads,) = plan.reads
    assert reads.token_bytes == 4
    assert reads.bytes == 64 << 20
    assert reads.pages(1) == 16_384
    assert round(reads.iops(1)) == 6_554
    assert reads.iops(2) < PUBLISHED_BUDGET < 11 * reads.iops(1)
    assert reads.sigma == 1.25, "bundled"


@given(context=st.integers(1, 700), token_bytes=st.sampled_from([2, 4]), start=st.integers(0, 10**6))
def test_sigma_is_what_the_layout_of_bundles_touches(context: int, token_bytes: int, start: int) -> None:
    """Pages that pieces of (s + 1) b bytes touch, counted over all ways in which they may be on pages."""
    pieces = start + np.arange(PAGE_BYTES)
    first = pieces * context * token_bytes
    last = first + (context + 1) * token_bytes - 1
    touched = last // PAGE_BYTES - first // PAGE_BYTES + 1
    reads = Reads(global_batch=PAGE_BYTES, context=context, token_bytes=token_bytes, step_time=1)
    assert touched.sum() == pytest.approx(reads.pages(reads.sigma))


def test_tokens_are_as_wide_as_in_bundles() -> None:
    small = run(model=ModelConfig(vocab_size=65_536))
    assert plan_storage(small, step_time=1, ranks=1).reads[0].token_bytes == 2
    assert BundleHeader(65_536, "", 0).token_dtype.itemsize == 2


def test_a_ramp_counts_with_its_largest_batch() -> None:
    ramp = [{"until_tokens": 10**9, "global_batch": 512}]
    phase = PhaseConfig.model_validate(
        {"tokens": 10**10, "context": 4096, "global_batch": 1024, "micro_batch": 1, "lr": 1, "batch_ramp": ramp}
    )
    assert plan_storage(run(phases=(phase,)), step_time=1, ranks=1).reads[0].global_batch == 1024


def test_checkpoints_are_masters_and_states() -> None:
    parameters = parameter_counts(ModelConfig()).total
    adamw, muon = (run(optim=OptimConfig(matrices=matrices)) for matrices in ("adamw", "muon"))
    assert checkpoint_bytes(adamw) == 12 * parameters
    assert 8 * parameters < checkpoint_bytes(muon) < 12 * parameters
    saves = plan_storage(adamw, step_time=2, ranks=8).saves
    assert saves.every_s == 1000
    assert saves.rate == 12 * parameters / 1000


def test_what_a_run_saves_is_what_was_planned(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", make_corpus(tmp_path / "tokens.h5"), steps=2)
    assert train_on(directory, ranks=2).returncode == 0
    planned = checkpoint_bytes(load_train_config(directory / "config.json"))
    shards = sum(path.stat().st_size for path in directory.glob("checkpoints/*/shard-*"))
    assert planned < shards < planned + 100_000, "headers, and the balancing biases"
