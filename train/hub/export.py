"""Weights -> a folder that transformers loads: config.json, safetensors files, tokenizer.

Everything is decided from shapes before a byte is read: which tensor goes into which file, and every header. Then
each tensor is read, rounded and written in pieces of BUFFER_ELEMENTS, so memory does not grow with the model,
with a tensor or with a file. Weights are rounded to bf16 (to nearest, ties to even) or kept in fp32; the
balancing biases stay in fp32, shifted as sidecar.py explains.

The folder appears by one rename when every file in it is written and synced; until then it is a hidden directory
next to it, which an error or Ctrl-C removes. An existing folder is never touched.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from zslurm.checkpoint_tools.durable import sync
from zslurm.checkpoint_tools.format import shard_header
from zslurm.checkpoint_tools.plain import StrPath
from zslurm.train.errors import HubError, HubIOError
from zslurm.train.hub import sidecar
from zslurm.train.hub.folder import BUFFER_ELEMENTS, CONFIG, INDEX, SINGLE, to_bf16
from zslurm.train.hub.layouts import BALANCING_BIAS, Layout, TensorPiece, pieces
from zslurm.train.hub.settings import inexact, to_config_json
from zslurm.train.hub.sidecar import Sidecar
from zslurm.train.hub.tokenizer_files import TokenizerFiles, config_of, token_ids
from zslurm.train.hub.weights import Weights, balancing_bias

Report = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

DEFAULT_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Exported:
    """A finished export.

    Attributes:
        note: why transformers computes something else with it; None if it does not.
    """

    path: Path
    bytes: int
    tensors: int
    files: tuple[str, ...]
    tokenizer: bool
    note: str | None


def silent(done: int, total: int) -> None:
    """Drop every report."""


def export(
    weights: Weights,
    out: StrPath,
    *,
    dtype: str = "bf16",
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    tokenizer: TokenizerFiles | None = None,
    report: Report = silent,
) -> Exported:
    """Write `weights` as transformers' `zaya` format.

    Args:
        weights: open.
        out: the folder to make; an empty one may be there.
        dtype: "bf16" or "fp32".
        max_shard_bytes: size of one file, tensors only; a larger tensor has a file to itself.
        tokenizer: goes with it; None leaves it out.
        report: gets bytes done, and in all.

    Raises:
        HubError: `out` is taken, or the format cannot express the model.
        HubIOError: the file system refused.
        CheckpointError: the checkpoint is damaged.
    """
    out = Path(out)
    settings = weights.settings
    if tokenizer is not None and not settings.tokens.end:
        settings = replace(settings, tokens=token_ids(tokenizer))
    config = to_config_json(settings, dtype)
    table = pieces(settings.model, Layout.TRANSFORMERS)
    files = _divide(table, dtype, max_shard_bytes)
    with appearing(out) as temporary:
        _write_json(temporary / CONFIG, config)
        names = [CONFIG, *_write_tensors(weights, files, dtype, temporary, report)]
        Sidecar(settings.model.skip_rule, balancing_bias(weights)).write(temporary)
        names.append(sidecar.FILE)
        if tokenizer is not None:
            names += tokenizer.copy_to(temporary, config_of(tokenizer, settings.tokens, settings.context))
    return Exported(
        path=out,
        bytes=sum(_bytes(piece, dtype) for piece in table),
        tensors=len(table),
        files=tuple(names),
        tokenizer=tokenizer is not None,
        note=inexact(settings.model),
    )


@contextmanager
def appearing(out: Path) -> Iterator[Path]:
    """Yield a directory to fill, which becomes `out` by one rename at the end; removed on any error.

    Raises:
        HubError: `out` is taken.
        HubIOError: the file system refused.
    """
    out = out.absolute()
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    try:
        if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
            raise HubError(f"{out}: exists; name a folder that does not")
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        try:
            yield temporary
            for path in [*temporary.iterdir(), temporary]:
                sync(path)
            temporary.rename(out)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync(out.parent)
    except OSError as error:
        raise HubIOError(f"{error.filename or out}: cannot be written: {error.strerror or error}") from error


def _dtype(piece: TensorPiece, dtype: str) -> str:
    return "F32" if dtype == "fp32" or piece.tensor == BALANCING_BIAS else "BF16"


def _bytes(piece: TensorPiece, dtype: str) -> int:
    return piece.numel * shard_header.DTYPES[_dtype(piece, dtype)].itemsize


def _divide(table: tuple[TensorPiece, ...], dtype: str, limit: int) -> list[list[TensorPiece]]:
    """Cut the table into files of at most `limit` bytes, in order; each is sorted so that all is aligned."""
    files: list[list[TensorPiece]] = []
    filled = limit
    for piece in table:
        size = _bytes(piece, dtype)
        if not files or filled + size > limit:
            files.append([])
            filled = 0
        files[-1].append(piece)
        filled += size
    return [sorted(file, key=lambda piece: _dtype(piece, dtype) == "BF16") for file in files]


def _write_tensors(
    weights: Weights, files: list[list[TensorPiece]], dtype: str, directory: Path, report: Report
) -> list[str]:
    total = sum(_bytes(piece, dtype) for file in files for piece in file)
    done = 0
    report(0, total)

    def count(size: int) -> None:
        nonlocal done
        done += size
        report(done, total)

    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    if len(files) == 1:
        names = [SINGLE]
    for name, file in zip(names, files, strict=True):
        _write_file(weights, file, dtype, directory / name, count)
    if len(files) > 1:
        weight_map = {piece.name: name for name, file in zip(names, files, strict=True) for piece in file}
        _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        names.append(INDEX)
    return names


def _write_file(
    weights: Weights, file: list[TensorPiece], dtype: str, path: Path, count: Callable[[int], None]
) -> None:
    header = shard_header.encode(
        [(piece.name, _dtype(piece, dtype), piece.shape) for piece in file], {"format": "pt"}
    )
    buffer = np.empty(BUFFER_ELEMENTS, np.float32)
    biases = sidecar.shifted(balancing_bias(weights)).reshape(-1)
    with path.open("xb") as out:
        out.write(header)
        for piece in file:
            for start in range(0, piece.numel, BUFFER_ELEMENTS):
                values = buffer[: min(BUFFER_ELEMENTS, piece.numel - start)]
                if piece.tensor == BALANCING_BIAS:
                    values = biases[piece.start :][: piece.numel]
                else:
                    weights.read(piece.tensor, piece.start + start, values)
                rounded = to_bf16(values) if _dtype(piece, dtype) == "BF16" else values
                out.write(rounded.data)
                count(rounded.nbytes)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
