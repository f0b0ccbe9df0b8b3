"""`zslurm checkpoint`: list, export, import, from the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.cli.commands import Zslurm
from tests.cli.trained import CONTEXT, MODEL, TEXT
from zslurm.checkpoint_tools import Checkpoint, list_checkpoints
from zslurm.core.errors import ConfigError
from zslurm.core.units import parse_size
from zslurm.train.data.build.tokenizer import encode, load_tokenizer

transformers = pytest.importorskip("transformers")


def masters(path: Path) -> dict[str, bytes]:
    import numpy as np

    found = {}
    with Checkpoint.open(path) as checkpoint:
        for tensor in checkpoint.manifest.tensors:
            out = np.empty(tensor.numel, np.float32)
            checkpoint.read(tensor.name, "master", 0, tensor.numel, out)
            found[tensor.name] = out.tobytes()
        found["balance/bias"] = checkpoint.read_buffer("balance/bias").tobytes()
    return found


def test_ls_shows_what_is_whole_and_what_is_not(zslurm: Zslurm, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "checkpoints", tmp_path / "checkpoints")
    next((tmp_path / "checkpoints" / "step-00000080").glob("shard-*")).unlink()
    rows = zslurm.ok("checkpoint", "ls", tmp_path / "checkpoints", "--json").json
    assert [(row["step"], row["complete"]) for row in rows] == [(80, False), (40, True)]
    assert "missing" in rows[0]["reason"]
    assert rows[1]["ranks"] == 1
    assert rows[1]["tokens"] == 40 * 4 * CONTEXT
    assert rows[1]["bytes"] > 100_000
    lines = zslurm.ok("checkpoint", "ls", "first").stdout.splitlines()
    assert lines[0].split("\t") == ["step", "tokens", "ranks", "size", "age", "state"]
    assert [line.split("\t")[5] for line in lines[1:]] == ["complete", "complete"]
    assert zslurm("checkpoint", "ls", "nothing-of-the-kind").code == 3


def test_an_export_of_a_run_by_name_is_a_model_and_a_tokenizer_for_transformers(
    zslurm: Zslurm, run: Path, tmp_path: Path
) -> None:
    done = zslurm.ok("checkpoint", "export", "first", "--to", "hf", tmp_path / "hf", "--dtype", "fp32")
    assert done.stdout.strip() == str(tmp_path / "hf")
    assert "note" not in done.stderr
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert model.dtype == torch.float32
    assert model.config.max_position_embeddings == CONTEXT
    assert model.config.rope_parameters["hybrid"]["rope_theta"] == 5000.0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ours = load_tokenizer(run.parent.parent / "data" / "tokenizer.json")
    assert tokenizer(TEXT)["input_ids"] == encode(ours, [TEXT])[0].tolist()
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, 2)
    assert (model.config.pad_token_id, model.config.eos_token_id, model.config.bos_token_id) == (0, 1, 2)


def test_there_and_back_again(zslurm: Zslurm, run: Path, tmp_path: Path) -> None:
    """export and import, in fp32: the same masters, the same biases, the same tokenizer."""
    source = run / "checkpoints" / "step-00000040"
    said = zslurm.ok(
        "checkpoint", "export", source, tmp_path / "hf", "--dtype", "fp32", "--max-shard-size", "20KB", "--json"
    ).json
    assert said["tensors"] == 67
    assert len(said["files"]) > 5
    assert said["tokenizer"] is True
    assert said["note"] is None
    imported = zslurm.ok("checkpoint", "import", tmp_path / "hf", tmp_path / "root", "--max-shard-size", "30KB")
    path = Path(imported.stdout.strip())
    assert path == tmp_path / "root" / "step-00000000"
    assert masters(path) == masters(source)
    assert (path / "tokenizer.json").read_bytes() == (tmp_path / "hf" / "tokenizer.json").read_bytes()
    assert [listing.complete for listing in list_checkpoints(tmp_path / "root")] == [True]
    again = zslurm.ok(
        "checkpoint", "export", path, tmp_path / "again", "--dtype", "fp32", "--max-shard-size", "20KB"
    )
    assert again.code == 0
    for file in sorted(path.name for path in (tmp_path / "hf").iterdir()):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "hf" / file).read_bytes(), file


def test_import_prints_the_model_that_a_run_needs(zslurm: Zslurm, tmp_path: Path) -> None:
    zslurm.ok("checkpoint", "export", "first", tmp_path / "hf")
    said = zslurm.ok("checkpoint", "import", tmp_path / "hf", tmp_path / "root", "--json").json
    assert said["model"].items() >= MODEL.items()
    assert said["shards"] == 1
    assert said["parameters"] > 30_000


def test_a_published_folder_is_exported_as_well(zslurm: Zslurm, tmp_path: Path) -> None:
    """From one layout or number format to another, without a checkpoint in between."""
    zslurm.ok("checkpoint", "export", "first", tmp_path / "fp32", "--dtype", "fp32")
    zslurm.ok("checkpoint", "export", tmp_path / "fp32", tmp_path / "bf16")
    zslurm.ok("checkpoint", "export", "first", tmp_path / "direct")
    for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "bf16" / name).read_bytes() == (tmp_path / "direct" / name).read_bytes(), name


def test_a_checkpoint_away_from_its_run_asks_for_what_it_does_not_know(
    zslurm: Zslurm, run: Path, tmp_path: Path
) -> None:
    away = tmp_path / "a" / "b" / "step-00000080"
    shutil.copytree(run / "checkpoints" / "step-00000080", away)
    reported = zslurm("checkpoint", "export", away, tmp_path / "hf")
    assert reported.code == 2
    assert "--tokenizer" in reported.stderr
    reported = zslurm("checkpoint", "export", away, tmp_path / "hf", "--no-tokenizer")
    assert reported.code == 2
    assert "--rope-base" in reported.stderr
    assert "--context" in reported.stderr
    tokenizer = run.parent.parent / "data" / "tokenizer.json"
    given = ("--tokenizer", tokenizer, "--rope-base", "5000", "--context", str(CONTEXT))
    zslurm.ok("checkpoint", "export", away, tmp_path / "hf", *given)
    zslurm.ok("checkpoint", "export", "first", tmp_path / "direct")
    for name in ("model.safetensors", "config.json", "tokenizer_config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (tmp_path / "direct" / name).read_bytes(), name


def test_bad_input_is_reported_line_by_line_with_its_exit_code(zslurm: Zslurm, run: Path, tmp_path: Path) -> None:
    zslurm.ok("checkpoint", "export", "first", tmp_path / "hf")
    before = sorted(tmp_path.rglob("*"))
    assert zslurm("checkpoint", "export", "first", tmp_path / "hf").code == 2
    assert zslurm("checkpoint", "export", "nobody", tmp_path / "new").code == 3
    assert zslurm("checkpoint", "export", tmp_path, tmp_path / "new").code == 3
    assert zslurm("checkpoint", "export", "first", tmp_path / "new", "--max-shard-size", "huge").code == 2
    assert zslurm("checkpoint", "export", "first", tmp_path / "new", "--dtype", "fp8").code == 2
    assert zslurm("checkpoint", "export", "first", tmp_path / "new", "--tokenizer", tmp_path / "none").code == 2
    assert zslurm("checkpoint", "import", tmp_path / "none", tmp_path / "root").code == 3
    assert zslurm("checkpoint", "import", run, tmp_path / "root").code == 2
    assert zslurm("checkpoint", "import", tmp_path / "hf", run / "checkpoints").code == 2
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(
        json.dumps(config | {"num_hidden_layers": 3, "layer_types": None})
    )
    reported = zslurm("checkpoint", "import", tmp_path / "hf", tmp_path / "root")
    assert reported.code == 2
    assert len(reported.stderr.splitlines()) > 30, "every tensor of the third layer"
    assert all(line.startswith("zslurm: ") and "missing" in line for line in reported.stderr.splitlines())
    assert sorted(tmp_path.rglob("*")) == before


def test_a_damaged_checkpoint_leaves_no_export(zslurm: Zslurm, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "checkpoints" / "step-00000080", tmp_path / "step-00000080")
    shard = next((tmp_path / "step-00000080").glob("shard-*"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 4] ^= 1
    shard.write_bytes(content)
    given = ("--no-tokenizer", "--rope-base", "1e4", "--context", "32")
    reported = zslurm("checkpoint", "export", tmp_path / "step-00000080", tmp_path / "hf", *given)
    assert reported.code == 1
    assert "damaged" in reported.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000080"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a place that refuses, root or not")
def test_a_file_system_that_refuses_is_exit_code_1(zslurm: Zslurm) -> None:
    reported = zslurm("checkpoint", "export", "first", "/proc/nowhere/hf")
    assert reported.code == 1
    assert "cannot be written" in reported.stderr
    assert "Traceback" not in reported.stderr


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("16MiB", 16 << 20), ("1.5k", 1500), ("20", 20), (" 3 tb ", 3 * 10**12)]
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "0", "5 apples", "1e9", "5XB", "9" * 20, "9" * 400])
def test_other_words_are_no_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match="not a size"):
        parse_size(text)
