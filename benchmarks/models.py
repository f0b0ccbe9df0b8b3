"""The models of the benchmarks: the tiny recipe's, one of 108.8 million parameters, and those of recipes."""

from __future__ import annotations

from zslurm.config import yaml12
from zslurm.config.load import recipes
from zslurm.train.config import ModelConfig

TINY = ModelConfig(
    vocab_size=4096,
    hidden_size=128,
    layers=4,
    query_heads=4,
    kv_heads=2,
    head_dim=32,
    experts=4,
    expert_hidden_size=256,
    router_hidden_size=32,
    skip_rule="zero",
)
LARGER = ModelConfig(
    vocab_size=8192,
    hidden_size=512,
    layers=8,
    query_heads=4,
    kv_heads=2,
    head_dim=64,
    experts=16,
    expert_hidden_size=512,
    router_hidden_size=64,
    skip_rule="zero",
)


def recipe(name: str) -> ModelConfig:
    """The model of a recipe."""
    return ModelConfig.model_validate(yaml12.parse(recipes()[name], name).data["model"])
