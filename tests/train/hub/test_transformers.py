"""Our weights in transformers and theirs in ours: the same logits, the same tokens, the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.train.hub.models import (
    CONTEXT,
    ROPE_BASE,
    MemoryWeights,
    model_of,
    our_logits,
    random_weights,
    read_safetensors,
    write_safetensors,
    zero_skipping,
)
from tests.train.models import tokens
from zslurm.train.config import ModelConfig
from zslurm.train.errors import HubError
from zslurm.train.hub import FolderWeights, Layout, TokenIds, Weights, export, import_weights, open_weights, pieces
from zslurm.train.hub.folder import to_bf16
from zslurm.train.shapes import tensor_table

transformers = pytest.importorskip("transformers")
ROPE = {"rope_type": "default", "rope_theta": ROPE_BASE, "partial_rotary_factor": 0.5}


def theirs(path: Path, **options: Any) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, local_files_only=True, **options)
    return model.eval()


def values_of(weights: Weights) -> dict[str, np.ndarray]:
    model = weights.settings.model
    table = [(row.name, row.shape) for row in tensor_table(model)]
    found = {}
    for name, shape in [*table, ("balancing_bias", (model.layers, model.router_classes))]:
        found[name] = np.empty(shape, np.float32)
        weights.read(name, 0, found[name].reshape(-1))
    return found


@pytest.mark.parametrize(
    "changes",
    [{}, {"layers": 1, "conv_widths": (3, 2), "rotary_share": 1.0}, {"layers": 4, "query_heads": 2, "experts": 5}],
    ids=str,
)
def test_transformers_loads_an_export_and_has_our_logits(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = zero_skipping(**changes)
    values = random_weights(config)
    done = export(MemoryWeights(config, values), tmp_path / "hf", dtype="fp32", max_shard_bytes=4000)
    assert done.note is None
    model = theirs(tmp_path / "hf", dtype=torch.float32)
    tokens_BS = tokens(config, length=24)
    with torch.no_grad():
        expected = model(tokens_BS).logits
    ours = our_logits(model_of(config, values, torch.float32), tokens_BS)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)
    assert ours.std() > 0.1


def test_an_export_needs_no_conversion_report(tmp_path: Path) -> None:
    """transformers finds every tensor under its name, and no other."""
    config = zero_skipping()
    export(MemoryWeights(config, random_weights(config)), tmp_path / "hf")
    _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info


def test_greedy_generation_in_transformers_gives_our_tokens(tmp_path: Path) -> None:
    config = zero_skipping(layers=3)
    values = random_weights(config, seed=8)
    export(MemoryWeights(config, values, tokens=TokenIds()), tmp_path / "hf", dtype="fp32")
    prompt = tokens(config, batch=1, length=7)
    model = theirs(tmp_path / "hf", dtype=torch.float32)
    found = model.generate(prompt, max_new_tokens=20, do_sample=False)
    ours, mine = model_of(config, values, torch.float32), prompt
    for _ in range(20):
        mine = torch.cat([mine, our_logits(ours, mine)[:, -1:].argmax(-1)], dim=1)
    assert found.tolist() == mine.tolist()
    assert len(set(mine[0].tolist())) > 3


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shard_size", ["1GB", "5KB"])
def test_a_folder_that_transformers_saved_has_the_same_logits_here(
    tmp_path: Path, dtype: str, shard_size: str
) -> None:
    torch.manual_seed(3)
    config = transformers.ZayaConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=4, moe_intermediate_size=12, num_experts=3, router_hidden_size=8, initializer_range=0.3,
        rope_parameters={"hybrid": ROPE},
        eos_token_id=[1, 3], max_position_embeddings=CONTEXT,
    )  # fmt: skip
    model = transformers.ZayaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    model.save_pretrained(tmp_path / "hf", max_shard_size=shard_size)
    with open_weights(tmp_path / "hf") as weights:
        import_weights(weights, tmp_path / "checkpoints", max_shard_bytes=20_000)
    with open_weights(tmp_path / "checkpoints" / "step-00000000") as weights:
        settings = weights.settings
        ours = model_of(settings.model, values_of(weights), torch.float32)
    assert settings.rope_base == ROPE_BASE
    assert settings.context == CONTEXT
    assert settings.tokens == TokenIds(pad=0, begin=2, end=(1, 3))
    assert settings.dtype == dtype
    assert settings.model.skip_rule == "zero"
    tokens_BS = tokens(settings.model, length=20)
    with torch.no_grad():
        expected = theirs(tmp_path / "hf", dtype=torch.float32)(tokens_BS).logits
    torch.testing.assert_close(our_logits(ours, tokens_BS), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_round_trip_keeps_every_bit(tmp_path: Path, dtype: str) -> None:
    config = zero_skipping(layers=3)
    values = random_weights(config)
    export(MemoryWeights(config, values), tmp_path / "once", dtype=dtype, max_shard_bytes=3000)
    with open_weights(tmp_path / "once") as weights:
        import_weights(weights, tmp_path / "checkpoints", max_shard_bytes=7000)
    with open_weights(tmp_path / "checkpoints" / "step-00000000") as weights:
        again = values_of(weights)
        assert weights.settings.model == config
        export(weights, tmp_path / "twice", dtype=dtype, max_shard_bytes=3000)
    for name, value in values.items():
        if dtype == "fp32" or name == "balancing_bias":
            assert again[name].tobytes() == value.tobytes(), name
        else:
            assert to_bf16(again[name]).tobytes() == to_bf16(value).tobytes(), name
    files = sorted(path.name for path in (tmp_path / "once").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "twice").iterdir())
    assert len(files) > 10
    for name in files:
        assert (tmp_path / "once" / name).read_bytes() == (tmp_path / "twice" / name).read_bytes(), name


def test_an_export_is_cut_into_files_of_the_size_asked_for(tmp_path: Path) -> None:
    config = zero_skipping()
    export(MemoryWeights(config, random_weights(config)), tmp_path / "hf", max_shard_bytes=3000)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    stored = read_safetensors(tmp_path / "hf")
    assert set(index["weight_map"]) == set(stored) == {p.name for p in pieces(config, Layout.TRANSFORMERS)}
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in stored.values())
    by_file: dict[str, list[int]] = {}
    for name, file in index["weight_map"].items():
        by_file.setdefault(file, []).append(stored[name].nbytes)
    assert all(sum(sizes) <= 3000 or len(sizes) == 1 for sizes in by_file.values())
    assert sorted(by_file) == [
        f"model-{n:05d}-of-{len(by_file):05d}.safetensors" for n in range(1, len(by_file) + 1)
    ]


def test_weights_are_rounded_as_torch_rounds_and_balancing_biases_are_not(tmp_path: Path) -> None:
    config = zero_skipping()
    values = random_weights(config)
    export(MemoryWeights(config, values), tmp_path / "hf", dtype="bf16")
    stored = read_safetensors(tmp_path / "hf")
    for piece in pieces(config, Layout.TRANSFORMERS):
        part = values[piece.tensor].reshape(-1)[piece.start : piece.start + piece.numel].reshape(piece.shape)
        if piece.tensor == "balancing_bias":
            assert stored[piece.name].dtype == np.float32
            continue
        part = torch.from_numpy(part).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        assert stored[piece.name].tobytes() == part.tobytes(), piece.name


def test_balancing_biases_choose_alike_after_transformers_has_set_the_skip_class_to_minus_one(
    tmp_path: Path,
) -> None:
    config = zero_skipping()
    values = random_weights(config)
    export(MemoryWeights(config, values), tmp_path / "hf")
    for layer, block in enumerate(theirs(tmp_path / "hf").model.layers):
        found, trained = block.mlp.gate.balancing_biases.numpy(), values["balancing_bias"][layer]
        assert found.dtype == np.float32
        assert found[-1] == -1.0
        np.testing.assert_allclose(found - found[0], trained - trained[0], atol=2e-7)


def test_balancing_biases_that_were_changed_since_the_export_are_what_is_imported(tmp_path: Path) -> None:
    config = zero_skipping()
    values = random_weights(config)
    export(MemoryWeights(config, values), tmp_path / "hf", dtype="fp32")
    with open_weights(tmp_path / "hf") as weights:
        assert values_of(weights)["balancing_bias"].tobytes() == values["balancing_bias"].tobytes()
    stored = read_safetensors(tmp_path / "hf")
    stored["model.layers.1.mlp.gate.balancing_biases"] = np.array([1, 2, 3, 4], np.float32)
    write_safetensors(tmp_path / "hf" / "model.safetensors", stored)
    with open_weights(tmp_path / "hf") as weights:
        assert values_of(weights)["balancing_bias"][1].tolist() == [1, 2, 3, 4]


def test_the_model_that_skips_otherwise_says_so_and_comes_back_as_it_was(tmp_path: Path) -> None:
    config = zero_skipping().model_copy(update={"skip_rule": "identity"})
    done = export(MemoryWeights(config, random_weights(config)), tmp_path / "hf")
    assert done.note is not None
    assert "skip" in done.note
    assert theirs(tmp_path / "hf") is not None
    with FolderWeights(tmp_path / "hf") as weights:
        assert weights.settings.model.skip_rule == "identity"


def test_a_tied_head_that_was_stored_twice_is_no_problem_unless_it_differs(tmp_path: Path) -> None:
    config = zero_skipping()
    export(MemoryWeights(config, random_weights(config)), tmp_path / "hf", dtype="fp32")
    stored = read_safetensors(tmp_path / "hf")
    head = stored["model.embed_tokens.weight"].copy()
    write_safetensors(tmp_path / "hf" / "model.safetensors", stored | {"lm_head.weight": head})
    with open_weights(tmp_path / "hf"):
        pass
    head[0, 0] += 1
    write_safetensors(tmp_path / "hf" / "model.safetensors", stored | {"lm_head.weight": head})
    with pytest.raises(HubError, match="lm_head"):
        open_weights(tmp_path / "hf")


def test_the_published_model_has_its_published_settings() -> None:
    """Ours of ZAYA1-8B equal transformers' defaults for it."""
    from zslurm.train.hub import Settings, to_config_json

    written = to_config_json(Settings(ModelConfig(skip_rule="zero"), 5e6, 131072, TokenIds(0, 2, (106,))), "bf16")
    default = transformers.ZayaConfig().to_dict()
    for key, value in written.items():
        if key not in ("architectures", "dtype", "rope_parameters"):
            assert default[key] == value, key
    assert default["rope_parameters"]["hybrid"] == written["rope_parameters"]["hybrid"]
