"""Every matrix product of a microbatch on one rank, by name, with M, N, K: a list, without torch.

A product of forward makes [M, N] from [M, K] and [K, N]. Its backward has two of as many FLOPs:

    forward            M x N x K
    input gradient     M x K x N    the gradient of the left operand
    weight gradient    N x K x M    that of the right one
    recompute          M x N x K    forward again, in backward, of layers that are recomputed

For T tokens of width D, Q and J channels of queries and keys, P of a head, E experts of width F of which a token
has k, R of the router, C classes, V of the vocabulary:

    attention.projection    T x (Q + 2 J) x D         queries, keys and both halves of the values in one product
    attention.depthwise     T x 1 x width             for each channel; in one kernel with the next, and no matrix
    attention.grouped_conv  T x P x (P width)         for each head
    attention.scores        S x S x P                 for each query head and sequence, in one kernel with the
                                                      next;
    attention.values        S x P x S                 counted are the (S + 1) / 2 keys that a query may see
    attention.output        T x D x Q
    router.*                T x R x D, T x R x R twice, T x C x R; a linear router: T x C x D
    experts.gate_up         (T k / E) x 2 F x D       for each expert
    experts.down            (T k / E) x D x F
    head.logits             chunk x V x D             as many chunks of tokens as the head takes

Rows of an expert are the mean: no choice is taken to fall on the skip class. The sum over a microbatch, without
what is recomputed, is that of `train/telemetry/flops.py` for its tokens (to rounding; if ranks share a sequence
that is not a multiple of twice their number, padding comes on top).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from zslurm.train.config import ModelConfig, TrainConfig
from zslurm.train.context.layout import chunk_tokens
from zslurm.train.plan.activations import head_chunk
from zslurm.train.sections.phases import PhaseConfig

Pass = Literal["forward", "input gradient", "weight gradient", "recompute"]
Kind = Literal["dense", "grouped", "attention", "convolution"]


@dataclass(frozen=True)
class Matmul:
    """One product of a microbatch.

    Attributes:
        name: of the product in forward.
        kind: dense; grouped, one of each expert; of attention or of a convolution, which have other kernels.
        pass_name: the pass that it belongs to.
        m, n, k: its sizes; of experts the mean, rounded.
        batch: products that one call makes: of experts, heads, or heads and sequences.
        flops: of one call.
        calls: in a microbatch, all layers together.
    """

    name: str
    kind: Kind
    pass_name: Pass
    m: int
    n: int
    k: int
    batch: int
    flops: float
    calls: int

    @property
    def total_flops(self) -> float:
        """Return the FLOPs of all calls of a microbatch."""
        return self.flops * self.calls

    @property
    def is_gemm(self) -> bool:
        """Return whether a library for matrix products makes it, so that the rules for its sizes apply."""
        return self.kind in ("dense", "grouped")


@dataclass(frozen=True)
class MicrobatchShape:
    """The tokens of a microbatch on one rank.

    Attributes:
        sequences: in it, or the part of each that the rank has.
        local: tokens of each that the rank has.
        context: tokens of a whole sequence.
    """

    sequences: int
    local: int
    context: int

    @property
    def tokens(self) -> int:
        """Return how many there are on the rank."""
        return self.sequences * self.local

    @classmethod
    def of(cls, phase: PhaseConfig, most_sequences: int | None = None) -> MicrobatchShape:
        """Return the microbatch of a phase, with no more sequences than a rank has in a step."""
        sequences = min(phase.micro_batch, most_sequences or phase.micro_batch)
        ranks = phase.context_parallel
        local = phase.context if ranks == 1 else 2 * chunk_tokens(phase.context, ranks)
        return cls(sequences, local, phase.context)


def matmuls(config: TrainConfig, microbatch: MicrobatchShape, recomputed: int, *, on_cpu: bool) -> list[Matmul]:
    """Return the products of a microbatch; in `recomputed` layers forward is computed twice."""
    model = config.model
    products = []
    for product in (*_layer(model, microbatch), *_head(model, microbatch.tokens, on_cpu=on_cpu)):
        products += [
            product,
            replace(product, pass_name="input gradient", n=product.k, k=product.n),
            replace(product, pass_name="weight gradient", m=product.n, n=product.k, k=product.m),
        ]
        if recomputed and not product.name.startswith("head."):
            products.append(
                replace(product, pass_name="recompute", calls=recomputed * product.calls // model.layers)
            )
    return products


def _layer(model: ModelConfig, microbatch: MicrobatchShape) -> Iterator[Matmul]:
    """Return the products of forward that every layer has."""
    tokens, hidden, heads = microbatch.tokens, model.hidden_size, model.query_heads + model.kv_heads
    queries, keys = model.query_heads * model.head_dim, model.kv_heads * model.head_dim
    depthwise, grouped = model.conv_widths

    def product(name: str, kind: Kind, m: int, n: int, k: int, *, batch: int = 1, flops: float = 0.0) -> Matmul:
        return Matmul(name, kind, "forward", m, n, k, batch, flops or 2.0 * m * n * k * batch, model.layers)

    yield product("attention.projection", "dense", tokens, queries + 2 * keys, hidden)
    yield product("attention.depthwise", "convolution", tokens, 1, depthwise, batch=queries + keys)
    width = model.head_dim
    yield product("attention.grouped_conv", "convolution", tokens, width, width * grouped, batch=heads)
    local, context = microbatch.local, microbatch.context
    batch = microbatch.sequences * model.query_heads
    causal = 2.0 * tokens * queries * (context + 1) / 2
    yield product("attention.scores", "attention", local, context, width, batch=batch, flops=causal)
    yield product("attention.values", "attention", local, width, context, batch=batch, flops=causal)
    yield product("attention.output", "dense", tokens, hidden, queries)
    router, classes = model.router_hidden_size, model.router_classes
    if model.router == "linear":
        yield product("router.output", "dense", tokens, classes, hidden)
    else:
        yield product("router.down", "dense", tokens, router, hidden)
        yield product("router.first", "dense", tokens, router, router)
        yield product("router.second", "dense", tokens, router, router)
        yield product("router.output", "dense", tokens, classes, router)
    rows, inner, experts = tokens * model.experts_per_token, model.expert_hidden_size, model.experts
    expert_rows, flops = max(1, round(rows / experts)), 2.0 * rows * inner * hidden
    yield product("experts.gate_up", "grouped", expert_rows, 2 * inner, hidden, batch=experts, flops=2 * flops)
    yield product("experts.down", "grouped", expert_rows, hidden, inner, batch=experts, flops=flops)


def _head(model: ModelConfig, tokens: int, *, on_cpu: bool) -> Iterator[Matmul]:
    """Return the head's product of a chunk of tokens, and of a shorter last one."""
    chunk = head_chunk(model, tokens, on_cpu=on_cpu)
    vocabulary, hidden = model.vocab_size, model.hidden_size
    for name, rows, calls in (("head.logits", chunk, tokens // chunk), ("head.logits, last", tokens % chunk, 1)):
        if rows:
            flops = 2.0 * rows * vocabulary * hidden
            yield Matmul(name, "dense", "forward", rows, vocabulary, hidden, 1, flops, calls)
