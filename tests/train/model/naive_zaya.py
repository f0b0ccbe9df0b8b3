"""ZAYA1 written again, as slowly and plainly as possible: one sequence, one token, one head at a time.

It shares no code with `train.model` and uses no batched operation, so that a mistake in a reshape, a padding
or a permutation there cannot be repeated here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zslurm.train.config import ModelConfig

Weights = dict[str, Tensor]


def naive_logits(
    weights: Weights, config: ModelConfig, sequence: list[int], rope_base: float
) -> tuple[Tensor, list[list[int]]]:
    """Logits [S, V] of one sequence, and the choices of each layer and class; weights are a state dict."""
    counts = [[0] * config.router_classes for _ in range(config.layers)]
    hidden = [weights["embedding.weight"][token] for token in sequence]
    residual: list[Tensor] | None = None
    states: list[Tensor] | None = None
    for layer in range(config.layers):
        prefix = f"layers.{layer}."
        x, residual = _entry(weights, f"{prefix}attention_entry.", hidden, residual, config)
        hidden = _attention(weights, f"{prefix}attention.", x, config, rope_base)
        x, residual = _entry(weights, f"{prefix}expert_entry.", hidden, residual, config)
        bias = weights["balancing_bias"][layer]
        hidden, states = _experts(weights, prefix, x, states, bias, config, counts[layer])
    x, _ = _entry(weights, "head_entry.", hidden, residual, config)
    return torch.stack([weights["embedding.weight"] @ token for token in x]), counts


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def _entry(
    weights: Weights, prefix: str, hidden: list[Tensor], residual: list[Tensor] | None, config: ModelConfig
) -> tuple[list[Tensor], list[Tensor]]:
    joined = []
    for position, value in enumerate(hidden):
        total = (value + weights[f"{prefix}hidden_bias"]) * weights[f"{prefix}hidden_scale"]
        if residual is not None:
            kept = residual[position] + weights[f"{prefix}residual_bias"]
            total = total + kept * weights[f"{prefix}residual_scale"]
        joined.append(total)
    return [_norm(x, weights[f"{prefix}norm.weight"], config.norm_eps) for x in joined], joined


def _attention(
    weights: Weights, prefix: str, x: list[Tensor], config: ModelConfig, rope_base: float
) -> list[Tensor]:
    width, heads, kv_heads = config.head_dim, config.query_heads, config.kv_heads
    group = heads // kv_heads
    q0 = [weights[f"{prefix}query.weight"] @ token for token in x]
    k0 = [weights[f"{prefix}key.weight"] @ token for token in x]
    mixed = _convolutions(weights, prefix, [torch.cat(pair) for pair in zip(q0, k0, strict=True)], config)

    def head(vector: Tensor, index: int) -> Tensor:
        return vector[index * width : (index + 1) * width]

    queries: list[list[Tensor]] = []
    keys: list[list[Tensor]] = []
    values: list[list[Tensor]] = []
    for t in range(len(x)):
        mean = [(head(q0[t], h) + head(k0[t], h // group)) / 2 for h in range(heads)]
        q = [_long(head(mixed[t], h) + mean[h]) for h in range(heads)]
        k = []
        for j in range(kv_heads):
            skip = sum(mean[j * group : (j + 1) * group], torch.zeros(width, dtype=x[t].dtype)) / group
            temperature = weights[f"{prefix}temperature"][j]
            k.append(temperature * _long(head(mixed[t], heads + j) + skip))
        queries.append([_rotated(vector, t, config, rope_base) for vector in q])
        keys.append([_rotated(vector, t, config, rope_base) for vector in k])
        before = x[t - 1] if t > 0 else torch.zeros_like(x[t])
        value = torch.cat(
            [
                weights[f"{prefix}value_current.weight"] @ x[t],
                weights[f"{prefix}value_previous.weight"] @ before,
            ]
        )
        values.append([head(value, j) for j in range(kv_heads)])

    outputs = []
    for t in range(len(x)):
        result = []
        for h in range(heads):
            j = h // group
            scores = torch.stack([queries[t][h] @ keys[s][j] / math.sqrt(width) for s in range(t + 1)])
            shares = scores.softmax(0)
            result.append(sum((shares[s] * values[s][j] for s in range(t + 1)), torch.zeros_like(values[t][j])))
        outputs.append(weights[f"{prefix}output.weight"] @ torch.cat(result))
    return outputs


def _convolutions(weights: Weights, prefix: str, z: list[Tensor], config: ModelConfig) -> list[Tensor]:
    first, second = config.conv_widths
    zeros = [torch.zeros_like(z[0])] * (first - 1 + second - 1)
    weight, bias = weights[f"{prefix}depthwise_conv.weight"], weights[f"{prefix}depthwise_conv.bias"]
    padded = zeros + z
    middle = [
        sum(weight[:, 0, tap] * padded[start + tap] for tap in range(first)) + bias
        for start in range(len(padded) - first + 1)
    ]
    weight, bias = weights[f"{prefix}grouped_conv.weight"], weights[f"{prefix}grouped_conv.bias"]
    width = config.head_dim
    outputs = []
    for t in range(len(z)):
        heads = []
        for h in range(config.query_heads + config.kv_heads):
            rows = slice(h * width, (h + 1) * width)
            heads.append(sum(weight[rows, :, tap] @ middle[t + tap][rows] for tap in range(second)) + bias[rows])
        outputs.append(torch.cat(heads))
    return outputs


def _long(vector: Tensor) -> Tensor:
    return vector / torch.sqrt(vector @ vector) * math.sqrt(len(vector))


def _rotated(vector: Tensor, position: int, config: ModelConfig, base: float) -> Tensor:
    pairs = config.rotary_dim // 2
    turned = vector.clone()
    for i in range(pairs):
        angle = position * base ** (-2 * i / config.rotary_dim)
        a, b = vector[i], vector[i + pairs]
        turned[i] = a * math.cos(angle) - b * math.sin(angle)
        turned[i + pairs] = b * math.cos(angle) + a * math.sin(angle)
    return turned


def _experts(
    weights: Weights,
    prefix: str,
    x: list[Tensor],
    previous: list[Tensor] | None,
    balancing_bias: Tensor,
    config: ModelConfig,
    counts: list[int],
) -> tuple[list[Tensor], list[Tensor]]:
    router = f"{prefix}router."
    outputs, states = [], []
    for t, token in enumerate(x):
        state = weights[f"{router}down.weight"] @ token + weights[f"{router}down.bias"]
        if previous is not None:
            state = state + weights[f"{router}previous_scale"] * previous[t]
        states.append(state)
        y = _norm(state, weights[f"{router}norm.weight"], config.norm_eps)
        for linear in ("first", "second"):
            y = weights[f"{router}{linear}.weight"] @ y + weights[f"{router}{linear}.bias"]
            y = y * (1 + torch.erf(y / math.sqrt(2))) / 2
        shares = (weights[f"{router}output.weight"] @ y).softmax(0)
        order = sorted(range(config.router_classes), key=lambda c: -float(shares[c] + balancing_bias[c]))
        total = torch.zeros_like(token)
        for chosen in order[: config.experts_per_token]:
            counts[chosen] += 1
            total = total + shares[chosen] * _class_output(weights, prefix, token, chosen, config)
        outputs.append(total)
    return outputs, states


def _class_output(weights: Weights, prefix: str, token: Tensor, chosen: int, config: ModelConfig) -> Tensor:
    if chosen == config.experts:
        return token if config.skip_rule == "identity" else torch.zeros_like(token)
    inner = config.expert_hidden_size
    both = weights[f"{prefix}experts.gate_up.weight"][chosen] @ token
    gate, up = both[:inner], both[inner:]
    return weights[f"{prefix}experts.down.weight"][chosen] @ (gate * torch.sigmoid(gate) * up)
