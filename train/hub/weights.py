"""Weights from anywhere, one interface: our checkpoints, transformers folders, folders of the first release.

`open_weights(path)` finds out which it is and checks all of it but the values: that every tensor of the model is
there, in its shape, and nothing else. Reading is by range, in fp32, so the caller decides how much memory
that takes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from zslurm.checkpoint_tools import Checkpoint
from zslurm.checkpoint_tools.plain import StrPath, load_json
from zslurm.train.config import ModelConfig
from zslurm.train.errors import HubError, HubIOError
from zslurm.train.hub.folder import BUFFER_ELEMENTS, CONFIG, TensorFolder
from zslurm.train.hub.layouts import BALANCING_BIAS, Layout, TensorPiece, pieces
from zslurm.train.hub.run_facts import WeightFacts, facts_of, tokenizer_of
from zslurm.train.hub.settings import Settings, check_architecture, from_config_json
from zslurm.train.hub.sidecar import Sidecar, shifted
from zslurm.train.hub.tokenizer_files import TokenizerFiles
from zslurm.train.shapes import buffer_table, tensor_table

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class Overrides:
    """What a caller knows better than the files; None: the files decide."""

    rope_base: float | None = None
    context: int | None = None

    def apply(self, settings: Settings) -> Settings:
        """Return `settings` with what is given here."""
        settings_given = {key: value for key, value in vars(self).items() if value is not None}
        return replace(settings, **settings_given)


class Weights(Protocol):
    """Weights that can be read.

    Attributes:
        path: the folder or checkpoint.
        origin: what it is, for people.
    """

    path: Path
    origin: str

    @property
    def settings(self) -> Settings:
        """Return the model and what belongs to it; a HubError if that cannot be read."""

    def read(self, tensor: str, start: int, out: NDArray[np.float32]) -> None:
        """Fill `out` (contiguous) with elements [start, start + out.size), row-major, of one of our tensors.

        `tensor` is a name of `zslurm.train.shapes.tensor_table`, or "balancing_bias".

        Raises:
            HubIOError, CheckpointError: the files cannot be read, or are damaged.
        """

    def tokenizer(self) -> TokenizerFiles | None:
        """Return the tokenizer's files; None if these weights never had one.

        Raises:
            HubError: there should be one, and it cannot be found.
        """

    def close(self) -> None:
        """Close all files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class CheckpointWeights(Weights):
    """The fp32 master weights of one of our checkpoints; what is not in its manifest, from its run.

    Attributes:
        model: the model, from the manifest.
        tokenizer_sha256: of the tokenizer.json that the weights were trained with; None if unknown.
    """

    origin = "checkpoint"

    def __init__(self, path: Path, overrides: Overrides = Overrides()) -> None:
        """Open a checkpoint.

        Raises:
            CheckpointError: it is none, or is damaged.
            HubError: it is of a model that this version does not know.
        """
        self.path = path
        self._overrides = overrides
        self._checkpoint = Checkpoint.open(path)
        try:
            manifest = self._checkpoint.manifest
            self.model = _model_of(path, manifest.model)
            self.tokenizer_sha256 = tokenizer_of(manifest)
            stored = [(tensor.name, tensor.shape) for tensor in manifest.tensors]
            if stored != [(row.name, row.shape) for row in tensor_table(self.model)]:
                raise HubError(f"{path}: holds other tensors than this version's model")
        except BaseException:
            self._checkpoint.close()
            raise

    @cached_property
    def settings(self) -> Settings:
        """See `Weights`.

        Raises:
            HubError: the configuration of the checkpoint's run cannot be read.
        """
        return self._overrides.apply(self._facts.settings)

    @cached_property
    def _facts(self) -> WeightFacts:
        return facts_of(self._checkpoint, self.model)

    def read(self, tensor: str, start: int, out: NDArray[np.float32]) -> None:
        """Fill `out` with elements of a tensor, from `start` on."""
        if tensor == BALANCING_BIAS:
            bias = self._checkpoint.read_buffer("balance/bias").reshape(-1)
            out.reshape(-1)[...] = bias[start : start + out.size]
        elif self._checkpoint.dtype(tensor, "master") == "F32":
            self._checkpoint.read(tensor, "master", start, start + out.size, out)
        else:
            exact = np.empty(out.size, np.float64)
            self._checkpoint.read(tensor, "master", start, start + out.size, exact)
            out.reshape(-1)[...] = exact

    def tokenizer(self) -> TokenizerFiles | None:
        """Return the tokenizer that belongs to the weights; None if there is none."""
        return self._facts.tokenizer()

    def close(self) -> None:
        """Close the files."""
        self._checkpoint.close()


