"""The manifest file: a `Manifest` as JSON, with its own checksum.

    {
    "format":"zslurm-checkpoint",      every version keeps these two keys first
    "version":1,
    "step": .. "tokens": .. "world_size": ..
    "model": {..} "model_fingerprint": ".."     the model's configuration, opaque, and its fingerprint
    "cursor": {..} "state": {..}                the data cursor; what else the trainer wants back; opaque
    "block_size": 4194304                       bytes that each checksum covers
    "tensors": [{"name", "shape", "states": {"master": "F32"}, "whole"} ..]      "whole" only if it is not 0
    "buffers": [{"name", "dtype", "shape", "file"} ..]
    "files":   [{"name", "size", "crc32": "8 hex digits per block"} ..]
    "extents": [[tensor, "state", start, stop, file, "key"] ..]      tensor, file: indexes into their tables
    "crc32":"0a1b2c3d"                 every version keeps this line last; it covers every byte before it
    }

Checksums of files run from byte 0 to the end, so headers are covered too. The last line covers the manifest
byte for byte: no flip can parse to the same thing and pass. Checksums find accidents, not forgers.

Cost: about 110 bytes per extent and 8 per block: 5,000 tensors, 1,024 ranks, 3 states and 100 GB are 2.4 MB.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from zslurm.checkpoint_tools.checksum import crc32
from zslurm.checkpoint_tools.errors import Damaged, Incomplete, Mismatch, NotACheckpoint, VersionTooNew
from zslurm.checkpoint_tools.format.manifest import Buffer, Manifest, ShardFile, StoredExtent, Tensor
from zslurm.checkpoint_tools.plain import Unexpected, in_words, load_json
from zslurm.checkpoint_tools.quantities import counted, show_bytes

FORMAT = "zslurm-checkpoint"
VERSION = 1
MOST_BYTES = 128 << 20
"""Size of the largest manifest that is read: 50 times the manifest of 5,000 tensors on 1,024 ranks."""
MOST_DIMENSIONS = 64
"""Of a tensor or buffer; numpy has no more."""

_LAST_LINE = re.compile(rb',\n"crc32":"([0-9a-f]{8})"\n}\n')
_LAST_LINE_BYTES = len(b',\n"crc32":"00000000"\n}\n')
_T = TypeVar("_T")


def encode(manifest: Manifest) -> bytes:
    """Return the manifest file of `manifest`; the same manifest always gives the same bytes.

    Raises:
        Mismatch: an opaque mapping holds something that JSON cannot (NaN and infinity included).
    """
    tensor_index = {tensor.name: index for index, tensor in enumerate(manifest.tensors)}
    file_index = {file.name: index for index, file in enumerate(manifest.files)}
    document: dict[str, object] = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "tokens": manifest.tokens,
        "world_size": manifest.world_size,
        "model": manifest.model,
        "model_fingerprint": fingerprint(manifest.model),
        "cursor": manifest.cursor,
        "state": manifest.state,
        "block_size": manifest.block_size,
        "tensors": [tensor_row(tensor) for tensor in manifest.tensors],
        "buffers": [
            {"name": b.name, "dtype": b.dtype, "shape": b.shape, "file": b.file} for b in manifest.buffers
        ],
        "files": [{"name": f.name, "size": f.size, "crc32": _to_hex(f.crcs)} for f in manifest.files],
        "extents": [
            (tensor_index[e.tensor], e.state, e.start, e.stop, file_index[e.file], e.key) for e in manifest.extents
        ],
    }
    body = b"{\n" + ",\n".join(f'"{key}":{_lines(value)}' for key, value in document.items()).encode()
    return body + b',\n"crc32":"%08x"\n}\n' % crc32(body)


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable automatic garbage collection while large tables are parsed; it is on again afterwards if it was.

    Their thousands of rows all stay: a collection among them finds nothing, and a full one in a process that holds
    torch takes longer than the parsing.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def check_file(path: Path, found: os.stat_result) -> None:
    """Check that the file at `path` can be a manifest, before it is read into memory.

    Raises:
        Damaged: it is no regular file, such as a link to a device, or larger than any manifest.
    """
    if not stat.S_ISREG(found.st_mode):
        raise Damaged(path, "it is not a regular file")
    if found.st_size > MOST_BYTES:
        raise Damaged(
            path, f"it has {show_bytes(found.st_size)}, and a manifest has at most {show_bytes(MOST_BYTES)}"
        )


@gc_disabled()
def decode(data: bytes, path: Path) -> Manifest:
    """Parse and check `data`, the manifest file at `path`.

    Raises:
        Damaged: a byte is not what was written, or is missing.
        NotACheckpoint: an intact file of another format.
        VersionTooNew: written by a newer zslurm.
        Incomplete: intact, but the tables do not cover every element once.
    """
    body, last_line = data[:-_LAST_LINE_BYTES], _LAST_LINE.fullmatch(data[-_LAST_LINE_BYTES:])
    if last_line is None or int(last_line[1], 16) != crc32(body):
        raise Damaged(path, "its own checksum does not match")
    try:
        document = load_json(body + b"}")
        if document["format"] != FORMAT:
            raise NotACheckpoint(f"{path} is of format {document['format']!r}, not {FORMAT!r}")
        if _natural(document["version"]) > VERSION:
            raise VersionTooNew(
                f"{path} has format version {document['version']}, this zslurm reads versions up to {VERSION}; "
                "upgrade zslurm to read it"
            )
        manifest = _parse(document)
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as cause:
        raise Damaged(path, f"it cannot be understood ({in_words(cause)})") from cause
    try:
        manifest.check()
    except Incomplete as cause:
        raise Incomplete(f"{path}: {cause}") from None
    return manifest


def fingerprint(mapping: Mapping[str, Any]) -> str:
    """SHA-256, as hex, of `mapping` as canonical JSON: the order of its keys does not matter."""
    return hashlib.sha256(_json(mapping).encode()).hexdigest()


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


def _json(value: object) -> str:
    try:
        return _ENCODER.encode(value)
    except (RecursionError, TypeError, ValueError) as cause:
        raise Mismatch(f"a checkpoint's model, cursor and state must be plain JSON: {cause}") from cause


def _lines(value: object) -> str:
    """JSON of `value`, a table with one row per line, so that `grep` and `diff` are of use."""
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(map(_json, value)) + "\n]"
    return _json(value)


def _to_hex(crcs: Iterable[int]) -> str:
    return "".join(f"{crc:08x}" for crc in crcs)


def _from_hex(text: str) -> tuple[int, ...]:
    data = bytes.fromhex(text)
    return tuple(int.from_bytes(data[at : at + 4], "big") for at in range(0, len(data), 4))


def tensor_row(tensor: Tensor) -> dict[str, object]:
    """Return a row of the tensor table, for JSON."""
    row: dict[str, object] = {"name": tensor.name, "shape": tensor.shape, "states": dict(tensor.states)}
    if tensor.whole:
        row["whole"] = tensor.whole
    return row


def _parse(document: Mapping[str, Any]) -> Manifest:
    tensors = tuple(
        Tensor(
            _text(row["name"]),
            _shape(row["shape"]),
            {_text(state): _text(dtype) for state, dtype in row["states"].items()},
            _natural(row.get("whole", 0)),
        )
        for row in document["tensors"]
    )
    files = tuple(
        ShardFile(_text(row["name"]), _natural(row["size"]), _from_hex(row["crc32"])) for row in document["files"]
    )
    return Manifest(
        step=_natural(document["step"]),
        tokens=_natural(document["tokens"]),
        world_size=_natural(document["world_size"]),
        model=_mapping(document["model"]),
        cursor=_mapping(document["cursor"]),
        state=_mapping(document["state"]),
        block_size=_natural(document["block_size"]),
        tensors=tensors,
        buffers=tuple(
            Buffer(_text(row["name"]), _text(row["dtype"]), _shape(row["shape"]), _text(row["file"]))
            for row in document["buffers"]
        ),
        files=files,
        extents=tuple(
            StoredExtent(
                (row := tensors[_natural(tensor)]).name,
                _text(state),
                _natural(start),
                _natural(stop),
                row.states.get(state, ""),
                files[_natural(file)].name,
                _text(key),
            )
            for tensor, state, start, stop, file, key in document["extents"]
        ),
    )


_NAMES: Mapping[type, str] = {int: "a whole number", str: "a text", dict: "an object", list: "a list"}


def _expect(value: object, kind: type[_T], allowed: Callable[[_T], bool] = lambda _: True) -> _T:
    if type(value) is not kind or not allowed(value):
        raise Unexpected(f"expected {_NAMES[kind]}, got {json.dumps(value)[:40]}")
    return value


def _natural(value: object) -> int:
    return _expect(value, int, lambda number: 0 <= number < 1 << 63)


def _text(value: object) -> str:
    return _expect(value, str)


def _mapping(value: object) -> dict[str, Any]:
    return _expect(value, dict)


def _shape(value: object) -> tuple[int, ...]:
    sizes = _expect(value, list)
    if len(sizes) > MOST_DIMENSIONS:
        raise Unexpected(
            f"a shape has {counted(len(sizes), 'dimension')}, and at most {MOST_DIMENSIONS} are known"
        )
    return tuple(map(_natural, sizes))
