"""What our tensors are called elsewhere: transformers' `zaya` format, and Zyphra's first release.

Both formats hold what ours holds, cut at other places. A `TensorPiece` is one of their tensors: a run of elements,
row-major, of one of ours. So a conversion moves ranges of elements and never rearranges any.

    ours                             transformers                      first release (stage 2L, 2L + 1)
    layers.L.experts.gate_up.weight  one tensor                        one matrix per expert, linear_fc1
    balancing_bias [layers, classes] one vector per layer              one vector per layer
    entry of a stage                 at the end of the stage before    at the entry of the stage (res_scale)
    everything else                  one tensor                        one tensor

Sources of the names: transformers 5.23 (`ZayaForCausalLM`), and, for the first release, the `zaya` branch of
Zyphra's fork (whose `nn.Sequential`s give conv_qk.0, router_mlp.4 and the like) together with transformers' own
converter of that layout (convert_zaya_weights_to_hf.py in its history). ZAYA1-base's 2,483 tensors are these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from zslurm.train.config import ModelConfig
from zslurm.train.shapes import buffer_table, tensor_table

BALANCING_BIAS = "balancing_bias"
"""Our one buffer: part of every format, and in fp32 in all of them."""


class Layout(StrEnum):
    """A way to name and cut the tensors."""

    TRANSFORMERS = "transformers"
    FIRST_RELEASE = "first release"


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A tensor of another format: elements [start, start + numel) of our `tensor`, row-major."""

    name: str
    shape: tuple[int, ...]
    tensor: str
    start: int

    @property
    def numel(self) -> int:
        """Return the elements of the tensor."""
        return math.prod(self.shape)


def pieces(model: ModelConfig, layout: Layout) -> tuple[TensorPiece, ...]:
    """Return every tensor of `model` in another format, in the order of our own table."""
    table = [(row.name, row.shape) for row in tensor_table(model)]
    table += [(row.name, row.shape) for row in buffer_table(model)]
    return tuple(piece for name, shape in table for piece in _pieces(name, shape, model.layers, layout))


def _pieces(name: str, shape: tuple[int, ...], layers: int, layout: Layout) -> Iterator[TensorPiece]:
    if name == BALANCING_BIAS:
        for layer in range(layers):
            theirs = _name(f"layers.{layer}.{BALANCING_BIAS}", layers, layout)
            yield TensorPiece(theirs, shape[1:], name, layer * shape[1])
    elif layout is Layout.FIRST_RELEASE and ".experts." in name:
        for expert in range(shape[0]):
            theirs = _name(name, layers, layout).format(expert=expert)
            yield TensorPiece(theirs, shape[1:], name, expert * math.prod(shape[1:]))
    else:
        yield TensorPiece(_name(name, layers, layout), shape, name, 0)


_SCALING = {
    "hidden_scale": "hidden_states_scale",
    "hidden_bias": "hidden_states_bias",
    "residual_scale": "residual_scale",
    "residual_bias": "residual_bias",
}

_TRANSFORMERS = {
    "attention_entry.norm.weight": "input_layernorm.weight",
    "attention.temperature": "self_attn.qk_norm.temp",
    "attention.query.weight": "self_attn.qkv_proj.q_proj.weight",
    "attention.key.weight": "self_attn.qkv_proj.k_proj.weight",
    "attention.value_current.weight": "self_attn.qkv_proj.v_proj_current.weight",
    "attention.value_previous.weight": "self_attn.qkv_proj.v_proj_delayed.weight",
    "attention.depthwise_conv.weight": "self_attn.qkv_proj.conv_qk_depthwise.weight",
    "attention.depthwise_conv.bias": "self_attn.qkv_proj.conv_qk_depthwise.bias",
    "attention.grouped_conv.weight": "self_attn.qkv_proj.conv_qk_grouped.weight",
    "attention.grouped_conv.bias": "self_attn.qkv_proj.conv_qk_grouped.bias",
    "attention.output.weight": "self_attn.o_proj.weight",
    "expert_entry.norm.weight": "post_attention_layernorm.weight",
    "router.previous_scale": "mlp.gate.router_states_scale",
    "router.down.weight": "mlp.gate.down_proj.weight",
    "router.down.bias": "mlp.gate.down_proj.bias",
    "router.norm.weight": "mlp.gate.router_mlp.norm.weight",
    "router.first.weight": "mlp.gate.router_mlp.fc1.weight",
    "router.first.bias": "mlp.gate.router_mlp.fc1.bias",
    "router.second.weight": "mlp.gate.router_mlp.fc2.weight",
    "router.second.bias": "mlp.gate.router_mlp.fc2.bias",
    "router.output.weight": "mlp.gate.router_mlp.out_proj.weight",
    "experts.gate_up.weight": "mlp.experts.gate_up_proj",
    "experts.down.weight": "mlp.experts.down_proj",
    BALANCING_BIAS: "mlp.gate.balancing_biases",
}

