"""The layout of ZAYA1-base's first release: names, counts, and the same weights as before."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.train.hub.models import CONTEXT, ROPE_BASE, random_weights, save_first_release
from tests.train.models import tiny_config
from zslurm.train.config import ModelConfig
from zslurm.train.hub import Layout, TokenIds, import_weights, open_weights, pieces
from zslurm.train.hub.folder import to_bf16, to_fp32
from zslurm.train.shapes import tensor_table

# Names as in the checkpoint index of Zyphra/ZAYA1-8B-legacy and in the module tree of Zyphra's fork.
STAGE_0 = """
input_norm.weight res_scale.hidden_states_bias res_scale.hidden_states_scale self_attn.o_proj.weight
self_attn.qkv.conv_qk.0.bias self_attn.qkv.conv_qk.0.weight self_attn.qkv.conv_qk.1.bias
self_attn.qkv.conv_qk.1.weight self_attn.qkv.linear_k.weight self_attn.qkv.linear_q.weight self_attn.qkv.temp
self_attn.qkv.val_proj1.weight self_attn.qkv.val_proj2.weight
"""
STAGE_3 = """
input_norm.weight res_scale.hidden_states_bias res_scale.hidden_states_scale res_scale.residual_bias
res_scale.residual_scale zaya_block.experts.local_experts.0.linear_fc1.weight
zaya_block.experts.local_experts.0.linear_fc2.weight zaya_block.experts.local_experts.1.linear_fc1.weight
zaya_block.experts.local_experts.1.linear_fc2.weight zaya_block.experts.local_experts.2.linear_fc1.weight
zaya_block.experts.local_experts.2.linear_fc2.weight zaya_block.router.balancing_biases
zaya_block.router.down_proj.bias zaya_block.router.down_proj.weight zaya_block.router.rmsnorm_eda.weight
zaya_block.router.router_mlp.0.bias zaya_block.router.router_mlp.0.weight zaya_block.router.router_mlp.2.bias
zaya_block.router.router_mlp.2.weight zaya_block.router.router_mlp.4.weight zaya_block.router.router_states_scale
"""


def names_of(config: ModelConfig, prefix: str) -> list[str]:
    found = [piece.name for piece in pieces(config, Layout.FIRST_RELEASE)]
    return sorted(name.removeprefix(prefix) for name in found if name.startswith(prefix))


def test_zaya1_base_has_its_2483_tensors() -> None:
    table = pieces(ModelConfig(), Layout.FIRST_RELEASE)
    assert len({piece.name for piece in table}) == len(table) == 2483
    shapes = {piece.name: piece.shape for piece in table}
    assert shapes["model.layers.0.self_attn.qkv.conv_qk.1.weight"] == (1280, 128, 2)
    assert shapes["model.layers.79.zaya_block.experts.local_experts.15.linear_fc1.weight"] == (4096, 2048)
    assert shapes["model.layers.79.zaya_block.router.balancing_biases"] == (17,)
    assert shapes["model.res_scale.residual_scale"] == (2048,)


def test_each_stage_has_the_published_names() -> None:
    config = tiny_config()
    assert names_of(config, "model.layers.0.") == STAGE_0.split()
    assert names_of(config, "model.layers.3.") == STAGE_3.split()
    assert "zaya_block.router.router_states_scale" not in names_of(config, "model.layers.1.")
    assert len(names_of(config, "model.layers.2.")) == 15


@pytest.mark.parametrize("layout", Layout)
def test_every_element_of_ours_is_in_exactly_one_tensor(layout: Layout) -> None:
    config = tiny_config()
    covered: dict[str, int] = {}
    for piece in pieces(config, layout):
        assert piece.start == covered.get(piece.tensor, 0), "in order and without holes"
        covered[piece.tensor] = piece.start + piece.numel
    bias = config.layers * config.router_classes
    assert covered == {row.name: row.numel for row in tensor_table(config)} | {"balancing_bias": bias}


@pytest.mark.parametrize("scalars", [False, True], ids=["per-layer lists", "scalars"])
def test_a_folder_of_the_first_release_imports(tmp_path: Path, scalars: bool) -> None:
    """Both forms of its config.json; the published head count contradicts the weights, which win."""
    config = tiny_config(layers=3, conv_widths=(2, 3))
    values = random_weights(config)
    save_first_release(tmp_path / "first", config, values)
    if scalars:
        path = tmp_path / "first" / "config.json"
        given = {k: v for k, v in json.loads(path.read_text()).items() if not isinstance(v, list) or k[0] == "a"}
        path.write_text(json.dumps(given | {"num_experts": 3, "head_dim": 8, "num_attention_heads": 4}))
    with open_weights(tmp_path / "first") as weights:
        import_weights(weights, tmp_path / "checkpoints", max_shard_bytes=5000)
    with open_weights(tmp_path / "checkpoints" / "step-00000000") as weights:
        settings = weights.settings
        assert settings.model == config.model_copy(update={"init_std": 0.02})
        assert settings.model.skip_rule == "identity"
        assert (settings.rope_base, settings.context, settings.tokens) == (
            ROPE_BASE,
            CONTEXT,
            TokenIds(0, 2, (1,)),
        )
        for name, value in values.items():
            found = np.empty(value.shape, np.float32)
            weights.read(name, 0, found.reshape(-1))
            if name != "balancing_bias":
                rounded = to_bf16(value)
                value = np.empty_like(value)
                to_fp32(rounded, "BF16", value)
            assert found.tobytes() == value.tobytes(), name
