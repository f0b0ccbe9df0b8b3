"""Shapes of ZAYA1's family near a number of parameters: a small, deterministic search.

Tried are hidden sizes in steps of 128, 8 to 64 experts, and experts of a half to twice the hidden size. Heads
follow ZAYA1-base as far as whole heads allow: half as many query channels as the hidden size, and a key head for
four query heads. For each of these the number of layers is the one that comes nearest, if there are 24 to 128
channels to a layer (ZAYA1-base has 51), as in models that are trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pydantic import ValidationError

from zslurm.train.config import ModelConfig
from zslurm.train.plan.size_rules import TILE
from zslurm.train.shapes import parameter_counts

WIDEST = 16384
TOLERANCE = 0.1
"""Share by which the parameters of a proposal may differ from what was asked for."""

_EXPERTS = (8, 16, 32, 64)
_EXPERT_WIDTHS = (0.5, 1.0, 1.5, 2.0)
_STEP = 128
_MOST_LAYERS = 256


@dataclass(frozen=True)
class ShapeProposal:
    """A proposal: the model, with its parameters in all and those that a token passes through."""

    model: ModelConfig
    parameters: int
    active: int


def search_shapes(
    base: ModelConfig, parameters: float, keeps_rules: Callable[[ModelConfig], bool], most: int = 8
) -> list[ShapeProposal]:
    """Return at most `most` shapes that keep the rules, the nearest to a number of parameters first.

    Vocabulary, router and head size (in whole tiles) are `base`'s; parameters include the embedding.
    """
    proposals: list[ShapeProposal] = []
    for shape in nearest_shapes(base, parameters):
        if keeps_rules(shape.model):
            proposals.append(shape)
        if len(proposals) == most:
            break
    return proposals


def nearest_shapes(base: ModelConfig, parameters: float) -> list[ShapeProposal]:
    """Return all shapes within TOLERANCE, whatever rules they break, the nearest first."""
    shapes = [shape for shape in _shapes(base, parameters) if abs(shape.parameters / parameters - 1) <= TOLERANCE]
    return sorted(
        shapes,
        key=lambda shape: (
            abs(shape.parameters - parameters),
            shape.model.hidden_size,
            shape.model.experts,
            shape.model.expert_hidden_size,
        ),
    )


def _shapes(base: ModelConfig, parameters: float) -> Iterator[ShapeProposal]:
    head_dim = max(1, round(base.head_dim / TILE)) * TILE
    for hidden in range(_STEP, WIDEST + 1, _STEP):
        key_heads = max(1, round(hidden / 2 / head_dim / 4))
        query_heads = max(key_heads, round(hidden / 2 / head_dim / key_heads) * key_heads)
        for experts in sorted({*_EXPERTS, base.experts}):
            for width in _EXPERT_WIDTHS:
                changes = {
                    "hidden_size": hidden,
                    "query_heads": query_heads,
                    "kv_heads": key_heads,
                    "head_dim": head_dim,
                    "experts": experts,
                    "expert_hidden_size": int(hidden * width),
                }
                if (shape := _with_layers(base, changes, parameters)) is not None:
                    yield shape


def _with_layers(base: ModelConfig, changes: dict[str, int], parameters: float) -> ShapeProposal | None:
    """Return the shape whose layers bring it nearest; None if they would be too many or too few."""

    def model(layers: int) -> ModelConfig:
        return ModelConfig.model_validate({**base.model_dump(), **changes, "layers": layers})

    try:
        two, three = (parameter_counts(model(layers)) for layers in (2, 3))
    except ValidationError:
        return None
    layers = round(2 + (parameters - two.total) / (three.total - two.total))
    if not 1 <= layers <= _MOST_LAYERS or not 24 <= changes["hidden_size"] / layers <= 128:
        return None
    more = layers - 2  # all layers but the first are alike: to count those of a deep model takes long
    total = two.total + more * (three.total - two.total)
    active = two.active + more * (three.active - two.active)
    return ShapeProposal(model(layers), total, active)
