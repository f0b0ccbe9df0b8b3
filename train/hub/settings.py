"""config.json of a published model <-> our ModelConfig and the few facts that are not in it.

Exporting refuses a model that transformers' `ZayaForCausalLM` cannot express: a setting that it does not have
must be at the one value that it implies. The only exception is the skip rule: transformers gives a skipped token
zero; a model of the rule `identity` is exported too, sidecar.py keeps the rule for our own import, and
`inexact` describes what transformers will do.

Importing names every setting that our model does not have (sliding windows, biases, an untied head) instead of
dropping it. The first release's config.json has had several forms, and some published ones contradict the
weights, so there the sizes are taken from the tensors' shapes; the rest comes from the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from zslurm.train.config import ModelConfig
from zslurm.train.errors import HubError
from zslurm.train.hub.layouts import Layout

ARCHITECTURE = "ZayaForCausalLM"
_MOST_TOKENS = 2**32  # a tokenizer counts in 32 bits

_NATIVE = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "query_heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "experts": "num_experts",
    "expert_hidden_size": "moe_intermediate_size",
    "router_hidden_size": "router_hidden_size",
}
"""Our sizes -> the keys of transformers."""

_EXPRESSED = {*_NATIVE, "conv_widths", "rotary_share", "norm_eps", "init_std", "skip_rule"}
_IMPLIED = {"experts_per_token": 1, "skip_expert": True}


@dataclass(frozen=True)
class TokenIds:
    """Ids of the special tokens; None if there is none. Generation ends at any of `end`."""

    pad: int | None = None
    begin: int | None = None
    end: tuple[int, ...] = ()


@dataclass(frozen=True)
class Settings:
    """What a folder or checkpoint holds besides its tensors.

    Attributes:
        rope_base: base of the rotary embedding; None if unknown.
        context: longest sequence, in tokens; None if unknown.
        dtype: format that the weights are meant to be computed in, "bf16" or "fp32"; None if not known.
        lr: peak learning rate of the phase that they were saved in; None if it is not known.
    """

    model: ModelConfig
    rope_base: float | None = None
    context: int | None = None
    tokens: TokenIds = TokenIds()
    dtype: str | None = None
    lr: float | None = None


def inexact(model: ModelConfig) -> str | None:
    """Return why transformers computes something else than we do with this model; None if it does not."""
    if model.skip_rule == "zero":
        return None
    return (
        "model.skip_rule is identity: a token that the router lets skip the experts keeps its normed input here, "
        f"and gets zero in {ARCHITECTURE}, so outputs differ where tokens skip (train with skip_rule: zero)"
    )


def to_config_json(settings: Settings, dtype: str) -> dict[str, Any]:
    """config.json as transformers 5 writes and reads it, for weights stored in `dtype` ("bf16" or "fp32").

    Raises:
        HubError: transformers cannot express the model, or the RoPE base or context is not known.
    """
    model = settings.model
    problems = [
        f"model.{key}: {ARCHITECTURE} has nothing for {getattr(model, key)!r}, only for {only!r}"
        for key, only in [*_IMPLIED.items(), *_other_settings()]
        if getattr(model, key) != only
    ]
    if settings.rope_base is None:
        problems.append("the RoPE base is not known: no config.json of a run next to it; pass --rope-base")
    if settings.context is None:
        problems.append("the context is not known: no config.json of a run next to it; pass --context")
    if problems:
        raise HubError(*problems)
    tokens = settings.tokens
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "zaya",
        "dtype": {"bf16": "bfloat16", "fp32": "float32"}[dtype],
        **{theirs: getattr(model, own_key) for own_key, theirs in _NATIVE.items()},
        "num_experts_per_tok": 1,
        "cca_time0": model.conv_widths[0],
        "cca_time1": model.conv_widths[1],
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "initializer_range": model.init_std,
        "max_position_embeddings": settings.context,
        "layer_types": ["hybrid"] * model.layers,
        "rope_parameters": {
            "hybrid": {
                "rope_type": "default",
                "rope_theta": settings.rope_base,
                "partial_rotary_factor": model.rotary_share,
            }
        },
        "sliding_window": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "lm_head_bias": False,
        "attention_dropout": 0.0,
        "use_cache": True,
        "pad_token_id": tokens.pad,
        "bos_token_id": tokens.begin,
        "eos_token_id": tokens.end[0] if len(tokens.end) == 1 else list(tokens.end) or None,
    }


def _other_settings() -> list[tuple[str, Any]]:
    """Keys of ModelConfig that no table here knows, each with its default: newer features, unknown elsewhere."""
    expressed = _EXPRESSED | _IMPLIED.keys()
    return [(key, field.get_default()) for key, field in ModelConfig.model_fields.items() if key not in expressed]


def check_architecture(config: Mapping[str, Any]) -> None:
    """Raise HubError unless `config` describes a ZAYA model."""
    kind, names = config.get("model_type"), config.get("architectures") or []
    if kind != "zaya" or not isinstance(names, list) or (names and ARCHITECTURE not in names):
        architecture = f"model_type {kind!r}, architectures {names!r}"
        raise HubError(f"config.json: {architecture}: only {ARCHITECTURE} (model_type 'zaya') can be read")


def from_config_json(config: Mapping[str, Any], layout: Layout, shapes: Mapping[str, tuple[int, ...]]) -> Settings:
    """Return what config.json gives, for a folder that holds tensors of `shapes`.

    Raises:
        HubError: every setting that is missing or that our model does not have, one line each.
    """
    reader = _Reader(config)
    for key, only in (("attention_bias", False), ("lm_head_bias", False), ("tie_word_embeddings", True)):
        reader.only(key, only)
    if layout is Layout.TRANSFORMERS:
        values, rope = _native_model(reader, len(shapes)), _native_rope(reader)
    else:
        values, rope = _first_release_model(reader, shapes), _first_release_rope(reader)
    values["rotary_share"] = rope.get("partial_rotary_factor", 0.5)
    base = reader.number("rope_theta", rope.get("rope_theta"))
    context = reader.number("max_position_embeddings", config.get("max_position_embeddings", 131072))
    tokens = _token_ids(reader)
    model = _validated(values, reader.problems)
    if reader.problems or model is None:
        raise HubError(*(f"config.json: {problem}" for problem in reader.problems))
    dtype = config.get("dtype", config.get("torch_dtype"))
    return Settings(
        model,
        rope_base=float(base),
        context=int(context),
        tokens=tokens,
        dtype={"bfloat16": "bf16", "float32": "fp32"}.get(str(dtype)),
    )


class _Reader:
    """A config.json being read: everything wrong with it is collected, not raised one by one."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.problems: list[str] = []

    def need(self, key: str) -> Any:
        if self.config.get(key) is None:
            self.problems.append(f"{key} is missing")
        return self.config.get(key)

    def only(self, key: str, value: Any) -> None:
        """Complain unless `key` has `value`, is null or is absent."""
        value_given = self.config.get(key)
        if value_given is not None and value_given != value:
            self.problems.append(f"{key} is {value_given!r}; only {value!r} can be read")

    def number(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            self.problems.append(f"{key} must be a positive number, got {value!r}")
            return 1.0
        return value


def _native_model(reader: _Reader, tensors: int) -> dict[str, Any]:
    config = reader.config
    reader.only("num_experts_per_tok", 1)
    reader.only("hidden_act", "silu")
    layers = reader.need("num_hidden_layers")
    if isinstance(layers, int) and layers > tensors:
        reader.problems.append(f"num_hidden_layers is {layers}, more than there are tensors ({tensors})")
    elif isinstance(layers, int):
        reader.only("layer_types", ["hybrid"] * layers)
    return {
        **{own_key: reader.need(theirs) for own_key, theirs in _NATIVE.items()},
        "conv_widths": (config.get("cca_time0", 2), config.get("cca_time1", 2)),
        "norm_eps": config.get("rms_norm_eps", 1e-5),
        "init_std": config.get("initializer_range", 0.02),
        "skip_rule": "zero",
    }


def _native_rope(reader: _Reader) -> Mapping[str, Any]:
    rope = reader.config.get("rope_parameters")
    if rope is None:
        return {"rope_theta": 5_000_000.0}  # transformers' default
    parameters = rope.get("hybrid", rope) if isinstance(rope, dict) else None
    if not isinstance(parameters, dict):
        reader.problems.append(f"rope_parameters must be a mapping, got {rope!r}")
        return {"rope_theta": 1.0}
    if parameters.get("rope_type", "default") != "default":
        reader.problems.append(f"rope_type is {parameters['rope_type']!r}; only 'default' can be read")
    return parameters


_FIRST_RELEASE_SIZES = {
    "vocab_size": ("model.embed_tokens.weight", 0),
    "hidden_size": ("model.embed_tokens.weight", 1),
    "kv_heads": ("model.layers.0.self_attn.qkv.temp", 0),
    "_queries": ("model.layers.0.self_attn.qkv.linear_q.weight", 0),
    "_keys": ("model.layers.0.self_attn.qkv.linear_k.weight", 0),
    "_width0": ("model.layers.0.self_attn.qkv.conv_qk.0.weight", 2),
    "_width1": ("model.layers.0.self_attn.qkv.conv_qk.1.weight", 2),
    "router_hidden_size": ("model.layers.1.zaya_block.router.down_proj.weight", 0),
    "_classes": ("model.layers.1.zaya_block.router.router_mlp.4.weight", 0),
    "expert_hidden_size": ("model.layers.1.zaya_block.experts.local_experts.0.linear_fc2.weight", 1),
}
"""A size -> the tensor of the first layer that shows it, and in which of its dimensions."""


def _first_release_model(reader: _Reader, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    for key, only in {
        "moe_router_topk": 1,
        "activation_func": "swiglu",
        "normalization": "RMSNorm",
        "clamp_temp": False,
        "rope_scaling": False,
        "zaya_use_eda": True,
        "zaya_use_mod": True,
        "scale_residual_merge": True,
    }.items():
        reader.only(key, only)
    windows, kinds = (reader.config.get(key) or [] for key in ("swa_layers", "zaya_layers"))
    if not isinstance(windows, list) or any(windows):
        reader.problems.append("swa_layers names sliding windows, which our model does not have")
    sizes: dict[str, Any] = {}
    for key, (name, dimension) in _FIRST_RELEASE_SIZES.items():
        try:
            sizes[key] = shapes[name][dimension]
        except (KeyError, IndexError):
            reader.problems.append(f"the sizes cannot be found: tensor {name} is missing or has no such dimension")
            return sizes
    stages = (len(kinds) if isinstance(kinds, list) else 0) or reader.need("num_hidden_layers")
    if not isinstance(stages, int) or stages % 2 or stages > len(shapes):
        reader.problems.append(f"an even number of stages is needed, no more than tensors, got {stages!r}")
        return sizes
    queries, keys, classes = sizes.pop("_queries"), sizes.pop("_keys"), sizes.pop("_classes")
    widths = sizes.pop("_width0"), sizes.pop("_width1")
    head_dim = keys // max(1, sizes["kv_heads"])
    config = reader.config
    return {
        **sizes,
        "layers": stages // 2,
        "head_dim": head_dim,
        "query_heads": queries // max(1, head_dim),
        "experts": classes - 1,
        "conv_widths": widths,
        "norm_eps": config.get("norm_epsilon", config.get("layer_norm_eps", config.get("rms_norm_eps", 1e-5))),
        "skip_rule": "identity",
    }


def _first_release_rope(reader: _Reader) -> Mapping[str, Any]:
    config = reader.config
    parameters = {"rope_theta": reader.need("rope_theta") or 1.0}
    return parameters | {"partial_rotary_factor": config.get("partial_rotary_factor", 0.5)}


def _validated(values: dict[str, Any], problems: list[str]) -> ModelConfig | None:
    if problems:
        return None
    try:
        return ModelConfig(**values)
    except ValidationError as error:
        for row in error.errors():
            where = ".".join(str(word) for word in row["loc"])
            problems.append(f"{_NATIVE.get(where, where)}: {row['msg']}".removeprefix(": "))
        return None


def _token_ids(reader: _Reader) -> TokenIds:
    """As transformers fills them in: a key that is absent has ZAYA1's value, one that is null has none."""

    def read(key: str, absent: int) -> tuple[int, ...]:
        value = reader.config.get(key, absent)
        ids = value if isinstance(value, list) and key == "eos_token_id" else [] if value is None else [value]
        if not all(type(token) is int and 0 <= token < _MOST_TOKENS for token in ids):
            reader.problems.append(f"{key} is no token id: {json.dumps(value)}")
            return ()
        return tuple(ids)

    pad, begin = read("pad_token_id", 0), read("bos_token_id", 2)
    return TokenIds(pad=pad[0] if pad else None, begin=begin[0] if begin else None, end=read("eos_token_id", 106))
