"""Options of the commands that read checkpoints: which one, its tokenizer, and where to compute."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from zslurm.checkpoint_tools.quantities import counted
from zslurm.core.errors import ConfigError

if TYPE_CHECKING:
    from zslurm.train.hub import TokenizerFiles, Weights

Checkpoint = Annotated[
    str, Argument(metavar="CKPT", help="A checkpoint's directory, or a run (its newest checkpoint).")
]
Checkpoints = Annotated[str, Argument(metavar="RUN", help="A run, or a directory of checkpoints.")]
Threads = Annotated[int, Option("--workers", metavar="N", min=1, help="Threads; login nodes are shared.")]
ShardSize = Annotated[str, Option(metavar="SIZE", help="Size of one file at most.")]
TokenizerFile = Annotated[
    Path | None, Option(metavar="FILE", help="A tokenizer.json to use instead of the weights' own.")
]
NoTokenizer = Annotated[bool, Option("--no-tokenizer", help="Leave the tokenizer out.")]
RopeBase = Annotated[
    float | None, Option(metavar="BASE", min=1, help="Base of the rotary embedding; default: the run's.")
]
Context = Annotated[int | None, Option(metavar="TOKENS", min=1, help="Longest sequence; default: the run's.")]


def tokenizer_for(weights: Weights, file: Path | None, *, none: bool = False) -> TokenizerFiles | None:
    """Return the tokenizer that goes with weights: `file`, or else their own; with `none` no tokenizer.

    Raises:
        ConfigError: both a file and none are asked for.
        HubError: the file is no tokenizer, or the weights' own is not found.
    """
    if none and file is not None:
        raise ConfigError("give --tokenizer or --no-tokenizer, not both")
    if none:
        return None
    if file is None:
        return weights.tokenizer()
    from zslurm.train.hub import TokenizerFiles  # imports numpy and h5py

    files = TokenizerFiles(file / "tokenizer.json" if file.is_dir() else file)
    files.check()
    return files


class ComputeDevice(StrEnum):
    """Where to compute."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Dtype(StrEnum):
    """Number formats to compute in."""

    BF16 = "bf16"
    FP32 = "fp32"


def choose_device(asked: ComputeDevice, ranks: int) -> str:
    """Return `cpu` or `cuda`, of which each rank takes one GPU.

    Raises:
        ConfigError: GPUs are asked for that are not there.
    """
    import torch

    gpus = torch.cuda.device_count()
    if asked is ComputeDevice.AUTO:
        return "cuda" if gpus >= ranks else "cpu"
    if asked is ComputeDevice.CUDA and gpus < ranks:
        for_ranks = f" for --ranks {ranks}" if ranks > 1 else ""
        raise ConfigError(f"--device cuda: torch finds {counted(gpus, 'GPU')} here{for_ranks}")
    return asked.value
