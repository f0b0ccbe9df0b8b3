"""What a checkpoint does not hold itself, from the run that it is in: RoPE base, context, tokenizer.

    RUN/config.json                          phases, data.path or data.sources
    RUN/checkpoints/step-00000400/           the checkpoint

A run's RoPE base and context belong to the phase that the checkpoint's last step was in. A checkpoint that was
imported holds these facts in its manifest's `state` and its tokenizer among its own files, so it needs no run.
A checkpoint that was copied away from its run has neither: the caller must give them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zslurm.checkpoint_tools import Checkpoint, Manifest
from zslurm.train.config import DataConfig, ModelConfig, TrainConfig, load_train_config
from zslurm.train.data.bundle import Corpus
from zslurm.train.errors import ConfigError, DataError, HubError
from zslurm.train.hub.settings import Settings, TokenIds
from zslurm.train.hub.tokenizer_files import TokenizerFiles
from zslurm.train.schedule import Plan
from zslurm.train.sections.phases import PhaseConfig

WEIGHTS_ONLY = "weights_only"
"""Key of a manifest's `state`: the facts of a checkpoint that holds weights and no optimizer state."""


def weights_only(manifest: Manifest) -> bool:
    """Return whether the checkpoint holds weights and no optimizer state: it was imported, no run saved it."""
    return WEIGHTS_ONLY in manifest.state


def tokenizer_of(manifest: Manifest) -> str | None:
    """SHA-256 of the tokenizer.json that the weights were trained with; None if unknown."""
    where = manifest.state[WEIGHTS_ONLY] if weights_only(manifest) else manifest.cursor
    digest = where.get("tokenizer_sha256")
    return None if digest is None else str(digest)


@dataclass(frozen=True)
class WeightFacts:
    """What belongs to the weights of a checkpoint."""

    settings: Settings
    directory: Path
    data: Path | None
    tokenizer_sha256: str | None
    imported: bool

    def tokenizer(self) -> TokenizerFiles | None:
        """See `Weights.tokenizer`."""
        if self.imported:
            files = TokenizerFiles.in_directory(self.directory)
            if files is None and self.tokenizer_sha256 is not None:
                raise HubError(f"{self.directory}: its tokenizer.json is gone; name it with --tokenizer")
            return files
        if self.tokenizer_sha256 is None:
            return None
        if self.data is None:
            raise HubError(
                f"{self.directory}: is in no run, so its tokenizer is not known; name it with --tokenizer"
            )
        return TokenizerFiles.of_data(self.data, self.tokenizer_sha256)


def facts_of(checkpoint: Checkpoint, model: ModelConfig) -> WeightFacts:
    """Return the facts of a checkpoint of `model`.

    Raises:
        HubError: the configuration of its run cannot be read.
    """
    manifest = checkpoint.manifest
    if weights_only(manifest):
        return _imported(checkpoint.path, model, manifest.state[WEIGHTS_ONLY])
    sha256 = tokenizer_of(manifest)
    config = _run_config(checkpoint.path)
    if config is None:
        return WeightFacts(Settings(model), checkpoint.path, None, sha256, imported=False)
    phase = _phase(config, manifest.step)
    # All sources of a mixture were made with one tokenizer.
    path = config.data.path or next(iter(config.data.sources.values()), None)
    data = Path(path) if path is not None else None
    settings = Settings(
        model,
        rope_base=phase.rope_base,
        context=phase.context,
        tokens=_tokens(data, sha256),
        dtype=config.parallel.dtype,
        lr=phase.lr,
    )
    return WeightFacts(settings, checkpoint.path, data, sha256, imported=False)


def to_state(settings: Settings, origin: str, tokenizer_sha256: str | None) -> dict[str, Any]:
    """Return the `state` of the manifest of an imported checkpoint."""
    tokens = settings.tokens
    return {
        WEIGHTS_ONLY: {
            "origin": origin,
            "rope_base": settings.rope_base,
            "context": settings.context,
            "dtype": settings.dtype,
            "tokens": {"pad": tokens.pad, "begin": tokens.begin, "end": list(tokens.end)},
            "tokenizer_sha256": tokenizer_sha256,
        }
    }


def _imported(path: Path, model: ModelConfig, state: dict[str, Any]) -> WeightFacts:
    tokens = state["tokens"]
    settings = Settings(
        model,
        rope_base=state["rope_base"],
        context=state["context"],
        tokens=TokenIds(tokens["pad"], tokens["begin"], tuple(tokens["end"])),
        dtype=state["dtype"],
    )
    return WeightFacts(settings, path, None, state["tokenizer_sha256"], imported=True)


def _run_config(checkpoint: Path) -> TrainConfig | None:
    path = checkpoint.absolute().parent.parent / "config.json"
    if not path.is_file():
        return None
    try:
        return load_train_config(path)
    except ConfigError as error:
        raise HubError(str(error)) from error


def tokenizer_of_data(data: DataConfig, sha256: str) -> TokenizerFiles:
    """Return the tokenizer of a run's data, which is next to each of its sources.

    Raises:
        HubError: it is not there, or is not the one with this hash.
    """
    path = data.path or next(iter(data.sources.values()), None)
    if path is None:
        raise HubError("data.path: names no data, so the tokenizer is not known")
    return TokenizerFiles.of_data(Path(path), sha256)


def _phase(config: TrainConfig, step: int) -> PhaseConfig:
    plan = Plan(config.phases)
    return plan.at(min(max(step - 1, 0), plan.total_steps - 1)).phase


def _tokens(data: Path | None, sha256: str | None) -> TokenIds:
    """Return the special tokens of a run's data; none if the data are gone (the caller may name a tokenizer)."""
    if data is None or sha256 is None:
        return TokenIds()
    try:
        header = Corpus.open(data).header
        if header.tokenizer_sha256 != sha256:
            return TokenIds()
        from zslurm.train.data.build.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(TokenizerFiles.of_data(data, sha256).file)
    except (DataError, HubError):
        return TokenIds()
    return TokenIds(tokenizer.token_to_id("<pad>"), tokenizer.token_to_id("<bos>"), (header.end_token,))
