"""Predict what the parts of a microbatch take on gfx942, from stated rates: nothing was measured.

The rates are what the compiled code of each kernel lets expect (instructions, LDS, registers), and what others
measured of memory and of the libraries; each is good to a quarter. A product that `zslurm bench gemm` measured has
its measured rate. Bytes are counted. `REFERENCE` has the rates of the kernels whose code objects were read first,
for which an independent estimate of every part exists; `NOW` those of the kernels as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from zslurm.train.config import ModelConfig, TrainConfig
from zslurm.train.parallel.memory import ITEMSIZE
from zslurm.train.plan.activations import head_chunk
from zslurm.train.plan.matmuls import Matmul, MicrobatchShape
from zslurm.train.plan.rates import Rates
from zslurm.train.shapes import parameter_counts, tensor_table

_TERA, _GIGA = 1e12, 1e9
_LOOSE_S = 0.010
"""Gaps between kernels in a microbatch of 40 layers."""
_OPTIMIZER_S = 0.005
"""Optimizer and norm on the share of one of 1,024 ranks."""

Limit = Literal["matrix units", "LDS", "memory", "launches"]


@dataclass(frozen=True)
class StatedRates:
    """Rates of an MI300X: TFLOPS of products, shares of the memory's rate, and bytes that kernels move.

    Attributes:
        library: TFLOPS of the library's large products, the head's.
        projections: TFLOPS of its smaller ones.
        router: of the router's.
        experts_forward, experts_backward: of grouped products.
        attention_forward, attention_backward: of attention, counted without its mask.
        head_bytes: bytes that are moved for each logit besides the products'.
        convolutions_forward, convolutions_backward: share of the memory's rate that qk_conv reaches.
        sums_bytes: bytes that are moved for each parameter of the experts when its gradient is summed.
    """

    library: float
    projections: float
    router: float
    experts_forward: float
    experts_backward: float
    attention_forward: float
    attention_backward: float
    head_bytes: float
    convolutions_forward: float
    convolutions_backward: float
    sums_bytes: float


REFERENCE = StatedRates(
    library=475,
    projections=420,
    router=118,
    experts_forward=330,
    experts_backward=300,
    attention_forward=323,
    attention_backward=160,
    head_bytes=38,
    convolutions_forward=0.5,
    convolutions_backward=0.22,
    sums_bytes=6,
)
NOW = replace(
    REFERENCE,
    experts_forward=575,  # 40 to 48 % of 1,307, by 43 FLOPs a byte of LDS
    experts_backward=490,  # 38 to 45 % for weights; a little less for rows, whose tiles are 128 x 256
    head_bytes=10,  # logits read twice in fp32, and their gradient written in bf16
    convolutions_backward=0.5,
    sums_bytes=0,  # added where the product is made
)


@dataclass(frozen=True)
class PartOfMicrobatch:
    """A part, its seconds, what limits it, and whether a rate of it was measured."""

    name: str
    seconds: float
    limit: Limit
    measured: bool


@dataclass(frozen=True)
class Gain:
    """What a change would save of a microbatch."""

    what: str
    seconds: float


def parts_of_microbatch(
    config: TrainConfig,
    microbatch: MicrobatchShape,
    products: Sequence[Matmul],
    rates: Rates,
    *,
    stated: StatedRates = NOW,
    chunk: int | None = None,
) -> list[PartOfMicrobatch]:
    """Return the parts of a microbatch, forward and backward, in the order of the layers.

    Args:
        config: of the run, in bf16.
        microbatch: of a rank.
        products: of the microbatch.
        rates: what was measured, if anything.
        stated: rates of what was not.
        chunk: tokens whose logits exist at one time; None: the head's own number.
    """
    model, tokens = config.model, microbatch.tokens
    memory = (rates.memory_gb_s or 0) * _GIGA
    chunk = chunk or head_chunk(model, tokens, on_cpu=False)

    def made(name: str, forward: float, backward: float, selects: Callable[[Matmul], bool]) -> PartOfMicrobatch:
        seconds, measured = 0.0, False
        for product in filter(selects, products):
            rate = rates.of(product) if rates.table else None
            is_measured = rate is not None and rate.origin in ("measured", "near")
            of_pass = forward if product.pass_name in ("forward", "recompute") else backward
            tflops = rate.tflops if rate is not None and is_measured else of_pass
            measured |= is_measured
            seconds += product.total_flops / (tflops * _TERA)
        return PartOfMicrobatch(name, seconds, "matrix units", measured)

    def moved(name: str, count: float) -> PartOfMicrobatch:
        return PartOfMicrobatch(name, count / memory, "memory", measured=False)

    head = made("head: products", stated.library, stated.library, lambda p: p.name.startswith("head."))
    logits = tokens * model.vocab_size * stated.head_bytes
    adds = (-(-tokens // chunk) - 1) * model.vocab_size * model.hidden_size * 16
    experts = made(
        "experts: products", stated.experts_forward, stated.experts_backward, lambda p: p.kind == "grouped"
    )
    attention = made(
        "attention", stated.attention_forward, stated.attention_backward, lambda p: p.kind == "attention"
    )
    names = ("attention.projection", "attention.output")
    projections = made("projections", stated.projections, stated.projections, lambda p: p.name in names)
    router = made("router", stated.router, stated.router, lambda p: p.name.startswith("router."))
    return [
        projections,
        moved("convolutions", _convolution_bytes(model, tokens, stated)),
        attention,
        router,
        replace(experts, limit="LDS"),
        moved("element by element", _elementwise_bytes(model, tokens)),
        head,
        moved("head: losses and gradient of logits", logits),
        moved("head: sums of its chunks", adds),
        moved("sums of gradients", _sums_bytes(config, stated)),
        PartOfMicrobatch("optimizer and norm, of 1,024 ranks", _OPTIMIZER_S, "memory", measured=False),
        PartOfMicrobatch("gaps between kernels", _LOOSE_S * model.layers / 40, "launches", measured=False),
    ]


def largest_gains(
    config: TrainConfig, microbatch: MicrobatchShape, products: Sequence[Matmul], rates: Rates, chunk: int | None
) -> list[Gain]:
    """Return what would save most of a microbatch by the same model, the most first."""

    def seconds(stated: StatedRates, tokens: int | None = chunk) -> float:
        parts = parts_of_microbatch(config, microbatch, products, rates, stated=stated, chunk=tokens)
        return sum(part.seconds for part in parts)

    now, whole = seconds(NOW), microbatch.tokens
    changes = {
        "attention by AITER, if it is installed": replace(NOW, attention_forward=500, attention_backward=300),
        "tuned products of head and projections (zslurm bench tuning)": replace(NOW, library=550, projections=550),
        "experts and projections in FP8, which zslurm does not have": replace(
            NOW, experts_forward=850, experts_backward=720, projections=700
        ),
    }
    gains = [Gain(what, now - seconds(stated)) for what, stated in changes.items()]
    gains.append(Gain("the head in one chunk, if memory allowed it", now - seconds(NOW, whole)))
    return sorted(gains, key=lambda gain: -gain.seconds)


def _convolution_bytes(model: ModelConfig, tokens: int, stated: StatedRates) -> float:
    """Return bytes of qk_conv as if all were moved at the memory's rate."""
    channels = (model.query_heads + model.kv_heads) * model.head_dim
    # Forward reads z, writes queries, keys and the mixed form in fp32; backward reads and writes as many.
    return (
        model.layers
        * tokens
        * channels
        * 10
        * (1 / stated.convolutions_forward + 1 / stated.convolutions_backward)
    )


def _elementwise_bytes(model: ModelConfig, tokens: int) -> float:
    """Return bytes of norms, rows that move to experts and back, and activations."""
    entries = 2 * (12 + 18) * model.hidden_size
    rows = model.experts_per_token * (24 * model.hidden_size + 18 * model.expert_hidden_size)
    return float(model.layers * tokens * (entries + rows))


def _sums_bytes(config: TrainConfig, stated: StatedRates) -> float:
    """Return bytes of the first microbatch's gradients on their way into the sums."""
    model = config.model
    experts = sum(row.numel for row in tensor_table(model) if ".experts." in row.name)
    embedding = model.vocab_size * model.hidden_size
    others = parameter_counts(model).total - experts - embedding
    into = ITEMSIZE[config.parallel.dtype] + ITEMSIZE[config.parallel.gradient_dtype]
    return experts * stated.sums_bytes + others * into + embedding * 8
