"""A run on packs of whole documents: resumed bit for bit, evaluated on packs, the same curve on any ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.train.ranks import train_on
from tests.train.runs import VOCAB, losses_of, make_run
from zslurm.checkpoint_tools import list_checkpoints
from zslurm.train.data.build.bundle_writer import BundleWriter
from zslurm.train.data.bundle import BundleHeader
from zslurm.train.jsonl import read_jsonl

HEADER = BundleHeader(VOCAB, "a" * 64, 1, "tests")


def chats(path: Path, documents: int, seed: int) -> Path:
    generator = np.random.default_rng(seed)
    with BundleWriter(path, HEADER, masked=True) as writer:
        for length in generator.integers(3, 24, documents).tolist():
            document = np.append(2 + generator.integers(0, VOCAB - 2, length), 1)
            writer.append(document, np.arange(len(document)) >= len(document) // 2)
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    run = make_run(
        directory / "packed",
        chats(directory / "chats.h5", 60, 1),
        steps=6,
        evaluation={"data": str(chats(directory / "kept.h5", 12, 2)), "every_steps": 3},
        data={"path": str(directory / "chats.h5"), "packing": "best_fit"},
    )
    done = train_on(run, ranks=2)
    assert done.returncode == 0, done.stderr
    return run


def evaluations(run: Path) -> list[tuple[int, float, int]]:
    rows = [row for row in read_jsonl(run / "metrics.jsonl") if row["kind"] == "evaluation"]
    return [(row["step"], row["loss"], row["tokens"]) for row in rows]


def test_it_resumes_bit_for_bit(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    for saved in list_checkpoints(run / "checkpoints"):
        if saved.step > 3:
            shutil.rmtree(saved.path)
    (run / "metrics.jsonl").unlink()
    done = train_on(run, ranks=2)
    assert done.returncode == 0, done.stderr
    assert "note:" not in done.stdout
    assert losses_of(run) == losses_of(finished)[3:]
    assert evaluations(run) == evaluations(finished)[1:]


def test_another_number_of_ranks_trains_on_the_same_documents(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(finished / "config.json", run)
    assert train_on(run, ranks=1).returncode == 0
    assert losses_of(run) == pytest.approx(losses_of(finished), rel=1e-4)
    assert [row[2] for row in evaluations(run)] == [row[2] for row in evaluations(finished)]


def test_a_document_that_is_refused_is_one_line(finished: Path, tmp_path: Path) -> None:
    config = json.loads((finished / "config.json").read_text())
    config["data"]["long_documents"] = "refuse"
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = train_on(tmp_path, ranks=1)
    assert done.returncode == 2
    assert done.stderr.startswith("error: data.path: data.long_documents: document ")
    assert "Traceback" not in done.stderr
