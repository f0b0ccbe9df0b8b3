"""`zslurm new --init`: a run file that continues from weights, with data made for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import Zslurm
from tests.cli.trained import CONTEXT
from zslurm.cli.new.run_file import LEARNING_RATE_DIVISOR
from zslurm.train.checkpointing.init_weights import open_init
from zslurm.train.config import ModelConfig
from zslurm.train.data.bundle import Corpus


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    rows = [{"prompt": f"def read_{n}(self):\n", "completion": f"Return the {n}th word."} for n in range(60)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _shown(zslurm: Zslurm, file: Path) -> Any:
    return zslurm.ok("config", "show", file, "--json", "--cluster", "local").json


@pytest.mark.parametrize("kind", ["run", "checkpoint", "hf folder"])
def test_the_file_takes_model_tokenizer_and_context_from_the_weights(
    zslurm: Zslurm, run: Path, pairs: Path, tmp_path: Path, kind: str
) -> None:
    init = {"run": "first", "checkpoint": str(run / "checkpoints" / "step-00000040")}.get(kind)
    if init is None:
        zslurm.ok("checkpoint", "export", "first", tmp_path / "hf")
        init = str(tmp_path / "hf")
    file = tmp_path / "tune.yaml"
    zslurm.ok("new", file, "--init", init, "--pairs", pairs)
    spec = _shown(zslurm, file)
    data = Corpus.open(tmp_path / "data" / "pairs")
    model = ModelConfig.model_validate(spec["model"])
    open_init(spec["init"], model, data.header.tokenizer_sha256).close()  # refuses another model or tokenizer
    (phase,) = spec["phases"]
    assert spec["run"]["name"] == "tune"
    assert spec["data"]["packing"] == "best_fit"
    assert phase["rope_base"] == 5000.0
    assert 0 < phase["tokens"] <= data.token_count
    assert phase["context"] == CONTEXT
    assert phase["lr"] == pytest.approx(8e-3 / LEARNING_RATE_DIVISOR)


def test_weights_that_are_not_there_and_data_that_are_missing_leave_no_file(
    zslurm: Zslurm, run: Path, pairs: Path, tmp_path: Path
) -> None:
    file = tmp_path / "tune.yaml"
    missing = zslurm("new", file, "--init", "nowhere", "--pairs", pairs)
    assert (missing.code, "nowhere" in missing.stderr) == (3, True)
    without = zslurm("new", file, "--init", "first")
    assert without.code == 3
    assert "build them with --text or --pairs" in without.stderr
    both = zslurm("new", file, "--text", pairs, "--pairs", pairs)
    assert (both.code, "not both" in both.stderr) == (2, True)
    assert not file.exists()
