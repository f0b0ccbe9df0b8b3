"""Where and in which format the commands that run a model compute."""

from __future__ import annotations

from enum import StrEnum

from zslurm.checkpoint_tools.quantities import counted
from zslurm.core.errors import ConfigError


class Device(StrEnum):
    """Where to compute."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Dtype(StrEnum):
    """Number formats to compute in."""

    BF16 = "bf16"
    FP32 = "fp32"


def choose_device(asked: Device, ranks: int) -> str:
    """Return `cpu` or `cuda`, of which each rank takes one GPU.

    Raises:
        ConfigError: GPUs are asked for that are not there.
    """
    import torch

    found = torch.cuda.device_count()
    if asked is Device.AUTO:
        return "cuda" if found >= ranks else "cpu"
    if asked is Device.CUDA and found < ranks:
        wanted = f" for --ranks {ranks}" if ranks > 1 else ""
        raise ConfigError(f"--device cuda: torch finds {counted(found, 'GPU')} here{wanted}")
    return asked.value
