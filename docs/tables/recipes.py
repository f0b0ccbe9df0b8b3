"""The sizes of the shipped recipes, and the memory that they take."""

from __future__ import annotations

import functools

from docs.tables.markdown import table
from zslurm.checkpoint_tools.format.partition import partition
from zslurm.checkpoint_tools.quantities import show_bytes
from zslurm.config import yaml12
from zslurm.config.load import recipes
from zslurm.train.config import ModelConfig, OptimConfig, TrainConfig
from zslurm.train.plan.memory import LEFT_FREE, plan_memory
from zslurm.train.shapes import owned_table, parameter_counts


def recipe_sizes() -> str:
    """Return the sizes of the shipped recipes, smallest first."""
    head = ("recipe", "query heads", "layers", "hidden", "parameters", "without the embedding", "active")
    texts = {name: yaml12.parse(text, name).data for name, text in recipes().items()}
    models = {name: ModelConfig.model_validate(data["model"]) for name, data in texts.items() if "model" in data}
    rows = []
    for name, model in sorted(models.items(), key=lambda recipe: parameter_counts(recipe[1]).total):
        counts = parameter_counts(model)
        sizes = (counts.total, counts.without_embedding, counts.active)
        rows.append(
            (f"`{name}`", model.query_heads, model.layers, model.hidden_size, *(f"{size:,}" for size in sizes))
        )
    return table(head, rows)


def packing() -> str:
    """Return how evenly ZAYA1-base's matrices are packed onto ranks."""
    owned = owned_table(ModelConfig(), OptimConfig())
    rows = []
    for ranks in (8, 64, 768, 1024):
        balance = partition(owned, ranks).balance()
        shares = (
            balance.cost / balance.cost_mean,
            balance.cost_bound / balance.cost_mean,
            balance.elements / balance.elements_mean,
            balance.elements_bound / balance.elements_mean,
        )
        rows.append((f"{ranks:,}", *(f"{share:.3f}" for share in shares)))
    head = (
        "ranks",
        "fullest rank by cost, over the mean",
        "no packing of whole matrices is below",
        "by elements",
        "no packing is below",
    )
    return table(head, rows)


def memory_plan() -> str:
    """Return what ZAYA1-base takes on each GPU at 4,096 tokens a microbatch, by the number of ranks."""
    config = TrainConfig.model_validate(
        {
            "model": {},
            "phases": [{"tokens": 10**9, "context": 4096, "global_batch": 4096, "micro_batch": 1, "lr": 1e-3}],
            "parallel": {"dtype": "bf16"},
        }
    )
    rows = []
    for ranks in (8, 64, 768, 1024, 2048):
        plan = plan_memory(config, ranks, on_cpu=False)
        owned = sum(plan.resident[name] for name in ("master weights", "reduced gradients", "optimizer state"))
        shown = (show_bytes(size) for size in (plan.peak, plan.microbatch.peak, owned))
        rows.append((f"{ranks:,}", *shown, plan.balance.idle_ranks, f"{100 * plan.idle_share:.1f} %"))
    head = (
        "ranks",
        "peak",
        "of it, activations",
        "a rank owns",
        "ranks without a matrix",
        "idle in Newton-Schulz",
    )
    return table(head, rows)


_CARDS_GB = (80, 139, 192)
"""Memory of an H100, an H200 and an MI300X as their drivers count it, in GiB."""


def one_card() -> str:
    """Return the largest microbatch of each recipe, in tokens, that fits on one card of each size."""
    head = ("recipe", *(f"{size} GiB{how}" for size in _CARDS_GB for how in ("", ", recompute")))
    rows = []
    for name, text in recipes().items():
        if "extends" in yaml12.parse(text, name).data:  # the model of another recipe
            continue
        found = [
            _largest(name, size * 2**30 * (1 - LEFT_FREE), recompute=recompute)
            for size in _CARDS_GB
            for recompute in (False, True)
        ]
        rows.append((f"`{name}`", *found))
    return table(head, rows)


def _largest(recipe: str, room: float, *, recompute: bool) -> str:
    """Return how many sequences of 4,096 tokens of a recipe's model fit at once, and their tokens."""
    best = 0
    for sequences in (1, 2, 4, 8, 16, 32, 64):
        if _peak(recipe, sequences, recompute=recompute) > room:
            break
        best = sequences
    return f"{best}{' or more' if best == 64 else ''} x 4,096" if best else "-"


@functools.cache
def _peak(recipe: str, sequences: int, *, recompute: bool) -> float:
    """Return the most bytes that a recipe's model takes on a card with so many sequences in a microbatch."""
    body = yaml12.parse(recipes()[recipe], recipe).data
    phase = {"tokens": 10**9, "context": 4096, "global_batch": 64, "micro_batch": sequences, "lr": 1e-3}
    sections = {key: body[key] for key in ("model", "optim") if key in body}
    parallel = {"dtype": "bf16", "recompute": recompute}
    config = TrainConfig.model_validate({**sections, "phases": [phase], "parallel": parallel})
    return plan_memory(config, 1, on_cpu=False).peak


TABLES = (
    recipe_sizes,
    packing,
    memory_plan,
    one_card,
)
