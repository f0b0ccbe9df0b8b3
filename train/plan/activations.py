"""Bytes of one microbatch's tensors: what autograd keeps from forward to backward, and the peaks around it.

Counted are live tensors, storage by storage, as the eager model leaves them on one rank; what an allocator adds
by rounding and fragmentation is not. Names: T = B S tokens of width D; b and w are the bytes of an element in the
weights' format and in that of the fp32 islands (docs/model.md). A layer keeps, per token,

    residual stream   4 b D + 2 w D        each stage's two ends, and the stream after each entry
    attention         b (2 Q + 2 V + O) + w Q   projections, mixed and final q and k (Q channels), values, output
    router            6 b R + w R + ...    every stage of its MLP
    experts           2 b (D + F) for each expert of the token, on GPUs 2 b F

and besides the joined projection and convolution kernel (weights, once). In short sequences on a CPU attention's
probabilities are kept as well: S (S + block) / 2 per query head and sequence. With `context_parallel` c, T is 2 B
ceil(S / 2c): keys and values of other ranks are not kept, nor probabilities, and attention keeps its output twice.

The peak of a microbatch is one of these moments:

    head         all layers, and softmax, logits and embedding gradient of the head (forward; its backward
                 scales that gradient in place)
    last layer   all layers, the embedding's gradient, and the experts' backward, with the gradients of all experts
                 of a layer
    attention    if ranks share sequences: all layers but the last one's experts, the keys and values of a part
                 of the sequence (of all of it, with all-gather), and their gradients

Of layers that are recomputed, the first ones, only the inputs are kept. If all are, the last layer is whole
again in its backward; else the layers behind them are freed by then, and what is recomputed takes no more.

A compiled layer keeps what its compiler chooses: usually less; for it these figures are an upper estimate. Without
a mask, attention on a GPU is taken to be a flash kernel, also for documents kept apart, which such kernels take by
their bounds. In fp32 and with `parallel.attention: sdpa` there is a mask, with keys and values repeated for every
query head.

On CPUs oneDNN's products in bf16 take scratch memory, which depends on the processor. Counted is the most that one
takes, the whole result again in fp32: AVX-512 without bf16 units (Intel's Skylake and Cascade Lake). With such
units it is a block of the result for each thread, without AVX-512 nothing. Products in fp32 and fp64 take none.

Verified on CPUs only, under each of these kinds of processors (tests/train/plan/test_memory.py): what layers keep
to 0.2 %, peaks in fp64 to 1 %, in bf16 and fp32 to 6 % if a processor takes what is counted, else not below.
"""

from __future__ import annotations

from dataclasses import dataclass

from zslurm.train.config import ModelConfig, TrainConfig
from zslurm.train.context.layout import check_chunks, chunk_tokens, reach
from zslurm.train.parallel.memory import ITEMSIZE
from zslurm.train.plan.communication import context_attention
from zslurm.train.sections.phases import PhaseConfig

# What train/model does: attention_backends/sdpa.py, head.py.
LONGEST_IN_BLOCKS = 1024
ATTENTION_BLOCK = 64
LOGITS_ON_CPU = 1 << 21
LOGITS_ELSEWHERE = 1 << 28
PART_OF_LOGITS_ON_CPU = 1 << 19
FEWEST_TOKENS = 64
PIECE_OF_GRADIENT = 1 << 26  # kernels/head

SCORES_ON_CPU, SCORES_ON_GPU = 1 << 21, 1 << 27  # train/context/blocks.py, with the rows of a block
_MOST_ROWS, _MOST_ROWS_ON_GPU = 64, 1024
_FEWEST_ROWS = 16

_INDEX = 8  # bytes of an int64
_FP32 = 4
_16_BITS = 2