_FIRST_RELEASE = {
    "attention_entry.norm.weight": "input_norm.weight",
    "attention.temperature": "self_attn.qkv.temp",
    "attention.query.weight": "self_attn.qkv.linear_q.weight",
    "attention.key.weight": "self_attn.qkv.linear_k.weight",
    "attention.value_current.weight": "self_attn.qkv.val_proj1.weight",
    "attention.value_previous.weight": "self_attn.qkv.val_proj2.weight",
    "attention.depthwise_conv.weight": "self_attn.qkv.conv_qk.0.weight",
    "attention.depthwise_conv.bias": "self_attn.qkv.conv_qk.0.bias",
    "attention.grouped_conv.weight": "self_attn.qkv.conv_qk.1.weight",
    "attention.grouped_conv.bias": "self_attn.qkv.conv_qk.1.bias",
    "attention.output.weight": "self_attn.o_proj.weight",
    "expert_entry.norm.weight": "input_norm.weight",
    "router.previous_scale": "zaya_block.router.router_states_scale",
    "router.down.weight": "zaya_block.router.down_proj.weight",
    "router.down.bias": "zaya_block.router.down_proj.bias",
    "router.norm.weight": "zaya_block.router.rmsnorm_eda.weight",
    "router.first.weight": "zaya_block.router.router_mlp.0.weight",
    "router.first.bias": "zaya_block.router.router_mlp.0.bias",
    "router.second.weight": "zaya_block.router.router_mlp.2.weight",
    "router.second.bias": "zaya_block.router.router_mlp.2.bias",
    "router.output.weight": "zaya_block.router.router_mlp.4.weight",
    "experts.gate_up.weight": "zaya_block.experts.local_experts.{expert}.linear_fc1.weight",
    "experts.down.weight": "zaya_block.experts.local_experts.{expert}.linear_fc2.weight",
    BALANCING_BIAS: "zaya_block.router.balancing_biases",
}


def _name(name: str, layers: int, layout: Layout) -> str:
    """Their name of one of our tensors; the entry of the head counts as a layer after the last."""
    if name == "embedding.weight":
        return "model.embed_tokens.weight"
    if name == "head_entry.norm.weight":
        return "model.norm.weight" if layout is Layout.TRANSFORMERS else "model.final_norm.weight"
    name = name.replace("head_entry.", f"layers.{layers}.attention_entry.")
    _, number, rest = name.split(".", 2)
    layer = int(number)
    if layout is Layout.TRANSFORMERS:
        return _in_transformers(layer, rest)
    return _in_first_release(layer, rest, layers)


def _in_transformers(layer: int, rest: str) -> str:
    module, _, last = rest.rpartition(".")
    if last not in _SCALING:
        return f"model.layers.{layer}.{_TRANSFORMERS[rest]}"
    if module == "expert_entry":
        return f"model.layers.{layer}.post_attention_residual_scale.{_SCALING[last]}"
    if layer == 0:
        return f"model.input_{_SCALING[last]}"
    return f"model.layers.{layer - 1}.post_mlp_residual_scale.{_SCALING[last]}"


def _in_first_release(layer: int, rest: str, layers: int) -> str:
    last = rest.rpartition(".")[2]
    stage = 2 * layer + int(rest.startswith(("expert_entry", "router", "experts", BALANCING_BIAS)))
    if last not in _SCALING:
        return f"model.layers.{stage}.{_FIRST_RELEASE[rest]}"
    if layer == layers:
        return f"model.res_scale.{_SCALING[last]}"
    return f"model.layers.{stage}.res_scale.{_SCALING[last]}"
