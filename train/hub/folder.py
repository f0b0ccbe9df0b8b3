"""A folder of safetensors files, as published models are: the places of its tensors, read range by range.

    model.safetensors                      all tensors, or
    model.safetensors.index.json           which tensor is in which file ("weight_map"), and
    model-00001-of-00004.safetensors ..    those files

Opening reads headers only and collects everything that is wrong with them, so that a person hears of all of it
at once. Reading is `pread` of a range of elements into fp32; no file is mapped or read whole.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zslurm.checkpoint_tools.format import layout as checkpoint_layout
from zslurm.checkpoint_tools.format import shard_header
from zslurm.checkpoint_tools.plain import Unexpected, in_words, load_json
from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.errors import HubError, HubIOError

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
BUFFER_ELEMENTS = 1 << 21
"""Elements that are converted at once: 8 MiB in fp32."""

READABLE = {"F32": "<f4", "BF16": "<u2", "F16": "<f2"}
"""safetensors dtypes that weights may have -> the numpy dtype that carries their bits."""

_MAX_HEADER = 100 << 20  # the limit of the safetensors library


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its bytes are [begin, begin + numel * item size)."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int


class TensorFolder:
    """The tensors of a folder. Use it as a context manager; not for use from two threads at once.

    Attributes:
        tensors: every tensor that can be read, by name.
        problems: what is wrong with files or single tensors, one line each.
    """

    def __init__(self, path: Path) -> None:
        """Read all headers.

        Raises:
            HubError: the folder holds no safetensors files, or its index cannot be understood.
            HubIOError: the operating system refused.
        """
        self.path = path
        self.tensors: dict[str, StoredTensor] = {}
        self.problems: list[str] = []
        self._explained: set[str] = set()  # tensors that a problem is about; "" stands for all
        self._open: tuple[str, int] | None = None
        self._buffer = np.empty(0, np.uint8)
        expected = self._expected()
        for file in sorted(set(expected.values())):
            self._read_header(file, {name for name, where in expected.items() if where == file})

    def explains(self, name: str) -> bool:
        """Return whether `problems` has a line for why this tensor is not among `tensors`."""
        return name in self._explained or "" in self._explained

    def close(self) -> None:
        """Close the open file."""
        if self._open is not None:
            os.close(self._open[1])
            self._open = None

    def read(self, name: str, start: int, out: NDArray[np.float32]) -> None:
        """Fill `out` (contiguous) with elements [start, start + out.size) of a tensor, row-major.

        Raises:
            HubIOError: the operating system refused, or the file became shorter.
        """
        stored = self.tensors[name]
        carrier = np.dtype(READABLE[stored.dtype])
        for done in range(0, out.size, BUFFER_ELEMENTS):
            chunk = out[done : done + BUFFER_ELEMENTS]
            raw = self._room(chunk.size * carrier.itemsize)
            try:
                self._pread(stored.file, stored.begin + (start + done) * carrier.itemsize, raw.data)
            except OSError as error:
                raise HubIOError(f"{self.path / stored.file}: cannot be read: {error.strerror}") from error
            to_fp32(raw.view(carrier), stored.dtype, chunk)

    def _room(self, size: int) -> NDArray[np.uint8]:
        if self._buffer.size < size:
            self._buffer = np.empty(size, np.uint8)
        return self._buffer[:size]

    def _expected(self) -> dict[str, str]:
        """Tensor -> file, from the index; of a single file, nothing but that it exists."""
        if (self.path / SINGLE).exists():
            return {"": SINGLE}
        if not (self.path / INDEX).exists():
            raise HubError(f"{self.path}: holds neither {SINGLE} nor {INDEX}; other formats cannot be read")
        try:
            weight_map = load_json((self.path / INDEX).read_bytes())["weight_map"]
            if not all(isinstance(file, str) and checkpoint_layout.is_plain(file) for file in weight_map.values()):
                raise Unexpected("weight_map must name files of the folder")
        except OSError as error:
            raise HubIOError(f"{self.path / INDEX}: cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise HubError(f"{self.path / INDEX}: not an index of safetensors files: {in_words(error)}") from error
        return dict(weight_map)

    def _read_header(self, file: str, expected: set[str]) -> None:
        try:
            size = (self.path / file).stat().st_size
            spans = self._spans(file, size)
        except FileNotFoundError:
            self.problems.append(f"{file}: missing, though {INDEX} names it")
            self._explained |= expected
            return
        except OSError as error:
            raise HubIOError(f"{self.path / file}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            self.problems.append(f"{file}: {error}")
            self._explained |= expected
            return
        for name in sorted(expected - {"", *spans}):
            self.problems.append(f"{file}: does not hold {name}, though {INDEX} lists it")
            self._explained.add(name)
        for name, span in spans.items():
            if problem := _problem_of(span, size):
                self.problems.append(f"{file}: {name}: {problem}")
                self._explained.add(name)
            elif name in self.tensors:
                self.problems.append(f"{file}: {name}: also in {self.tensors[name].file}")
            else:
                self.tensors[name] = StoredTensor(file, span.dtype, span.shape, span.begin)

    def _spans(self, file: str, size: int) -> dict[str, shard_header.Span]:
        if size < shard_header.LENGTH_BYTES:
            raise ValueError(f"truncated: {counted(size, 'byte is', 'bytes are')} too few for a safetensors file")
        opening = bytearray(shard_header.LENGTH_BYTES)
        self._pread(file, 0, memoryview(opening))
        length = shard_header.decode_length(bytes(opening))
        if length > _MAX_HEADER:
            raise ValueError("not a safetensors file")
        if shard_header.LENGTH_BYTES + length > size:
            raise ValueError(f"truncated: {counted(size, 'byte ends', 'bytes end')} inside its header")
        header = bytearray(length)
        self._pread(file, shard_header.LENGTH_BYTES, memoryview(header))
        return shard_header.decode(bytes(header))

    def _pread(self, file: str, begin: int, out: memoryview) -> None:
        if self._open is None or self._open[0] != file:
            self.close()
            self._open = (file, os.open(self.path / file, os.O_RDONLY | os.O_CLOEXEC))
        done = 0
        while done < len(out):
            count = os.preadv(self._open[1], [out[done:]], begin + done)
            if count == 0:
                raise HubIOError(f"{self.path / file}: became shorter while it was read")
            done += count


def _problem_of(span: shard_header.Span, size: int) -> str | None:
    """Return why a tensor cannot be read from its file of `size` bytes; None if it can."""
    if span.dtype not in READABLE:
        return f"dtype {span.dtype}; only {', '.join(READABLE)} can be read"
    numbers: tuple[Any, ...] = (*span.shape, span.begin, span.end)
    if not all(type(number) is int and number >= 0 for number in numbers):
        return f"shape {list(span.shape)} is none"
    needed = math.prod(span.shape) * np.dtype(READABLE[span.dtype]).itemsize
    if span.end - span.begin != needed:
        return f"{counted(span.end - span.begin, 'byte does', 'bytes do')} not fit {span.dtype} {list(span.shape)}"
    if span.end > size:
        return f"truncated: it ends at byte {span.end}, the file at byte {size}"
    return None


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the bits of `values` rounded to bf16, to nearest, ties to even, as torch does; NaN stays NaN.

    numpy has no bfloat16, so its bits travel in uint16. The largest fp32 values become infinite.
    """
    bits = values.view(np.uint32)
    rounded = ((bits + ((bits >> 16 & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():
        rounded[nan] = (bits[nan] >> 16).astype(np.uint16) | 0x7FC0
    return rounded


def to_fp32(carried: NDArray[Any], dtype: str, out: NDArray[np.float32]) -> None:
    """Fill `out` with the values that `carried` holds in the safetensors dtype `dtype`; exact."""
    if dtype == "BF16":
        np.left_shift(carried, 16, out=out.view(np.uint32), dtype=np.uint32, casting="unsafe")
    else:
        out[...] = carried