@dataclass(frozen=True)
class MicrobatchMemory:
    """Bytes of a microbatch, not counting what lives longer than it."""

    layers: int  # kept of all layers between forward and backward
    head: int  # at the peak of the head's forward pass, `layers` included
    last_layer: int  # at the peak of the last layer's backward pass, likewise
    logits: int  # of one part of the head's chunk, with the softmax of the chunk; in `head`
    attention: int = (
        0  # at the peak of the last layer's attention, where ranks share sequences; else less than that
    )

    @property
    def peak(self) -> int:
        """Return the largest of the moments."""
        return max(self.head, self.last_layer, self.attention)


@dataclass(frozen=True)
class Sizes:
    """The sizes that all formulas share."""

    model: ModelConfig
    sequences: int
    context: int
    narrow: int
    masked: bool
    on_cpu: bool
    ranks: int = 1  # that share each sequence; `context` tokens of it are this rank's, in two chunks
    ring: bool = False  # how they exchange keys and values
    labelled: bool = False  # whether they keep documents apart, which no flash kernel of theirs does

    @property
    def tokens(self) -> int:
        """Of a microbatch."""
        return self.sequences * self.context

    @property
    def shared(self) -> bool:
        """Return whether ranks share sequences."""
        return self.ranks > 1

    @property
    def wide(self) -> int:
        """Bytes of an element of what is computed in fp32 at least."""
        return max(_FP32, self.narrow)

    @property
    def converts(self) -> bool:
        """Return whether a value in at least fp32 is a copy."""
        return self.narrow < self.wide

    def sums(self, elements: int) -> int:
        """Return the bytes that a product of `elements` takes in addition to its result while it is made."""
        return product_sums(elements, self.narrow) if self.on_cpu else 0

    @property
    def stream(self) -> int:
        """Return the bytes of one tensor [T, D] in the weights' format."""
        return self.tokens * self.model.hidden_size * self.narrow

    @property
    def wide_stream(self) -> int:
        """Return the bytes of one tensor [T, D] in at least fp32."""
        return self.tokens * self.model.hidden_size * self.wide

    @property
    def rows(self) -> int:
        """Rows that the experts get."""
        return self.tokens * self.model.experts_per_token

    @property
    def table(self) -> int:
        """Return the elements of the embedding."""
        return self.model.vocab_size * self.model.hidden_size


def product_sums(elements: int, itemsize: int) -> int:
    """Return the most bytes that a CPU's product takes besides its result, whose elements have `itemsize` bytes.

    Below fp32, processors with AVX-512 and without bf16 units sum the whole result in fp32.
    """
    return elements * _FP32 if itemsize < _FP32 else 0


def microbatch_memory(config: TrainConfig, phase: PhaseConfig, *, on_cpu: bool) -> MicrobatchMemory:
    """Return the bytes of forward and backward of a microbatch of `phase`, with the kernels of CPUs or GPUs."""
    model, narrow = config.model, ITEMSIZE[config.parallel.dtype]
    local, ranks, ring = phase.context, phase.context_parallel, False
    if ranks > 1:
        check_chunks(model, phase.context, ranks)
        local, ring = 2 * chunk_tokens(phase.context, ranks), context_attention(config, phase) == "ring"
    isolated = config.data.isolates(phase)
    by_bounds = not on_cpu and narrow == _16_BITS and config.parallel.attention != "sdpa"
    masked = isolated and ranks == 1 and not by_bounds  # ranks that share sequences have labels instead
    labelled = isolated and ranks > 1
    sizes = Sizes(model, phase.micro_batch, local, narrow, masked, on_cpu, ranks, ring, labelled)
    layer = _layer(sizes)
    again, recomputed = 0, recomputed_layers(config)
    layers = (model.layers - recomputed) * layer
    into_head = 2 * sizes.stream + sizes.wide_stream  # the last hidden state, x, and the stream
    if recomputed:
        # What a router hands to the next.
        state = sizes.tokens * model.router_hidden_size * narrow if model.router == "mlp" else 0
        inputs = sizes.stream + sizes.wide_stream + state
        layers += recomputed * inputs - (inputs - sizes.stream)  # the first layer has the embedding only
        # The stream and the state behind them, which the last of these layers would have kept.
        if recomputed == model.layers:
            again = layer - sizes.stream  # its input is kept already
            into_head += sizes.wide_stream
        else:
            layers += sizes.wide_stream + state
    if sizes.masked:
        layers += sizes.tokens * sizes.context  # the mask of a forward pass, a byte for each pair of tokens
    return MicrobatchMemory(
        layers=layers,
        head=layers + into_head + _head(sizes),
        last_layer=layers + again + _experts_backward(sizes) + sizes.table * narrow,
        attention=layers + again - _after_attention(sizes) + _attention_backward(sizes) if sizes.shared else 0,
        logits=_logits(sizes),
    )


