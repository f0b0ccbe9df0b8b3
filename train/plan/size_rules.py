"""Rules for the sizes of a model and of its microbatches on GPUs, with reasons and the nearest better values.

The rules are from arXiv 2511.17127 for MI300X; that paper does not set the bound on K. They are advice: a
run that breaks one trains correctly, and more slowly. Large are the experts' products, and those with LARGE_SHARE
of the FLOPs of a microbatch.

    vocabulary            model.vocab_size is a multiple of 64
    hidden_size, head_dim, expert_hidden_size    the same: whole tiles, and whole cache lines (128 bytes
                          in bf16), because decoding reads an expert's rows for a few tokens
    tokens, expert_rows   so are the tokens of a microbatch, and the mean rows of an expert
    small_product         large products have at least 200 GFLOP a call
    small_k               and sum at least 1,024 terms
    microbatches          micro_batch divides the sequences that a rank has in a step
    memory                a tenth of the card stays free
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from zslurm.checkpoint_tools.quantities import counted, show_bytes
from zslurm.train.config import TrainConfig
from zslurm.train.plan.activations import head_chunk
from zslurm.train.plan.matmuls import Matmul, MicrobatchShape
from zslurm.train.plan.memory import LEFT_FREE, MemoryPlan, plan_memory, with_least_recompute

TILE = 64
ENOUGH_FLOPS = 200e9
ENOUGH_TERMS = 1024
LARGE_SHARE = 0.02

SHAPE_RULES = frozenset(
    ("hidden_size", "head_dim", "expert_hidden_size", "expert_rows", "small_product", "small_k", "memory")
)
"""Those that another shape of the model can keep, with the same vocabulary and microbatches."""


@dataclass(frozen=True)
class SizeFinding:
    """A rule that is broken: its name, the key to change, and one line with the reason and the better value."""

    rule: str
    key: str
    line: str


def width_findings(config: TrainConfig) -> Iterator[SizeFinding]:
    """Check the widths of the model."""
    model = config.model
    if model.vocab_size % TILE:
        better = -(-model.vocab_size // TILE) * TILE
        yield _finding(
            "vocabulary",
            "model.vocab_size",
            model.vocab_size,
            f"is no multiple of {TILE}, which leaves partly filled tiles in every product of the head; pad the "
            f"vocabulary to {better}",
        )
    for name in ("hidden_size", "head_dim", "expert_hidden_size"):
        value = getattr(model, name)
        if value % TILE:
            where = {
                "hidden_size": "nearly every product",
                "head_dim": "attention and its convolutions",
                "expert_hidden_size": "the experts' products, and of cache lines when few tokens are decoded",
            }[name]
            yield _finding(
                name,
                f"model.{name}",
                value,
                f"is no multiple of {TILE}, which leaves partly filled tiles in {where}; "
                f"use {_nearest(value, TILE)}",
            )


def batch_findings(
    config: TrainConfig, index: int, sequences: int, products: list[Matmul]
) -> Iterator[SizeFinding]:
    """Check the microbatches of a phase, of which a rank has `sequences` sequences in a step."""
    phase, model = config.phases[index], config.model
    key = f"phases[{index}].micro_batch"
    microbatch = MicrobatchShape.of(phase, sequences)
    if sequences % phase.micro_batch:
        fitting = [n for n in range(1, sequences + 1) if not sequences % n and not phase.global_batch % n]
        yield _finding(
            "microbatches",
            key,
            phase.micro_batch,
            f"does not divide the {counted(sequences, 'sequence')} that a rank has in a step, so the last "
            f"microbatch is smaller; use {min(fitting, key=lambda n: (abs(n - phase.micro_batch), -n))}",
        )
    tokens, local = microbatch.tokens, microbatch.local
    if tokens % TILE:
        context = _nearest(phase.context, TILE * phase.context_parallel)
        step = TILE // math.gcd(TILE, local)
        yield _finding(
            "tokens",
            key,
            phase.micro_batch,
            f"gives {counted(tokens, 'token')} in a microbatch, no multiple of {TILE}: the last tile of each "
            f"product is partly filled; use phases[{index}].context {context}, or micro_batch "
            f"{_nearest(microbatch.sequences, step)}",
        )
    rows, block = tokens * model.experts_per_token, TILE * model.experts
    if rows % block:
        step = block // math.gcd(block, local * model.experts_per_token)
        yield _finding(
            "expert_rows",
            key,
            phase.micro_batch,
            f"gives each of {counted(model.experts, 'expert')} {rows / model.experts:.4g} rows in the mean, no "
            f"multiple of {TILE}; use micro_batch {_nearest(microbatch.sequences, step)}",
        )
    yield from _product_findings(config, index, microbatch, sequences, products)


def _product_findings(
    config: TrainConfig, index: int, microbatch: MicrobatchShape, sequences: int, products: list[Matmul]
) -> Iterator[SizeFinding]:
    """Check the large products of a microbatch."""
    total = sum(product.total_flops for product in products if product.pass_name != "recompute")
    large = [
        product
        for product in products
        if product.pass_name != "recompute"
        and (product.kind == "grouped" or (product.is_gemm and product.total_flops >= LARGE_SHARE * total))
    ]
    chunked = head_chunk(config.model, microbatch.tokens, on_cpu=False) < microbatch.tokens
    small = [
        product
        for product in large
        if product.pass_name == "forward"
        and product.flops < ENOUGH_FLOPS
        and not (chunked and product.name.startswith("head."))  # more tokens make more chunks
    ]
    if small:
        least = min(product.flops for product in small)
        needed = math.ceil(microbatch.sequences * ENOUGH_FLOPS / least)
        named = ", ".join(f"{product.name} {product.flops / 1e9:.3g}" for product in small)
        has = f", of which a rank has {sequences} in a step: have fewer ranks, or a wider model"
        yield _finding(
            "small_product",
            f"phases[{index}].micro_batch",
            microbatch.sequences,
            f"makes large products of less than {ENOUGH_FLOPS / 1e9:g} GFLOP a call, which do not fill the GPU "
            f"({named}); all have enough from {counted(needed, 'sequence')} on{has if needed > sequences else ''}",
        )
    keys: dict[str, list[Matmul]] = {}
    for product in large:
        if product.k < ENOUGH_TERMS and (key := _terms_key(product, index)) is not None:
            keys.setdefault(key, []).append(product)
    for key, short in keys.items():
        named = ", ".join(f"{product.name} ({product.pass_name}) {product.k}" for product in short)
        yield SizeFinding(
            "small_k",
            key,
            f"{key}: large products sum fewer than {ENOUGH_TERMS:,} terms (K), too few to hide the start of each "
            f"tile ({named}); use {_enough_terms(config, key, microbatch, short)}",
        )


def _terms_key(product: Matmul, index: int) -> str | None:
    """Return the key that decides K of a product; None for the head's chunks, which follow from the vocabulary."""
    if product.pass_name == "weight gradient":
        return None if product.name.startswith("head.") else f"phases[{index}].micro_batch"
    decides = {
        ("attention.output", "forward"): "model.query_heads",
        ("attention.projection", "input gradient"): "model.query_heads",
        ("experts.down", "forward"): "model.expert_hidden_size",
        ("experts.gate_up", "input gradient"): "model.expert_hidden_size",
        ("router.down", "input gradient"): "model.router_hidden_size",
        ("head.logits", "input gradient"): "model.vocab_size",
    }
    return decides.get((product.name, product.pass_name), "model.hidden_size")


