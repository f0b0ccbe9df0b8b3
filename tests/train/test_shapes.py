"""The table of tensors: its counts, its names, and that the model has exactly these tensors."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.train.models import tiny_config
from zslurm.train.config import ModelConfig, MuonConfig, OptimConfig
from zslurm.train.model.zaya import Zaya
from zslurm.train.shapes import TensorKind, buffer_table, owned_table, parameter_counts, tensor_table

LAYER_1 = """
layers.1.attention_entry.hidden_scale (12,)
layers.1.attention_entry.hidden_bias (12,)
layers.1.attention_entry.residual_scale (12,)
layers.1.attention_entry.residual_bias (12,)
layers.1.attention_entry.norm.weight (12,)
layers.1.attention.temperature (2,)
layers.1.attention.query.weight (32, 12)
layers.1.attention.key.weight (16, 12)
layers.1.attention.value_current.weight (8, 12)
layers.1.attention.value_previous.weight (8, 12)
layers.1.attention.depthwise_conv.weight (48, 1, 2)
layers.1.attention.depthwise_conv.bias (48,)
layers.1.attention.grouped_conv.weight (48, 8, 2)
layers.1.attention.grouped_conv.bias (48,)
layers.1.attention.output.weight (12, 32)
layers.1.expert_entry.hidden_scale (12,)
layers.1.expert_entry.hidden_bias (12,)
layers.1.expert_entry.residual_scale (12,)
layers.1.expert_entry.residual_bias (12,)
layers.1.expert_entry.norm.weight (12,)
layers.1.router.previous_scale (6,)
layers.1.router.down.weight (6, 12)
layers.1.router.down.bias (6,)
layers.1.router.norm.weight (6,)
layers.1.router.first.weight (6, 6)
layers.1.router.first.bias (6,)
layers.1.router.second.weight (6, 6)
layers.1.router.second.bias (6,)
layers.1.router.output.weight (4, 6)
layers.1.experts.gate_up.weight (3, 20, 12)
layers.1.experts.down.weight (3, 12, 10)
"""


def elements(config: ModelConfig, prefix: str) -> int:
    return sum(info.numel for info in tensor_table(config) if info.name.startswith(prefix))


def meta_model(config: ModelConfig) -> Zaya:
    with torch.device("meta"):
        return Zaya(config)


def assert_table_is_model(config: ModelConfig) -> None:
    model = meta_model(config)
    assert [(info.name, info.shape) for info in tensor_table(config)] == [
        (name, tuple(parameter.shape)) for name, parameter in model.named_parameters()
    ]
    assert [(info.name, info.shape) for info in buffer_table(config)] == [
        (name, tuple(buffer.shape)) for name, buffer in model.named_buffers()
    ]


def test_counts_of_the_published_model() -> None:
    counts = parameter_counts(ModelConfig())
    assert counts.total == 8_840_488_784
    assert counts.without_embedding == 8_303_355_728
    assert counts.active == 753_608_528
    assert counts.matrices == 8_289_167_360
    assert counts.total - counts.matrices == 551_321_424


def test_counts_of_the_parts_of_one_layer() -> None:
    config = ModelConfig()
    assert elements(config, "embedding.") == 537_133_056
    assert elements(config, "layers.5.attention.") == 5_575_682
    assert elements(config, "layers.5.experts.") == 16 * 12_582_912
    assert elements(config, "layers.0.router.") == 660_736
    assert elements(config, "layers.5.router.") == 660_736 + 256


def test_two_experts_per_token_make_two_experts_active() -> None:
    one, two = (parameter_counts(ModelConfig(experts_per_token=k)) for k in (1, 2))
    assert two.active - one.active == 40 * 12_582_912
    assert two.total == one.total


def test_a_choice_that_includes_the_skip_class_activates_no_more_than_all_experts() -> None:
    counts = parameter_counts(tiny_config(experts_per_token=4))
    assert counts.active == counts.without_embedding


def test_names_are_those_in_checkpoints() -> None:
    table = tensor_table(tiny_config())
    layer = [f"{info.name} {info.shape}" for info in table if info.name.startswith("layers.1.")]
    assert layer == LAYER_1.split("\n")[1:-1]
    assert [info.name for info in table if not info.name.startswith("layers.")] == [
        "embedding.weight",
        *(f"head_entry.{name}" for name in ("hidden_scale", "hidden_bias", "residual_scale", "residual_bias")),
        "head_entry.norm.weight",
    ]


def test_first_layer_has_no_residual_and_no_router_before_it() -> None:
    names = {info.name for info in tensor_table(tiny_config())}
    missing = {name.replace("layers.1.", "layers.0.") for name in names if "layers.1." in name} - names
    assert missing == {
        "layers.0.attention_entry.residual_scale",
        "layers.0.attention_entry.residual_bias",
        "layers.0.router.previous_scale",
    }


def test_default_model_has_exactly_these_tensors() -> None:
    assert_table_is_model(ModelConfig())


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": 1},
        {"skip_expert": False},
        {"conv_widths": (3, 1)},
        {"query_heads": 3, "kv_heads": 1},
        {"experts": 1, "experts_per_token": 2},
        {"router": "linear"},
    ],
    ids=str,
)
def test_model_has_exactly_these_tensors(changes: dict[str, Any]) -> None:
    assert_table_is_model(tiny_config(**changes))


@settings(max_examples=15, deadline=None)
@given(
    layers=st.integers(1, 3),
    hidden_size=st.integers(1, 9),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    experts=st.integers(1, 4),
    conv_widths=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    skip_expert=st.booleans(),
)
def test_any_model_has_exactly_these_tensors(kv_heads: int, group: int, **changes: Any) -> None:
    assert_table_is_model(tiny_config(kv_heads=kv_heads, query_heads=kv_heads * group, **changes))


def test_matrices_are_the_linear_maps_and_nothing_else() -> None:
    for info in tensor_table(tiny_config()):
        if info.kind is TensorKind.EXPERTS:
            assert info.matrices == info.shape
        elif info.kind is TensorKind.MATRIX:
            assert info.matrices == (1, *info.shape)
        else:
            assert info.matrices is None
    flat = {info.name for info in tensor_table(tiny_config()) if len(info.shape) > 1 and info.matrices is None}
    assert flat == {
        "embedding.weight",
        *(f"layers.{layer}.attention.{c}_conv.weight" for layer in (0, 1) for c in ("depthwise", "grouped")),
    }


def test_muons_matrices_are_owned_whole_and_adamws_are_not() -> None:
    model = tiny_config()
    table = owned_table(model, OptimConfig(matrices="muon"))
    assert [(row.name, row.shape, row.kind) for row in table] == [
        (row.name, row.shape, row.kind) for row in tensor_table(model)
    ]
    for row in table:
        assert row.whole == (0 if row.matrices is None else row.matrices[0]), row.name
    assert owned_table(model, OptimConfig(matrices="adamw")) == tensor_table(model)
    assert not any(row.whole for row in tensor_table(model))


def test_gate_and_up_can_be_owned_apart() -> None:
    joined, apart = (
        {row.name: row.whole for row in owned_table(tiny_config(), OptimConfig(muon=MuonConfig(split_gate_up=s)))}
        for s in (False, True)
    )
    assert {name for name in joined if joined[name] != apart[name]} == {
        "layers.0.experts.gate_up.weight",
        "layers.1.experts.gate_up.weight",
    }
    assert apart["layers.0.experts.gate_up.weight"] == 2 * joined["layers.0.experts.gate_up.weight"] == 6


def test_weight_decay_spares_vectors_only() -> None:
    for info in tensor_table(ModelConfig()):
        assert info.decay == (len(info.shape) > 1), info.name


def test_table_needs_no_torch() -> None:
    code = "import sys, zslurm.train.shapes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