def recomputed_layers(config: TrainConfig) -> int:
    """Return how many layers, the first ones, are recomputed.

    Raises:
        ValueError: that is to be chosen, see `memory.with_least_recompute`.
    """
    asked = config.parallel.recompute
    if asked == "auto":
        raise ValueError("parallel.recompute: auto stands for a number of layers that is not chosen yet")
    return config.model.layers if asked is True else int(asked)


def _layer(sizes: Sizes) -> int:
    """Kept of one layer, without what came into it but for the hidden state."""
    entries = 2 * (2 * sizes.stream + sizes.wide_stream + sizes.tokens * sizes.wide)
    return entries + _projections(sizes) + _attention(sizes) + _router(sizes) + expert_bytes(sizes)


def _projections(sizes: Sizes) -> int:
    """Return the joined projection and its result, the joined kernel, and the mixed queries and keys."""
    model, narrow, wide = sizes.model, sizes.narrow, sizes.wide
    heads = model.query_heads + model.kv_heads
    channels, values = heads * model.head_dim, model.kv_heads * model.head_dim
    square = heads * model.head_dim**2
    earlier, later = model.conv_widths
    # The kernel, and the grouped convolution's weights in at least fp32: transposed, and summed over its taps.
    kernel = square * ((earlier + later - 1) * narrow + (later + 1) * wide)
    if sizes.converts:
        kernel += channels * (earlier + 1) * wide  # the depthwise convolution's weights and biases in fp32
    joined = (channels + values) * model.hidden_size * narrow + kernel
    if sizes.shared:
        # What is mixed is a copy: of queries and keys alone, with the tokens before each of two chunks.
        mixed = sizes.tokens + sizes.sequences * 2 * reach(model)
        return joined + mixed * (channels * narrow + channels * wide + heads * wide)
    return joined + sizes.tokens * ((channels + values) * narrow + channels * wide + heads * wide)


def _attention(sizes: Sizes) -> int:
    """Return queries, keys and values as attention gets them, what it keeps, and its output."""
    model, narrow = sizes.model, sizes.narrow
    queries, keys = model.query_heads * model.head_dim, model.kv_heads * model.head_dim
    inputs_and_output = sizes.tokens * (2 * queries + 2 * keys) * narrow
    if sizes.shared:  # the output twice, in both orders of heads and tokens
        return inputs_and_output + sizes.tokens * (queries * narrow + model.query_heads * sizes.wide)
    if sizes.on_cpu and sizes.context <= LONGEST_IN_BLOCKS and not sizes.masked:
        # One sequence's keys are a view of queries and keys together, whose blocks of queries are copies.
        twice = sizes.sequences == 1 and sizes.context > ATTENTION_BLOCK
        return inputs_and_output + (sizes.tokens * queries * narrow if twice else 0) + _probabilities(sizes)
    sums = sizes.tokens * model.query_heads * _FP32
    if sizes.on_cpu:
        mask = sizes.tokens * sizes.context * narrow if sizes.masked else 0
        return inputs_and_output + sizes.tokens * queries * narrow + sums + mask
    if sizes.masked:  # what is added to the scores, and repeated keys and values
        return inputs_and_output + sums + sizes.tokens * (sizes.context + 2 * queries) * narrow
    return inputs_and_output + sums


