"""What a checkpoint holds of Muon's matrices and of AdamW's tensors, and who may resume from it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.train.ranks import train_on
from tests.train.runs import losses_of, make_corpus, make_run
from zslurm.checkpoint_tools import Checkpoint, partition
from zslurm.train.config import ModelConfig, OptimConfig
from zslurm.train.shapes import owned_table


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data") / "tokens.h5")


@pytest.fixture(scope="module")
def muon(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Three steps on two ranks."""
    run = make_run(tmp_path_factory.mktemp("runs") / "muon", corpus, steps=3)
    assert train_on(run, ranks=2).returncode == 0
    return run


def test_matrices_have_masters_and_momentum_and_the_rest_has_moments(muon: Path) -> None:
    with Checkpoint.open(muon / "checkpoints" / "step-00000003") as checkpoint:
        manifest = checkpoint.manifest
    table = {row.name: row for row in owned_table(ModelConfig(**manifest.model), OptimConfig())}
    for tensor in manifest.tensors:
        whole = table[tensor.name].whole
        assert tensor.whole == whole
        moments = ("momentum",) if whole else ("exp_avg", "exp_avg_sq")
        assert tensor.states == dict.fromkeys(("master", *moments), "F32"), tensor.name
    assert {tensor.whole for tensor in manifest.tensors} == {0, 1, 3}


def test_each_shard_holds_what_the_manifests_own_table_gives_its_rank(muon: Path) -> None:
    """So rewriting it for another number of ranks needs no model and no torch."""
    with Checkpoint.open(muon / "checkpoints" / "step-00000003") as checkpoint:
        manifest = checkpoint.manifest
    layout = partition(manifest.tensors, 2)
    for rank, file in enumerate(sorted(file.name for file in manifest.files)):
        stored = {(e.tensor, e.start, e.stop) for e in manifest.extents if e.file == file}
        assert stored == {(e.tensor, e.start, e.stop) for e in layout.extents(rank)}


ADAMW = {"matrices": "adamw"}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"optim": ADAMW},
            "was trained with optim.matrices: muon, this run has adamw; set it back, or submit with",
        ),
        ({"parallel": {"dtype": "fp64"}}, "has master weights in F32, parallel.dtype asks for F64"),
    ],
    ids=["AdamW on Muon's", "fp64 on fp32"],
)
def test_another_optimizer_or_format_is_refused_in_one_line(
    tmp_path: Path, corpus: Path, muon: Path, sections: dict[str, Any], message: str
) -> None:
    run = make_run(tmp_path / "run", corpus, steps=6, **sections)
    shutil.copytree(muon / "checkpoints", run / "checkpoints")
    done = train_on(run, ranks=2)
    assert done.returncode == 2
    assert len(set(done.stderr.splitlines())) == 1, "the same line on both ranks"
    assert message in done.stderr


def test_muon_does_not_resume_from_adamws_moments_but_starts_from_its_weights(
    tmp_path: Path, corpus: Path, muon: Path
) -> None:
    old = make_run(tmp_path / "old", corpus, steps=3, optim=ADAMW)
    assert train_on(old, ranks=1).returncode == 0
    with Checkpoint.open(old / "checkpoints" / "step-00000003") as checkpoint:
        assert not any(tensor.whole for tensor in checkpoint.manifest.tensors)

    make_run(old, corpus, steps=6)
    done = train_on(old, ranks=2)
    assert done.returncode == 2
    assert "was trained with optim.matrices: adamw, this run has muon" in done.stderr
    assert "init: ckpt:DIR" in done.stderr

    init: Any = f"ckpt:{old / 'checkpoints' / 'step-00000003'}"
    new = make_run(tmp_path / "new", corpus, steps=3, init=init)
    assert train_on(new, ranks=2).returncode == 0
    assert losses_of(new)[0] < losses_of(muon)[0] - 0.1, "it knows what the other run has learnt"
