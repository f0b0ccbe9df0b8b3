"""Folders that cannot be imported: everything that is wrong is reported at once, and nothing is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.train.hub.models import (
    MemoryWeights,
    random_weights,
    read_safetensors,
    save_first_release,
    write_safetensors,
    zero_skipping,
)
from zslurm.train.config import ModelConfig
from zslurm.train.errors import HubError
from zslurm.train.hub import export, import_weights, open_weights, to_config_json
from zslurm.train.hub.settings import Settings, inexact

CONFIG = zero_skipping()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    export(MemoryWeights(CONFIG, random_weights(CONFIG)), tmp_path / "hf", dtype="fp32")
    return tmp_path / "hf"


def problems_of(folder: Path) -> tuple[str, ...]:
    with pytest.raises(HubError) as caught:
        open_weights(folder)
    return caught.value.problems


def edit_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def test_missing_extra_and_wrongly_shaped_tensors_are_all_listed(folder: Path) -> None:
    stored = read_safetensors(folder)
    del stored["model.norm.weight"], stored["model.layers.1.self_attn.qk_norm.temp"]
    stored["model.layers.0.mlp.experts.down_proj"] = np.zeros((3, 12, 16), np.float32)
    stored["model.layers.0.self_attn.rotary"] = np.zeros(3, np.float32)
    stored["model.layers.2.input_layernorm.weight"] = np.zeros(16, np.float32)
    write_safetensors(folder / "model.safetensors", stored)
    problems = problems_of(folder)
    assert len(problems) == 5
    text = "\n".join(problems)
    assert "model.norm.weight [16]: missing" in text
    assert "model.layers.1.self_attn.qk_norm.temp [2]: missing" in text
    assert "model.layers.0.mlp.experts.down_proj: has shape [3, 12, 16]" in text
    assert "needs [3, 16, 12]" in text
    assert "model.layers.0.self_attn.rotary [3]: the model has no such tensor" in text
    assert "model.layers.2.input_layernorm.weight [16]: the model has no such tensor" in text
    assert all(str(folder) in line for line in problems)


@pytest.mark.parametrize("kept", [0, 5, 100, 3000, -1])
def test_a_truncated_file_is_named(folder: Path, kept: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    problems = problems_of(folder)
    assert any("truncated" in line and "model.safetensors" in line for line in problems)


def test_a_missing_shard_is_one_line_and_not_one_for_each_of_its_tensors(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    export(MemoryWeights(CONFIG, random_weights(CONFIG)), folder, dtype="fp32", max_shard_bytes=6000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    gone, cut = sorted(set(index["weight_map"].values()))[1:3]
    (folder / gone).unlink()
    (folder / cut).write_bytes((folder / cut).read_bytes()[:7])
    assert len(problems_of(folder)) == 2
    assert [line for line in problems_of(folder) if f"{gone}: missing" in line]


def test_an_index_that_names_files_elsewhere_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    export(MemoryWeights(CONFIG, random_weights(CONFIG)), folder, max_shard_bytes=6000)
    path = folder / "model.safetensors.index.json"
    path.write_text(path.read_text().replace("model-00001-of", "../model-00001-of"))
    assert "weight_map" in problems_of(folder)[0]


@pytest.mark.parametrize(
    ("change", "problems"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "model_type 'llama'"),
        ({"architectures": ["ZayaForSequenceClassification"]}, "only ZayaForCausalLM"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_experts": "three"}, "num_experts"),
        ({"num_key_value_heads": 3}, "must be a multiple of"),
        ({"layer_types": ["hybrid", "hybrid_sliding"]}, "layer_types"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"num_experts_per_tok": 2}, "num_experts_per_tok is 2"),
        ({"rope_parameters": {"hybrid": {"rope_type": "yarn", "rope_theta": 1e4}}}, "yarn"),
        ({"rope_parameters": {"hybrid": {"rope_type": "default", "rope_theta": -1}}}, "rope_theta"),
        ({"max_position_embeddings": True}, "max_position_embeddings"),
        ({"architectures": 7}, "architectures 7: only ZayaForCausalLM"),
        (
            {"num_hidden_layers": 10**30, "layer_types": None},
            f"num_hidden_layers is {10**30}, more than there are tensors",
        ),
        ({"pad_token_id": [1]}, "pad_token_id is no token id: [1]"),
        ({"bos_token_id": {}}, "bos_token_id is no token id: {}"),
        ({"eos_token_id": [1, -1]}, "eos_token_id is no token id: [1, -1]"),
        ({"eos_token_id": True}, "eos_token_id is no token id: true"),
    ],
    ids=str,
)
def test_settings_that_our_model_does_not_have_are_named(
    folder: Path, change: dict[str, Any], problems: str
) -> None:
    edit_config(folder, lambda config: config.update(change))
    assert problems in "\n".join(problems_of(folder))


def test_several_wrong_settings_are_problems_together(folder: Path) -> None:
    edit_config(folder, lambda c: c.update(attention_bias=True, hidden_act="gelu", head_dim=None))
    assert len(problems_of(folder)) == 3


@pytest.mark.parametrize("text", ["", "[]", "{", '"zaya"', "\xff"])
def test_a_config_that_is_none_is_one_line(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    assert len(problems_of(folder)) == 1


def test_a_folder_without_tensors_says_what_it_looked_for(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "model.safetensors.index.json" in problems_of(folder)[0]


@settings(max_examples=60, deadline=None)
@given(where=st.integers(0, 2500), bit=st.integers(0, 7))
def test_a_flipped_bit_in_a_header_is_an_error_of_ours_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, where: int, bit: int
) -> None:
    folder = tmp_path_factory.mktemp("flip")
    export(MemoryWeights(CONFIG, random_weights(CONFIG)), folder, dtype="fp32")
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[where] ^= 1 << bit
    file.write_bytes(content)
    try:
        open_weights(folder).close()
    except HubError as error:
        assert error.problems


def test_nothing_is_written_where_something_is(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").write_text("mine")
    with open_weights(folder) as weights:
        with pytest.raises(HubError, match="exists"):
            export(weights, tmp_path / "taken")
        import_weights(weights, tmp_path / "checkpoints")
        with pytest.raises(HubError, match="holds checkpoints"):
            import_weights(weights, tmp_path / "checkpoints")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "hf", "taken"]
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["mine"]


class Breaking(MemoryWeights):
    """Weights whose reading is interrupted."""

    def read(self, tensor: str, start: int, out: Any) -> None:
        if tensor.startswith("layers.1."):
            raise KeyboardInterrupt
        super().read(tensor, start, out)


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    weights = Breaking(CONFIG, random_weights(CONFIG))
    with pytest.raises(KeyboardInterrupt):
        export(weights, tmp_path / "hf")
    with pytest.raises(KeyboardInterrupt):
        import_weights(weights, tmp_path / "checkpoints")
    assert list(tmp_path.iterdir()) == []


REFUSED: dict[str, Any] = {"skip_expert": False, "experts_per_token": 2, "router": "linear"}
WRITTEN: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "layers": 3, "query_heads": 2, "kv_heads": 1, "head_dim": 16,
    "conv_widths": (3, 4), "rotary_share": 1.0, "experts": 5, "expert_hidden_size": 20, "router_hidden_size": 8,
    "norm_eps": 1e-6, "init_std": 0.1,
}  # fmt: skip


@pytest.mark.parametrize("key", REFUSED)
def test_a_model_that_transformers_cannot_express_is_refused_by_name(tmp_path: Path, key: str) -> None:
    config = zero_skipping(**{key: REFUSED[key]})
    with pytest.raises(HubError) as caught:
        export(MemoryWeights(config, random_weights(config)), tmp_path / "hf")
    (problem,) = caught.value.problems
    assert problem.startswith(f"model.{key}: ZayaForCausalLM has nothing for {REFUSED[key]!r}, only for ")
    assert list(tmp_path.iterdir()) == []


def test_settings_that_cannot_be_expressed_are_all_named_at_once() -> None:
    with pytest.raises(HubError) as caught:
        to_config_json(Settings(zero_skipping(**REFUSED), 1e4, 64), "bf16")
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "model.experts_per_token",
        "model.skip_expert",
        "model.router",
    ]


def test_every_setting_of_a_model_is_exported_or_refused() -> None:
    """None is dropped in silence; the skip rule alone goes next to the format, into zslurm.json, with a note."""
    plain = to_config_json(Settings(CONFIG, 1e4, 64), "bf16")
    for key, value in WRITTEN.items():
        assert to_config_json(Settings(zero_skipping(**{key: value}), 1e4, 64), "bf16") != plain, key
    assert inexact(zero_skipping(skip_rule="identity")) is not None
    assert ModelConfig.model_fields.keys() == {*REFUSED, *WRITTEN, "skip_rule"}


def test_facts_that_are_not_known_are_asked_for() -> None:
    with pytest.raises(HubError) as caught:
        to_config_json(Settings(CONFIG), "bf16")
    assert "--rope-base" in str(caught.value)
    assert "--context" in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"zaya_use_mod": False},
        {"swa_layers": [4096, 0] * 2},
        {"rope_theta": None},
        {"zaya_layers": ["a", 3, "a"]},
        {"clamp_temp": True},
    ],
    ids=str,
)
def test_a_first_release_with_other_features_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    save_first_release(tmp_path, CONFIG, random_weights(CONFIG), **change)
    assert next(iter(change)) in problems_of(tmp_path)[0] or "stages" in problems_of(tmp_path)[0]


def test_a_first_release_lists_all_that_is_wrong_with_its_tensors(tmp_path: Path) -> None:
    tensors = save_first_release(tmp_path, CONFIG, random_weights(CONFIG))
    del tensors["model.layers.3.zaya_block.experts.local_experts.2.linear_fc1.weight"]
    del tensors["model.res_scale.residual_bias"]
    tensors["model.layers.2.self_attn.qkv.temp"] = np.zeros(4, np.uint16)
    tensors["model.layers.0.res_scale.residual_scale"] = np.zeros(16, np.uint16)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    assert len(problems_of(tmp_path)) == 4
