"""Every tensor of the model, known without torch: name, shape, kind, and who may own what of it.

Parameter counts, packing over ranks, memory plans, checkpoint manifests and the mapping to other formats all
read this table; a test holds it equal, name by name and in order, to `Zaya.named_parameters()`. How ranks divide
the tensors is the optimizer's matter: `owned_table` is the same table with that in it.

The names are part of the checkpoint format and do not change. L is the layer, counted from 0:

    embedding.weight                        [vocab, hidden]        also the output head (tied)
    layers.L.attention_entry.*                                     joins the residual stream, see below
    layers.L.attention.temperature          [kv_heads]             linear scale of the normalised keys
    layers.L.attention.query.weight         [query_heads * head_dim, hidden]
    layers.L.attention.key.weight           [kv_heads * head_dim, hidden]
    layers.L.attention.value_current.weight [kv_heads * head_dim / 2, hidden]   from this token
    layers.L.attention.value_previous.weight  (same shape)                      from the token before
    layers.L.attention.depthwise_conv.*     [q and k channels, 1, width], bias
    layers.L.attention.grouped_conv.*       [q and k channels, head_dim, width], bias; one group per head
    layers.L.attention.output.weight        [hidden, query_heads * head_dim]
    layers.L.expert_entry.*                                        joins the residual stream, see below
    layers.L.router.previous_scale          [router_hidden]        of the layer before's state; not in layer 0
    layers.L.router.down.*                  [router_hidden, hidden], bias
    layers.L.router.norm.weight             [router_hidden]
    layers.L.router.first.*, second.*       [router_hidden, router_hidden], bias
    layers.L.router.output.weight           [classes, router_hidden]            the skip class is the last
                                              (of a linear router the only one: [classes, hidden])
    layers.L.experts.gate_up.weight         [experts, 2 * expert_hidden, hidden]  gate rows first, then up
    layers.L.experts.down.weight            [experts, hidden, expert_hidden]
    head_entry.*                                                   joins the residual stream, see below

An entry opens a stage with x = RMSNorm(residual), after
residual <- (hidden + hidden_bias) * hidden_scale + (residual + residual_bias) * residual_scale: four vectors
and `norm.weight`, all [hidden]. There is no residual before the first stage, so layers.0.attention_entry
lacks the two residual vectors.

The one buffer is `balancing_bias` [layers, classes], fp32 whatever the parameters' format.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from zslurm.train.config import ModelConfig, OptimConfig


class TensorKind(StrEnum):
    """What a tensor is; it decides the initial value, the optimizer and the weight decay."""

    EMBEDDING = "embedding"
    MATRIX = "matrix"  # [rows, columns]
    EXPERTS = "experts"  # [experts, rows, columns]: a batch of matrices
    CONVOLUTION = "convolution"  # [channels, channels per group, width]
    NORM = "norm"
    SCALE = "scale"
    BIAS = "bias"


_MATRICES = frozenset({TensorKind.MATRIX, TensorKind.EXPERTS})
_DECAYED = _MATRICES | {TensorKind.EMBEDDING, TensorKind.CONVOLUTION}
_GATE_UP = ".experts.gate_up.weight"


@dataclass(frozen=True)
class TensorInfo:
    """One parameter of the model.

    `whole` is the number of matrices, one after the other, that one rank each owns whole; 0: divided anywhere.
    """

    name: str
    shape: tuple[int, ...]
    kind: TensorKind
    whole: int = 0

    @property
    def numel(self) -> int:
        """Return the elements of the tensor."""
        return math.prod(self.shape)

    @property
    def decay(self) -> bool:
        """Return whether weight decay applies: to everything with two or more dimensions, not to vectors."""
        return self.kind in _DECAYED

    @property
    def matrices(self) -> tuple[int, int, int] | None:
        """(count, rows, columns) of the tensor's linear maps, for an optimizer of matrices; None if it has none.

        The embedding is a table of vectors, not a linear map, and the convolutions mix time with channels:
        neither counts.
        """
        if self.kind not in _MATRICES:
            return None
        rows, columns = self.shape[-2:]
        return math.prod(self.shape[:-2]), rows, columns


@dataclass(frozen=True)
class BufferInfo:
    """One fp32 buffer of the model: state that no gradient reaches."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of a model, in elements.

    `active` is what one token passes through, without the embedding; `matrices` is the part that
    `TensorInfo.matrices` names.
    """

    total: int
    without_embedding: int
    active: int
    matrices: int


def tensor_table(model: ModelConfig) -> tuple[TensorInfo, ...]:
    """Return every parameter, in the order of `Zaya.named_parameters()`."""
    return (
        TensorInfo("embedding.weight", (model.vocab_size, model.hidden_size), TensorKind.EMBEDDING),
        *(info for layer in range(model.layers) for info in _layer(model, layer)),
        *_entry("head_entry", model, first=False),
    )


def owned_table(model: ModelConfig, optim: OptimConfig) -> tuple[TensorInfo, ...]:
    """`tensor_table`, with what one rank owns whole: the matrices if Muon trains them, nothing if AdamW does.

    The experts of a tensor are a matrix each; with `muon.split_gate_up` the gate rows and the up rows of an expert
    are one each, for they follow one another.
    """
    table = tensor_table(model)
    if optim.matrices == "adamw":
        return table
    halved = _GATE_UP if optim.muon.split_gate_up else ()
    return tuple(
        replace(info, whole=info.matrices[0] * (2 if info.name.endswith(halved) else 1)) if info.matrices else info
        for info in table
    )


def buffer_table(model: ModelConfig) -> tuple[BufferInfo, ...]:
    """Return every buffer, in the order of `Zaya.named_buffers()`; all are fp32."""
    return (BufferInfo("balancing_bias", (model.layers, model.router_classes)),)


def parameter_counts(model: ModelConfig) -> ParameterCounts:
    """Count the parameters of a model (ZAYA1-base: 8.3 B without the embedding, 0.75 B of them active)."""
    table = tensor_table(model)
    total = sum(info.numel for info in table)
    embedding = sum(info.numel for info in table if info.kind is TensorKind.EMBEDDING)
    experts = sum(info.numel for info in table if info.kind is TensorKind.EXPERTS)
    used = min(model.experts_per_token, model.experts)
    return ParameterCounts(
        total=total,
        without_embedding=total - embedding,
        active=total - embedding - experts // model.experts * (model.experts - used),
        matrices=sum(info.numel for info in table if info.matrices is not None),
    )


def _layer(model: ModelConfig, layer: int) -> Iterator[TensorInfo]:
    prefix = f"layers.{layer}"
    yield from _entry(f"{prefix}.attention_entry", model, first=layer == 0)
    yield from _attention(f"{prefix}.attention", model)
    yield from _entry(f"{prefix}.expert_entry", model, first=False)
    yield from _router(f"{prefix}.router", model, first=layer == 0)
    yield from _experts(f"{prefix}.experts", model)


def _entry(prefix: str, model: ModelConfig, *, first: bool) -> Iterator[TensorInfo]:
    width = (model.hidden_size,)
    for stream in ("hidden",) if first else ("hidden", "residual"):
        yield TensorInfo(f"{prefix}.{stream}_scale", width, TensorKind.SCALE)
        yield TensorInfo(f"{prefix}.{stream}_bias", width, TensorKind.BIAS)
    yield TensorInfo(f"{prefix}.norm.weight", width, TensorKind.NORM)


def _attention(prefix: str, model: ModelConfig) -> Iterator[TensorInfo]:
    hidden = model.hidden_size
    queries, keys = model.query_heads * model.head_dim, model.kv_heads * model.head_dim
    depthwise, grouped = model.conv_widths
    channels = queries + keys
    yield TensorInfo(f"{prefix}.temperature", (model.kv_heads,), TensorKind.SCALE)
    yield TensorInfo(f"{prefix}.query.weight", (queries, hidden), TensorKind.MATRIX)
    yield TensorInfo(f"{prefix}.key.weight", (keys, hidden), TensorKind.MATRIX)
    yield TensorInfo(f"{prefix}.value_current.weight", (keys // 2, hidden), TensorKind.MATRIX)
    yield TensorInfo(f"{prefix}.value_previous.weight", (keys // 2, hidden), TensorKind.MATRIX)
    yield TensorInfo(f"{prefix}.depthwise_conv.weight", (channels, 1, depthwise), TensorKind.CONVOLUTION)
    yield TensorInfo(f"{prefix}.depthwise_conv.bias", (channels,), TensorKind.BIAS)
    yield TensorInfo(f"{prefix}.grouped_conv.weight", (channels, model.head_dim, grouped), TensorKind.CONVOLUTION)
    yield TensorInfo(f"{prefix}.grouped_conv.bias", (channels,), TensorKind.BIAS)
    yield TensorInfo(f"{prefix}.output.weight", (hidden, queries), TensorKind.MATRIX)


def _router(prefix: str, model: ModelConfig, *, first: bool) -> Iterator[TensorInfo]:
    if model.router == "linear":
        yield TensorInfo(f"{prefix}.output.weight", (model.router_classes, model.hidden_size), TensorKind.MATRIX)
        return
    width = model.router_hidden_size
    if not first:
        yield TensorInfo(f"{prefix}.previous_scale", (width,), TensorKind.SCALE)
    yield TensorInfo(f"{prefix}.down.weight", (width, model.hidden_size), TensorKind.MATRIX)
    yield TensorInfo(f"{prefix}.down.bias", (width,), TensorKind.BIAS)
    yield TensorInfo(f"{prefix}.norm.weight", (width,), TensorKind.NORM)
    for linear in ("first", "second"):
        yield TensorInfo(f"{prefix}.{linear}.weight", (width, width), TensorKind.MATRIX)
        yield TensorInfo(f"{prefix}.{linear}.bias", (width,), TensorKind.BIAS)
    yield TensorInfo(f"{prefix}.output.weight", (model.router_classes, width), TensorKind.MATRIX)


def _experts(prefix: str, model: ModelConfig) -> Iterator[TensorInfo]:
    experts, inner, hidden = model.experts, model.expert_hidden_size, model.hidden_size
    yield TensorInfo(f"{prefix}.gate_up.weight", (experts, 2 * inner, hidden), TensorKind.EXPERTS)
    yield TensorInfo(f"{prefix}.down.weight", (experts, hidden, inner), TensorKind.EXPERTS)