class FolderWeights(Weights):
    """A folder of safetensors files and a config.json, in either published layout."""

    def __init__(self, path: Path, overrides: Overrides = Overrides()) -> None:
        """Open a folder.

        Raises:
            HubError: everything that is wrong with it, one line each.
        """
        self.path = path
        config = _read_config(path)
        check_architecture(config)
        self._folder = TensorFolder(path)
        try:
            shapes = {name: stored.shape for name, stored in self._folder.tensors.items()}
            self.layout = Layout.FIRST_RELEASE if _is_first_release(shapes) else Layout.TRANSFORMERS
            self.origin = f"{self.layout} folder"
            sidecar = Sidecar.read(path) if self.layout is Layout.TRANSFORMERS else None
            settings = _settings_of(config, self.layout, self._folder)
            if sidecar is not None:
                model = settings.model.model_copy(update={"skip_rule": sidecar.skip_rule})
                settings = replace(settings, model=model)
            self._settings = overrides.apply(settings)
            table = pieces(self.settings.model, self.layout)
            self._check_tensors(table)
        except BaseException:
            self._folder.close()
            raise
        self._pieces: dict[str, list[TensorPiece]] = defaultdict(list)
        for piece in table:
            self._pieces[piece.tensor].append(piece)
        self._trained_bias: NDArray[np.float32] | None = None
        if sidecar is not None:
            self._trained_bias = self._trained(sidecar)

    @property
    def settings(self) -> Settings:
        """Return the model and what belongs to it."""
        return self._settings

    def read(self, tensor: str, start: int, out: NDArray[np.float32]) -> None:
        """Fill `out` with elements of a tensor, from `start` on."""
        flat, parts = out.reshape(-1), self._pieces[tensor]
        if tensor == BALANCING_BIAS and self._trained_bias is not None:
            flat[...] = self._trained_bias.reshape(-1)[start : start + flat.size]
            return
        index = bisect_right(parts, start, key=lambda piece: piece.start) - 1
        done = 0
        while done < flat.size:
            piece = parts[index]
            inside = start + done - piece.start
            count = min(piece.numel - inside, flat.size - done)
            self._folder.read(piece.name, inside, flat[done : done + count])
            done, index = done + count, index + 1

    def tokenizer(self) -> TokenizerFiles | None:
        """Return the tokenizer that belongs to the weights; None if there is none."""
        return TokenizerFiles.in_directory(self.path)

    def close(self) -> None:
        """Close the files."""
        self._folder.close()

    def _trained(self, sidecar: Sidecar) -> NDArray[np.float32] | None:
        """Return the balancing biases that the folder's were made from; None if the folder's are others by now."""
        stored = balancing_bias(self)
        trained = sidecar.balancing_bias
        return trained if trained.shape == stored.shape and np.array_equal(shifted(trained), stored) else None

    def _check_tensors(self, table: tuple[TensorPiece, ...]) -> None:
        """Every tensor is there, in its shape, and no other; all that is wrong is reported at once.

        Raises:
            HubError: it is not so.
        """
        tensors = self._folder.tensors
        expected = {piece.name: piece.shape for piece in table}
        problems = list(self._folder.problems)
        problems += [
            f"{name} {list(shape)}: missing"
            for name, shape in expected.items()
            if name not in tensors and not self._folder.explains(name)
        ]
        problems += [
            f"{name}: has shape {list(tensors[name].shape)}, the model of config.json needs {list(shape)}"
            for name, shape in expected.items()
            if name in tensors and tensors[name].shape != shape
        ]
        extra = [name for name in tensors if name not in expected]
        if _HEAD in extra and not problems and tensors[_HEAD].shape == tensors[_EMBEDDING].shape:
            extra.remove(_HEAD)
            if not self._same(_HEAD, _EMBEDDING):
                problems.append(f"{_HEAD}: differs from {_EMBEDDING}; our model's head is the embedding")
        problems += [f"{name} {list(tensors[name].shape)}: the model has no such tensor" for name in extra]
        if problems:
            raise HubError(*(f"{self.path}: {problem}" for problem in problems))

    def _same(self, left: str, right: str) -> bool:
        """Return whether two tensors of one shape hold the same values."""
        count = int(np.prod(self._folder.tensors[left].shape))
        for start in range(0, count, BUFFER_ELEMENTS):
            a = np.empty(min(BUFFER_ELEMENTS, count - start), np.float32)
            b = np.empty_like(a)
            self._folder.read(left, start, a)
            self._folder.read(right, start, b)
            if not np.array_equal(a, b):
                return False
        return True


def open_weights(path: StrPath, overrides: Overrides = Overrides()) -> Weights:
    """Weights at `path`: a checkpoint directory of ours, or a folder of either published layout.

    Raises:
        CheckpointError: it is a checkpoint, and cannot be read.
        HubError: it is a folder, and cannot be read; or neither.
    """
    path = Path(path)
    if (path / CONFIG).is_file() and not (path / "manifest.json").exists():
        return FolderWeights(path, overrides)
    return CheckpointWeights(path, overrides)


def balancing_bias(weights: Weights) -> NDArray[np.float32]:
    """Return all balancing biases [layers, classes]."""
    (row,) = buffer_table(weights.settings.model)
    bias_LC = np.empty(row.shape, np.float32)
    weights.read(BALANCING_BIAS, 0, bias_LC.reshape(-1))
    return bias_LC


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = load_json((path / CONFIG).read_bytes())
    except FileNotFoundError:
        raise HubError(f"{path}: holds no {CONFIG}, so it is no folder of a published model") from None
    except OSError as error:
        raise HubIOError(f"{path / CONFIG}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise HubError(f"{path / CONFIG}: {error}") from error
    if not isinstance(config, dict):
        raise HubError(f"{path / CONFIG}: not a model's settings")
    return config


def _settings_of(config: dict[str, Any], layout: Layout, folder: TensorFolder) -> Settings:
    try:
        return from_config_json(config, layout, {name: stored.shape for name, stored in folder.tensors.items()})
    except HubError as error:
        raise HubError(*(f"{folder.path}: {line}" for line in (*error.problems, *folder.problems))) from None


def _is_first_release(names: dict[str, tuple[int, ...]]) -> bool:
    return any(".zaya_block." in name or ".self_attn.qkv." in name for name in names)


def _first(error: TypeError | ValidationError) -> str:
    """Return the first thing that is wrong with a model's settings."""
    if isinstance(error, TypeError):
        return "its settings are no mapping of names to values"
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg'].removeprefix('Value error, ')}"


def _model_of(path: Path, stored: Any) -> ModelConfig:
    try:
        return ModelConfig(**stored)
    except (TypeError, ValidationError) as error:
        raise HubError(f"{path}: is of a model that this version does not know: {_first(error)}") from error
