"""The parts of a microbatch that the trainer runs one after the other: what is measured besides single products.

    embedding     rows of the embedding for T tokens; its gradient is as large as the embedding
    stage_entry   residual scaling, addition and norm: two of each layer, and one before the head
    attention     projections, convolutions of queries and keys, their norms and rotation, attention, output
    router        its MLP, softmax and choice
    experts       rows sorted to their experts, both products with SwiGLU between them, and sorted back
    head          logits, softmax, cross entropy and their gradients, all of them in forward

A part's time has its matrix products in it; what is left of it without them (`train/plan/step_time.py`) is the
time of operations that have no name in the list of products: element by element, sorting, convolutions, and what
their kernels take to start. It is in proportion to the tokens, and so is a part of another microbatch with
sequences of the same length.
"""

from __future__ import annotations

from typing import Literal

from zslurm.train.config import ModelConfig
from zslurm.train.plan.matmuls import Matmul

PartPass = Literal["forward", "forward and backward"]
FORWARD: PartPass = "forward"
BOTH: PartPass = "forward and backward"
PASSES = (FORWARD, BOTH)
"""A part's backward is not measured by itself: the head's can run once only for each forward."""

PARTS = ("embedding", "stage_entry", "attention", "router", "experts", "head")


def calls(model: ModelConfig, part: str) -> int:
    """Return how often a microbatch runs a part."""
    return {"embedding": 1, "head": 1, "stage_entry": 2 * model.layers + 1}.get(part, model.layers)


def is_recomputed(part: str) -> bool:
    """Return whether a layer that is recomputed runs the part again."""
    return part not in ("embedding", "head")


def part_flops(product: Matmul, part: str, pass_name: PartPass) -> float:
    """Return a product's FLOPs of a microbatch as far as they are made in this pass of this part."""
    if product.name.partition(".")[0] != part or product.pass_name == "recompute":
        return 0.0
    in_forward = part == "head" or product.pass_name == "forward"
    return product.total_flops if in_forward or pass_name == BOTH else 0.0
