"""Open the weights that a new run starts from.

`init: hf:DIR` names a folder in transformers' format, `init: ckpt:DIR` a checkpoint of ours, imported or a run's.
Only weights and balancing biases are taken; optimizer, data order and schedule start again. Whether they fit is
decided from headers only, so `zslurm submit` asks the same question as every rank does. Ranks then read, by
range, what they own and no more. No torch here.
"""

from __future__ import annotations

from pathlib import Path

from zslurm.checkpoint_tools import CheckpointError, list_checkpoints
from zslurm.train.config import ModelConfig, model_differences
from zslurm.train.data.build.tokenizer import file_sha256
from zslurm.train.errors import ConfigError, HubError, HubIOError
from zslurm.train.hub import CheckpointWeights, FolderWeights, Weights


def open_init(init: str, model: ModelConfig, tokenizer_sha256: str) -> Weights:
    """Return the weights that `init` names, hf:DIR or ckpt:DIR; the caller closes them.

    `model` and the tokenizer of its data are the run's, and must fit the weights.

    Raises:
        ConfigError: they cannot be read, or are of another model or tokenizer.
    """
    kind, _, folder = init.partition(":")
    path = Path(folder)
    try:
        weights = FolderWeights(path) if kind == "hf" else CheckpointWeights(path)
    except (HubError, HubIOError, CheckpointError) as error:
        raise ConfigError(f"init: {error}{_meant(path)}") from error
    try:
        _check(weights, model, tokenizer_sha256)
    except BaseException:
        weights.close()
        raise
    return weights


def _check(weights: FolderWeights | CheckpointWeights, model: ModelConfig, tokenizer_sha256: str) -> None:
    if isinstance(weights, FolderWeights):
        theirs, files = weights.settings.model, weights.tokenizer()
        tokenizer = None if files is None else file_sha256(files.file)
    else:
        theirs, tokenizer = weights.model, weights.tokenizer_sha256
    if differing := model_differences(model, theirs.model_dump(mode="json")):
        raise ConfigError(
            f"init: {weights.path} holds another model: {'; '.join(differing)}; set the model to theirs"
        )
    if tokenizer not in (None, tokenizer_sha256):
        raise ConfigError(
            f"init: {weights.path} was trained with another tokenizer than the run's data were made with; "
            "build the data with its tokenizer.json (zslurm data build --tokenizer)"
        )


def _meant(path: Path) -> str:
    """Return what was probably meant by a path that does not hold what it should."""
    if (path / "manifest.json").is_file():
        return f"; it is a checkpoint: `init: ckpt:{path}`"
    newest = next(
        (newest_path.path for newest_path in list_checkpoints(path / "checkpoints") if newest_path.complete), None
    )
    if newest is not None:
        return f"; it is a run, of which the newest checkpoint is `init: ckpt:{newest}`"
    if (path / "config.json").is_file():
        return f"; for a folder in transformers' format, write `init: hf:{path}`"
    return ""
