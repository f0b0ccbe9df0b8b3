"""The published implementation, `ZayaForCausalLM` of transformers, with the weights of one of our models.

The mapping of names is written down here on its own, so that a mistake in `train/hub.py` cannot hide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zslurm.train.config import ModelConfig
from zslurm.train.model.zaya import Zaya

# Every process of the tests imports this file to collect tests; transformers costs it three seconds.
if TYPE_CHECKING:
    from transformers import ZayaConfig, ZayaForCausalLM

_ENTRY = {
    "hidden_scale": "hidden_states_scale",
    "hidden_bias": "hidden_states_bias",
    "residual_scale": "residual_scale",
    "residual_bias": "residual_bias",
}
_LAYER = {
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
}


def reference_names(layers: int) -> dict[str, str]:
    """Our name of every parameter -> the reference's. Its residual scaling closes a stage, ours opens the next."""
    names = {
        "embedding.weight": "model.embed_tokens.weight",
        "layers.0.attention_entry.hidden_scale": "model.input_hidden_states_scale",
        "layers.0.attention_entry.hidden_bias": "model.input_hidden_states_bias",
        "head_entry.norm.weight": "model.norm.weight",
    }
    for layer in range(layers):
        after = f"layers.{layer + 1}.attention_entry" if layer + 1 < layers else "head_entry"
        for ours, theirs in _ENTRY.items():
            names[f"layers.{layer}.expert_entry.{ours}"] = (
                f"model.layers.{layer}.post_attention_residual_scale.{theirs}"
            )
            names[f"{after}.{ours}"] = f"model.layers.{layer}.post_mlp_residual_scale.{theirs}"
        for ours, theirs in _LAYER.items():
            if layer > 0 or ours != "router.previous_scale":
                names[f"layers.{layer}.{ours}"] = f"model.layers.{layer}.{theirs}"
    return names


@torch.no_grad()
def reference_of(model: Zaya, rope_base: float, **changes: Any) -> ZayaForCausalLM:
    """The reference with our model's weights and format; skipped tokens get zero, as its rule is."""
    from transformers import ZayaForCausalLM

    config = model.config
    assert config.skip_rule == "zero" and config.skip_expert and config.experts_per_token == 1
    dtype = model.embedding.weight.dtype
    reference = ZayaForCausalLM(reference_config(config, rope_base, **changes)).to(dtype)
    theirs = dict(reference.named_parameters())
    theirs.pop("lm_head.weight", None)
    names = reference_names(config.layers)
    assert set(names.values()) == set(theirs)
    for name, parameter in model.named_parameters():
        assert parameter.shape == theirs[names[name]].shape, name
        theirs[names[name]].copy_(parameter)
    for layer, bias_C in zip(reference.model.layers, model.balancing_bias, strict=True):
        layer.mlp.gate.balancing_biases = bias_C.clone()  # `to` rounded it with the parameters
    return reference


def reference_config(config: ModelConfig, rope_base: float, **changes: Any) -> ZayaConfig:
    """The reference's configuration of the same model."""
    from transformers import ZayaConfig

    values: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.query_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "moe_intermediate_size": config.expert_hidden_size,
        "num_experts": config.experts,
        "router_hidden_size": config.router_hidden_size,
        "cca_time0": config.conv_widths[0],
        "cca_time1": config.conv_widths[1],
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {
            "hybrid": {
                "rope_type": "default",
                "rope_theta": rope_base,
                "partial_rotary_factor": config.rotary_share,
            }
        },
        "tie_word_embeddings": True,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "attn_implementation": "eager",
    }
    return ZayaConfig(**(values | changes))


def gradients_of(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every parameter's gradient; zeros if the reference gave none."""
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in parameters.items()
    }
