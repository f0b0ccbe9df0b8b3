"""The safetensors header and the dtypes it names: the only code that knows that format's bytes.

    8 bytes   length of the header, little-endian
    header    JSON: key -> dtype, shape, data_offsets (bytes, counted from the end of the header), then spaces
    data      the tensors, end to end with no holes, as every safetensors reader requires

Spaces after the JSON put the data on DATA_ALIGNMENT bytes. With no holes allowed, each tensor is aligned to
its own element size by putting larger elements first, as the safetensors library does itself.

numpy has no bfloat16 or float8: their bits travel in unsigned integers of the same size, with the dtype
declared.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zslurm.checkpoint_tools.errors import Mismatch
from zslurm.checkpoint_tools.plain import in_words, load_json

if TYPE_CHECKING:
    import numpy as np

DATA_ALIGNMENT = 64
"""Bytes; tensor data starts at a multiple of it, counted from the start of the file."""

MOST_BYTES = 100_000_000
"""Longest header that safetensors' own library reads."""
LENGTH_BYTES = 8
"""Bytes of the length that opens the file."""

_CARRIERS = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "|i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "|u1",
    "BOOL": "|b1",
    "BF16": "<u2",
    "F8_E4M3": "|u1",
    "F8_E5M2": "|u1",
}
_DECLARED_ONLY = {"BF16", "F8_E4M3", "F8_E5M2"}


class _Dtypes(Mapping[str, "np.dtype[Any]"]):
    """Makes numpy's dtypes on demand: a program that only lists checkpoints does not import numpy."""

    def __getitem__(self, name: str) -> np.dtype[Any]:
        import numpy as np

        return np.dtype(_CARRIERS[name])

    def __iter__(self) -> Iterator[str]:
        return iter(_CARRIERS)

    def __len__(self) -> int:
        return len(_CARRIERS)


DTYPES: Mapping[str, np.dtype[Any]] = _Dtypes()
"""safetensors dtype -> the numpy dtype that carries its bits."""


@dataclass(frozen=True, slots=True)
class Span:
    """The range of a key's bytes in its file: [begin, end), counted from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def dtype_name(carrier: np.dtype[Any], declared: str | None = None) -> str:
    """Return the safetensors dtype of an array of dtype `carrier`: `declared` if given, else the obvious one.

    Raises:
        Mismatch: the dtype is unknown, is not little-endian, or its bits are not carried by `carrier`.
    """
    if declared is None:
        inferred = (name for name in DTYPES if name not in _DECLARED_ONLY and DTYPES[name] == carrier)
        if (name := next(inferred, None)) is None:
            raise Mismatch(f"dtype {carrier.str!r} cannot be stored; use one of {', '.join(DTYPES)}")
        return name
    if declared not in DTYPES:
        raise Mismatch(f"dtype {declared!r} cannot be stored; use one of {', '.join(DTYPES)}")
    if DTYPES[declared] != carrier:
        raise Mismatch(f"{declared} is carried by numpy {DTYPES[declared].str!r}, got {carrier.str!r}")
    return declared


def encode(fields: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes before the data: length, header, padding.

    `fields` are (key, dtype, shape), in file order.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for key, dtype, shape in fields:
        begin, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    padding = -(LENGTH_BYTES + len(text)) % DATA_ALIGNMENT
    return struct.pack("<Q", len(text) + padding) + text + b" " * padding


def decode_length(opening: bytes) -> int:
    """Return the bytes of the header that follows the file's first LENGTH_BYTES bytes."""
    return int(struct.unpack("<Q", opening)[0])


def decode(header: bytes) -> dict[str, Span]:
    """Return the position of each key in the file that `header` (without its length) opens.

    Raises:
        ValueError: this is not a safetensors header.
    """
    data = LENGTH_BYTES + len(header)
    try:
        rows = load_json(header)
        rows.pop("__metadata__", None)
        return {
            key: Span(
                dtype=row["dtype"],
                shape=tuple(row["shape"]),
                begin=data + row["data_offsets"][0],
                end=data + row["data_offsets"][1],
            )
            for key, row in rows.items()
        }
    except (AttributeError, IndexError, KeyError, TypeError) as cause:
        raise ValueError(f"not a safetensors header: {in_words(cause)}") from cause