def _after_attention(sizes: Sizes) -> int:
    """Kept of the last layer for what comes after attention: gone when the backward pass is there."""
    entry = 2 * sizes.stream + sizes.wide_stream + sizes.tokens * sizes.wide
    return entry + _router(sizes) + expert_bytes(sizes)


def _attention_backward(sizes: Sizes) -> int:
    """Return what attention over shared sequences takes in its backward pass, at the largest part of the keys."""
    model, narrow, wide = sizes.model, sizes.narrow, sizes.wide
    queries, both = model.query_heads * model.head_dim, 2 * model.kv_heads * model.head_dim
    gradients = sizes.wide_stream + 2 * sizes.stream + sizes.tokens * queries * (narrow + wide)
    if sizes.ring:  # this step's keys and the next one's, and the gradients of two ranks' on their way
        elements = sizes.tokens
        exchange = 2 * sizes.tokens * both * (narrow + wide)
    else:  # all of them, and of the first rank's late queries all other ranks' keys side by side
        elements = (sizes.ranks - 1) * sizes.tokens
        exchange = (sizes.ranks * (narrow + wide) * sizes.tokens + elements * narrow) * both
    in_16_bits = narrow < _FP32
    if not sizes.on_cpu and in_16_bits and not sizes.labelled:
        # A flash kernel: gradients in the same format, converted to be summed.
        return gradients + exchange + elements * both * (narrow + wide)
    length = elements // sizes.sequences
    heads = sizes.sequences * model.query_heads
    most, at_once = (_MOST_ROWS, SCORES_ON_CPU) if sizes.on_cpu else (_MOST_ROWS_ON_GPU, SCORES_ON_GPU)
    rows = max(_FEWEST_ROWS, min(most, at_once // (heads * length)))
    scores = heads * min(rows, sizes.context // 2) * length
    return gradients + exchange + elements * both * 2 * wide + 3 * scores * wide


def _probabilities(sizes: Sizes) -> int:
    """Return the probabilities of every block of queries, for the keys up to the block's end."""
    starts = range(0, sizes.context, ATTENTION_BLOCK)
    ends = [min(start + ATTENTION_BLOCK, sizes.context) for start in starts]
    pairs = sum((end - start) * end for start, end in zip(starts, ends, strict=True))
    return sizes.sequences * sizes.model.query_heads * pairs * sizes.narrow


def _router(sizes: Sizes) -> int:
    """Return the router's state and MLP, probabilities, and choices."""
    model, narrow, wide = sizes.model, sizes.narrow, sizes.wide
    weights = narrow if sizes.on_cpu else wide  # CPUs keep them rounded
    choices = model.router_classes * wide + model.experts_per_token * (_INDEX + weights)
    if model.router == "linear":
        return sizes.tokens * choices
    norm = model.router_hidden_size * wide * (2 if sizes.converts else 1) + wide
    return sizes.tokens * (6 * model.router_hidden_size * narrow + norm + choices)


def expert_bytes(sizes: Sizes) -> int:
    """Rows sorted by expert, their first product, their results in order again, and both orders.

    GPUs gather the rows again in backward, from the tokens, and need no results.
    """
    width = 2 * (sizes.on_cpu * sizes.model.hidden_size + sizes.model.expert_hidden_size)
    return sizes.rows * (width * sizes.narrow + 2 * _INDEX)


def _experts_backward(sizes: Sizes) -> int:
    """Return the experts' backward pass at its end: inner and outer gradients, and those of one layer's experts.

    The last of them are those of the first matrices, whose sums are freed before the rows' gradient is made. What
    other products of one expert take on a CPU besides their results depends on its load, and is not counted.
    """
    model = sizes.model
    if not sizes.on_cpu:
        return sizes.wide_stream + sizes.stream + _steps_backward(sizes)
    freed = sizes.rows * model.hidden_size * sizes.narrow  # the results were needed for the weights' gradient
    rows = sizes.rows * (model.hidden_size + 4 * model.expert_hidden_size) * sizes.narrow
    weights = 3 * model.experts * model.expert_hidden_size * model.hidden_size * sizes.narrow
    sums = sizes.sums(2 * model.expert_hidden_size * model.hidden_size)
    last = max(sums, sizes.rows * model.hidden_size * sizes.narrow)
    return sizes.wide_stream + rows + weights - freed + last


def _steps_backward(sizes: Sizes) -> int:
    """Return the most that a step on a GPU takes besides the incoming gradient: the activation's, or the last."""
    model = sizes.model
    outer, inner = (sizes.rows * width * sizes.narrow for width in (model.hidden_size, model.expert_hidden_size))
    matrix = model.experts * model.expert_hidden_size * model.hidden_size * sizes.narrow
    return max(outer + 4 * inner, outer + 3 * inner + matrix, outer + 2 * inner + 3 * matrix + sizes.stream)


def _head(sizes: Sizes) -> int:
    """In a chunk of the head: counted inputs, both gradients so far, the chunk's softmax, and the most on top."""
    model, narrow, wide = sizes.model, sizes.narrow, sizes.wide
    chunk = _chunk(sizes)
    softmax = chunk * model.vocab_size
    kept = 2 * sizes.stream + sizes.table * wide + softmax * wide
    logits = _part(sizes) * model.vocab_size * wide
    if not sizes.converts:
        return kept + logits
    if not sizes.on_cpu:
        # 16-bit operands are multiplied as they are: there is no embedding in fp32, and no product of its size
        # in addition to the gradient's sum, to which pieces are added. The gradient takes the place of the logits.
        return kept + (min(sizes.table, PIECE_OF_GRADIENT) * wide if sizes.tokens > chunk else 0)
    # The embedding in fp32, and the largest of what comes on top: the chunk's input in fp32 with logits, or the
    # logits' gradient rounded, and its product with the input. In the second chunk there is still the rounded
    # gradient of the first, and CPUs convert the product to add it.
    second = min(chunk, sizes.tokens - chunk) * model.vocab_size * narrow
    rounded = softmax * narrow
    product = sizes.table * narrow
    inputs = chunk * model.hidden_size * wide
    sums = max(product + sizes.sums(sizes.table), sizes.sums(chunk * model.hidden_size))
    on_top = [inputs + logits + (rounded if second else 0), rounded + max(sums, second)]
    if second:
        on_top.append(second + max(sums, product + sizes.table * wide))
    return kept + sizes.table * wide + max(on_top)


def _logits(sizes: Sizes) -> int:
    """Return the bytes of logits and softmax at one time, which are one matrix on GPUs with 16-bit weights."""
    in_place = sizes.converts and not sizes.on_cpu
    tokens = _chunk(sizes) + (0 if in_place else _part(sizes))
    return tokens * sizes.model.vocab_size * sizes.wide


def _chunk(sizes: Sizes) -> int:
    return head_chunk(sizes.model, sizes.tokens, on_cpu=sizes.on_cpu)


def head_chunk(model: ModelConfig, tokens: int, *, on_cpu: bool) -> int:
    """Return how many of the tokens of a microbatch have their softmax in memory at one time."""
    logits = LOGITS_ON_CPU if on_cpu else LOGITS_ELSEWHERE
    return min(tokens, max(1, round(logits / model.vocab_size / FEWEST_TOKENS)) * FEWEST_TOKENS)


def _part(sizes: Sizes) -> int:
    """Return the tokens whose logits exist at one time."""
    if not sizes.on_cpu:
        return _chunk(sizes)
    return min(_chunk(sizes), max(FEWEST_TOKENS, PART_OF_LOGITS_ON_CPU // sizes.model.vocab_size))
