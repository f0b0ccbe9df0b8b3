"""Bytes that context parallelism sends, by formula. Nothing here needs torch.

Of one layer and one microbatch of B sequences of S tokens over c ranks, a rank sends, with chunks of
C = ceil(S / 2c) tokens, J key heads of P channels, b bytes for an element and w = max(4, b):

    forward     attention   (c - 1) 2 B J P 2C b         keys and values of its two chunks
                halos       t B (W Q + V / 2) b          of a chunk's end, W = sum(conv_widths) - 2 tokens of the
                                                         Q channels before the convolutions, and one token's
                                                         delayed values, half of V = J P channels
    backward    attention   (c - 1) 2 B J P 2C (b + w)   keys and values again, and their gradients in fp32
                halos       as forward

where t, the chunk ends that go to another rank, is 2, but 1 on the first and the last rank (of two ranks: both).
Ring and all-gather attention send the same: the ring sends each block on c - 1 times, and an all-gather or
reduce-scatter of n bytes takes n (c - 1) / c on every rank, n being the bytes of the whole sequences. What
differs is how many links they use. With `recompute`, backward repeats the forward's part.

Query heads are many and key heads few, so what is sent is small: compared with multi-head attention of the model's
full width D, whose keys and values have 2 D channels, it is D / (J P) times less (8 for ZAYA1-8B).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zslurm.train.config import ModelConfig
from zslurm.train.context.layout import check_chunks, chunk_tokens, reach

Attention = Literal["ring", "all_gather"]
"""How keys and values reach the other ranks."""


@dataclass(frozen=True)
class ContextBytes:
    """Bytes that one rank sends for a layer and microbatch: the rank that sends most.

    Attributes:
        attention_forward: keys and values.
        attention_backward: keys and values again, and their gradients.
        halos_forward: ends of chunks.
        halos_backward: their gradients.
        attention_steps: messages of a rank one after the other, in forward: of the ring; 1 for a collective.
        compression: times that multi-head attention of full width would send in attention's place.
    """

    attention_forward: int
    attention_backward: int
    halos_forward: int
    halos_backward: int
    attention_steps: int
    compression: float

    @property
    def forward(self) -> int:
        """Return all bytes of the forward pass."""
        return self.attention_forward + self.halos_forward

    @property
    def backward(self) -> int:
        """Return all bytes of the backward pass, without what `recompute` repeats."""
        return self.attention_backward + self.halos_backward


def context_bytes(
    model: ModelConfig,
    context: int,
    micro_batch: int,
    context_parallel: int,
    attention: Attention,
    itemsize: int,
) -> ContextBytes:
    """Return what a rank sends for one layer of one microbatch.

    Args:
        model: the model.
        context: tokens of a sequence.
        micro_batch: sequences of a microbatch, each shared by all ranks of the group.
        context_parallel: ranks of the group.
        attention: how keys and values are sent.
        itemsize: bytes of an element of the weights and activations.

    Raises:
        ConfigError: such sequences cannot be divided over that number of ranks.
    """
    check_chunks(model, context, context_parallel)
    others = context_parallel - 1
    values = model.kv_heads * model.head_dim
    channels = (model.query_heads + model.kv_heads) * model.head_dim
    local = 2 * micro_batch * values * 2 * chunk_tokens(context, context_parallel)
    halos = min(2, others) * micro_batch * (reach(model) * channels + values // 2) * itemsize
    return ContextBytes(
        attention_forward=others * local * itemsize,
        attention_backward=others * local * (itemsize + max(4, itemsize)),
        halos_forward=halos,
        halos_backward=halos,
        attention_steps=others if attention == "ring" else min(1, others),
        compression=model.hidden_size / values,
    )


AUTO_GATHERED_BYTES = 1 << 30


def choose_attention(
    model: ModelConfig, context: int, micro_batch: int, context_parallel: int, itemsize: int
) -> Attention:
    """Return what `parallel.context_attention: auto` takes: all-gather, unless it would take much memory.

    An all-gather uses all links of a node at once, and a ring's step uses one (xGMI: 448 and 64 GB/s for eight
    GPUs), and its products are larger. But it holds the whole sequences' keys and values in one layer, and in
    backward their gradients, if the ring holds two ranks' share. Beyond `AUTO_GATHERED_BYTES` it is the ring.
    """
    return auto_attention(
        micro_batch * model.kv_heads * model.head_dim * 2 * chunk_tokens(context, context_parallel),
        context_parallel,
        itemsize,
    )


def auto_attention(local_elements: int, ranks: int, itemsize: int) -> Attention:
    """As `choose_attention`, for ranks whose keys (and as many values) have `local_elements`."""
    gathered = 2 * local_elements * ranks * (itemsize + max(4, itemsize))
    return "ring" if ranks > 1 and gathered > AUTO_GATHERED_BYTES else "all_gather"