def _enough_terms(config: TrainConfig, key: str, microbatch: MicrobatchShape, short: list[Matmul]) -> str:
    """Return the least value of a key with which its products have enough terms."""
    model, fewest = config.model, min(product.k for product in short)
    if key == "model.query_heads":
        group = model.query_heads // model.kv_heads
        pairs = -(-ENOUGH_TERMS // (model.head_dim * group))
        return f"{pairs * group} query heads with {counted(pairs, 'key head')}"
    if key.endswith("micro_batch"):
        return str(math.ceil(microbatch.sequences * ENOUGH_TERMS / fewest))
    return str(ENOUGH_TERMS)


def memory_findings(config: TrainConfig, memory: MemoryPlan, card: int, *, local: int) -> Iterator[SizeFinding]:
    """Check that a run fits into GPUs with `card` bytes, `local` of which are in a node."""
    room = (1 - LEFT_FREE) * card
    if memory.peak <= room:
        return
    peak, free = show_bytes(memory.peak), f"{LEFT_FREE:.0%} of {show_bytes(card)}"
    automatic = _recomputing(config, "auto")
    least = with_least_recompute(automatic, memory.ranks, card, on_cpu=False, local=local)
    if plan_memory(least, memory.ranks, on_cpu=False, local=local).peak <= room:
        better = f"use parallel.recompute {least.parallel.recompute}, the fewest layers that fit, or auto"
    else:
        better = _smaller_microbatch(_recomputing(config, config.model.layers), memory.ranks, room, local)
    yield SizeFinding(
        "memory",
        "parallel.recompute",
        f"parallel.recompute ({str(config.parallel.recompute).lower()}): a rank takes {peak} at its peak, which "
        f"does not leave {free} free; {better}",
    )


def _recomputing(config: TrainConfig, layers: int | str) -> TrainConfig:
    return config.model_copy(update={"parallel": config.parallel.model_copy(update={"recompute": layers})})


def _smaller_microbatch(config: TrainConfig, ranks: int, room: float, local: int) -> str:
    """Return the largest microbatch that fits with every layer recomputed."""
    for most in range(max(phase.micro_batch for phase in config.phases) - 1, 0, -1):
        phases = tuple(
            phase.model_copy(update={"micro_batch": min(most, phase.micro_batch)}) for phase in config.phases
        )
        smaller = config.model_copy(update={"phases": phases})
        if plan_memory(smaller, ranks, on_cpu=False, local=local).peak <= room:
            return f"recompute every layer, with micro_batch {most} at most"
    return "no microbatch is small enough: use more ranks, context_parallel, or a smaller model"


def _finding(rule: str, key: str, value: int, text: str) -> SizeFinding:
    return SizeFinding(rule, key, f"{key} ({value}) {text}")


def _nearest(value: int, step: int) -> int:
    """Return the multiple of `step` that is nearest, at least one; of two the larger."""
    return max(1, math.floor(value / step + 0.5)) * step
