"""The weights that a new run file starts from: where they are, and what the run must take from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zslurm.cli.errors import as_user_errors
from zslurm.core.errors import ConfigError
from zslurm.run.checkpoints import find_checkpoint
from zslurm.train.config import ModelConfig


@dataclass(frozen=True)
class Start:
    """Trained weights.

    Attributes:
        init: the value of the key `init`, with an absolute path.
        model: theirs.
        tokenizer: their tokenizer.json.
        rope_base: theirs; None where it is not known.
        context: longest sequence that they were trained with, in tokens; None where it is not known.
    """

    init: str
    model: ModelConfig
    tokenizer: Path
    rope_base: float | None
    context: int | None


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
    )
