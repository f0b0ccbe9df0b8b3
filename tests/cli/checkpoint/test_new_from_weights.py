"""`zslurm new --init`: a run file that continues from weights, with data made for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import Zslurm
from tests.cli.trained import CONTEXT
from zslurm.cli.run_file import LEARNING_RATE_DIVISOR, nearest_recipe
from zslurm.config import load, yaml12
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
    zslurm.ok("new", file, "--init", init, "--pairs", pairs, "--long-pairs", "trim")
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
    rate = 1e-4 if kind == "hf folder" else 1e-2 / LEARNING_RATE_DIVISOR  # a folder does not state its rate
    assert phase["lr"] == pytest.approx(rate)


@pytest.fixture
def folder(zslurm: Zslurm, run: Path, tmp_path: Path) -> Path:
    """A folder of transformers whose weights were trained in bf16 with a context of 1,024."""
    path = tmp_path / "hf"
    zslurm.ok("checkpoint", "export", "first", path)
    config = json.loads((path / "config.json").read_text())
    config |= {"max_position_embeddings": 1024, "dtype": "bfloat16"}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_folder_of_transformers_decides_context_dtype_and_a_low_learning_rate(
    zslurm: Zslurm, folder: Path, pairs: Path, tmp_path: Path
) -> None:
    file = tmp_path / "tune.yaml"
    zslurm.ok("new", file, "--init", folder, "--pairs", pairs)
    spec = _shown(zslurm, file)
    (phase,) = spec["phases"]
    assert (phase["context"], spec["parallel"]["dtype"], spec["data"]["long_documents"]) == (
        1024,
        "bf16",
        "refuse",
    )
    assert phase["lr"] <= 1e-4
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 131072}))
    zslurm.ok("new", tmp_path / "long.yaml", "--init", folder, "--pairs", pairs)
    assert _shown(zslurm, tmp_path / "long.yaml")["phases"][0]["context"] == 1024, "every pair fits into less"


def test_pairs_that_do_not_fit_are_counted_and_refused_or_trimmed(
    zslurm: Zslurm, run: Path, pairs: Path, tmp_path: Path
) -> None:
    long = json.dumps({"prompt": "def f():\n", "completion": "word " * 2000})
    pairs.write_text(pairs.read_text() + f"{long}\n{long}\n")
    file = tmp_path / "tune.yaml"
    refused = zslurm("new", file, "--init", "first", "--pairs", pairs)
    assert refused.code == 2
    assert f"62 pairs of 62 are longer than the context of the weights, {CONTEXT} tokens" in refused.stderr
    assert "--long-pairs trim" in refused.stderr
    assert not file.exists()
    trimmed = zslurm.ok("new", file, "--init", "first", "--pairs", pairs, "--long-pairs", "trim")
    assert "62 pairs of 62" in trimmed.stderr
    assert _shown(zslurm, file)["data"]["long_documents"] == "trim"


def test_a_step_has_a_sequence_for_each_rank(zslurm: Zslurm, run: Path, pairs: Path, tmp_path: Path) -> None:
    file = tmp_path / "tune.yaml"
    zslurm.ok("new", file, "--init", "first", "--pairs", pairs, "--long-pairs", "trim", "--nodes", "48")
    (phase,) = _shown(zslurm, file)["phases"]
    assert phase["global_batch"] % (48 * phase["micro_batch"]) == 0


@pytest.mark.parametrize("chosen", ["by an option", "as the default"])
def test_a_step_has_a_sequence_for_each_rank_of_the_profile(
    zslurm: Zslurm, run: Path, pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    file = tmp_path / "tune.yaml"
    options = ["--cluster", "mi300x-pollara"] if chosen == "by an option" else []
    if not options:
        monkeypatch.setenv("ZSLURM_CLUSTER", "mi300x-pollara")
    zslurm.ok("new", file, "--init", "first", "--pairs", pairs, "--long-pairs", "trim", "--nodes", "4", *options)
    (phase,) = zslurm.ok("config", "show", file, "--json", "--cluster", "mi300x-pollara").json["phases"]
    assert phase["global_batch"] >= 32
    assert phase["global_batch"] % (32 * phase["micro_batch"]) == 0


def test_a_profile_that_does_not_exist_is_refused_before_data_are_built(
    zslurm: Zslurm, run: Path, pairs: Path, tmp_path: Path
) -> None:
    refused = zslurm("new", tmp_path / "tune.yaml", "--init", "first", "--pairs", pairs, "--cluster", "nowhere")
    assert (refused.code, "nowhere" in refused.stderr) == (3, True)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("name", ["zaya1-tiny", "zaya1-400m", "zaya1-8b"])
def test_the_recipe_is_that_of_the_nearest_size(name: str) -> None:
    document = yaml12.parse(f"extends: {name}\n", "run file")
    model = load.resolve(Path("run.yaml"), document=document).spec.model
    assert nearest_recipe(model.model_copy(update={"layers": model.layers + 1})) == name


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
