"""The weights that a new run file starts from: where they are, and what the run must take from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from zslurm.cli.errors import as_user_errors
from zslurm.config import load, yaml12
from zslurm.core.errors import ConfigError
from zslurm.run.checkpoints import find_checkpoint
from zslurm.train.config import ModelConfig
from zslurm.train.shapes import parameter_counts


@dataclass(frozen=True)
class Start:
    """Trained weights.

    Attributes:
        init: the value of the key `init`, with an absolute path.
        model: theirs.
        tokenizer: their tokenizer.json.
        rope_base: theirs; None where it is not known.
        context: longest sequence that they were trained with, in tokens; None where it is not known.
        dtype: "bf16" or "fp32", in which they were trained; None if it is not known.
        lr: peak learning rate that they were trained with last; None if it is not known.
    """

    init: str
    model: ModelConfig
    tokenizer: Path
    rope_base: float | None
    context: int | None
    dtype: str | None = None
    lr: float | None = None


def find_start(reference: str) -> Start:
    """Return the weights that a folder of transformers, a checkpoint or a run means.

    Raises:
        NotFound: there are none.
        ConfigError: they cannot be read, or have no tokenizer.
    """
    from zslurm.train.hub import CheckpointWeights, FolderWeights  # imports numpy and h5py

    kind, _, rest = reference.partition(":")
    name = rest if kind in ("hf", "ckpt") else reference
    folder = Path(name).expanduser()
    is_folder = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
    path = (folder if is_folder else find_checkpoint(name)).absolute()
    with as_user_errors(), (FolderWeights if is_folder else CheckpointWeights)(path) as weights:
        settings, files = weights.settings, weights.tokenizer()
    if files is None:
        raise ConfigError(f"--init {reference}: has no tokenizer.json, which the data must be made with")
    return Start(
        init=f"{'hf' if is_folder else 'ckpt'}:{path}",
        model=settings.model,
        tokenizer=files.file,
        rope_base=settings.rope_base,
        context=settings.context,
        dtype=settings.dtype,
        lr=settings.lr,
    )


def nearest_recipe(model: ModelConfig) -> str:
    """Return the name of the recipe whose model has about as many parameters."""
    size = parameter_counts(model).total

    def ratio(name: str) -> float:
        document = yaml12.parse(f"extends: {name}\n", "run file")
        recipe = load.resolve(Path("run.yaml"), document=document).spec.model
        return abs(math.log(parameter_counts(recipe).total / size))

    return min(load.recipes(), key=ratio)
