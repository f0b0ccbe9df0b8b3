"""Refuse a checkpoint that this run cannot resume from."""

from __future__ import annotations

from zslurm.checkpoint_tools import Manifest
from zslurm.train.config import ModelConfig, model_differences
from zslurm.train.errors import ConfigError
from zslurm.train.optim.sharded import MASTER, MOMENTUM, states_of
from zslurm.train.shapes import TensorInfo


def check_same_model(manifest: Manifest, model: ModelConfig, table: tuple[TensorInfo, ...]) -> None:
    """Refuse a checkpoint of another model.

    Raises:
        ConfigError: naming the keys that differ.
    """
    if differing := model_differences(model, manifest.model):
        raise ConfigError(
            f"the checkpoint at step {manifest.step} is of another model: {'; '.join(differing)}; "
            "set the model back, or submit with --new"
        )
    stored = [(tensor.name, tensor.shape) for tensor in manifest.tensors]
    if stored != [(row.name, row.shape) for row in table]:
        raise ConfigError(f"the checkpoint at step {manifest.step} has other tensors than this version's model")


def check_same_optimizer(manifest: Manifest, table: tuple[TensorInfo, ...], dtype: str) -> None:
    """Refuse a checkpoint with the states of another optimizer, or in another format than `dtype`.

    Raises:
        ConfigError: naming the setting that differs.
    """
    where = f"the checkpoint at step {manifest.step}"
    act = "set it back, or submit with --new (and `init: ckpt:DIR` to start from its weights)"
    for tensor, row in zip(manifest.tensors, table, strict=True):
        if not set(states_of(row)) <= tensor.states.keys():
            theirs, own_optimizer = ("muon", "adamw") if MOMENTUM in tensor.states else ("adamw", "muon")
            raise ConfigError(
                f"{where} was trained with optim.matrices: {theirs}, this run has {own_optimizer}; {act}"
            )
        if tensor.states[MASTER] != dtype:
            raise ConfigError(
                f"{where} has master weights in {tensor.states[MASTER]}, parallel.dtype asks for {dtype}; {act}"
            )
