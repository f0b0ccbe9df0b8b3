"""The numbers in a checkpoint: what one tensor's values look like, and how two checkpoints differ.

Both stream: elements are read in chunks of CHUNK, widened to fp64 and summed there, so memory is a few chunks
whatever the size of the tensors. Every byte that is looked at is checked against its checksum on the way.

numpy has no bfloat16, so its bits are widened by hand; float8 values are compared bit by bit, and have no
statistics here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zslurm.checkpoint_tools.errors import Mismatch
from zslurm.checkpoint_tools.format.shard_header import DTYPES
from zslurm.checkpoint_tools.read import Checkpoint

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Bits = npt.NDArray[Any]
    Values = npt.NDArray[np.float64]

CHUNK = 1 << 20
"""Elements that are looked at at once."""

_BITS_ONLY = {"F8_E4M3", "F8_E5M2"}


@dataclass(frozen=True, slots=True)
class Statistics:
    """One state of one tensor. `minimum` to `rms` are over its finite elements; NaN if there are none."""

    tensor: str
    state: str
    dtype: str
    elements: int
    minimum: float
    maximum: float
    mean: float
    std: float
    rms: float
    zeros: int
    nans: int
    infinities: int


@dataclass(frozen=True, slots=True)
class Difference:
    """How one state of one tensor differs between two checkpoints.

    Attributes:
        differing: elements whose bits differ.
        largest: largest absolute difference; NaN if one side is not finite and the other is not the same.
        relative: root of the summed squares of the differences, over the same root of the first checkpoint's
        elements.
    """

    tensor: str
    state: str
    elements: int
    differing: int
    largest: float
    relative: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare` found.

    Attributes:
        facts: name -> (first, second) of step, tokens, and each key of model, cursor and state that differs.
        only_first, only_second: "tensor:state" (with its shape and dtype) and buffers that one of them has.
        differences: states that both have, and whose elements differ.
        buffers: buffers that both have, and that differ.
        compared: states and buffers that both have.
    """

    facts: dict[str, tuple[Any, Any]]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    differences: tuple[Difference, ...]
    buffers: tuple[str, ...]
    compared: int

    @property
    def same_values(self) -> bool:
        """Return whether both hold the same tensors and buffers, bit for bit, whatever else they hold."""
        return not (self.only_first or self.only_second or self.differences or self.buffers)


def statistics(checkpoint: Checkpoint, tensor: str, state: str) -> Statistics:
    """Return what the values of a tensor's state look like.

    Raises:
        Mismatch: the checkpoint does not have it, or its dtype has no statistics.
        Damaged, ReadFailed: as `Checkpoint.read`.
    """
    import numpy as np

    dtype = checkpoint.dtype(tensor, state)
    if dtype in _BITS_ONLY:
        raise Mismatch(f"tensor {tensor!r}, state {state!r}: {dtype} values are not interpreted here")
    elements = math.prod(checkpoint.shape(tensor))
    minimum, maximum = math.inf, -math.inf
    finite = zeros = nans = infinities = 0
    total = squares = 0.0
    with np.errstate(invalid="ignore", over="ignore"):  # a signalling NaN, a huge value: they are counted
        for bits in _chunks(checkpoint, tensor, state):
            values = _widened(bits, dtype)
            nans += int(np.isnan(values).sum())
            infinities += int(np.isinf(values).sum())
            values = values[np.isfinite(values)]
            zeros += int((values == 0).sum())
            if values.size:
                finite += values.size
                minimum, maximum = min(minimum, float(values.min())), max(maximum, float(values.max()))
                total += float(values.sum())
                squares += float(np.square(values).sum())
    mean = total / finite if finite else math.nan
    square = squares / finite if finite else math.nan
    return Statistics(
        tensor=tensor,
        state=state,
        dtype=dtype,
        elements=elements,
        minimum=minimum if finite else math.nan,
        maximum=maximum if finite else math.nan,
        mean=mean,
        std=math.sqrt(max(0.0, square - mean * mean)),
        rms=math.sqrt(square),
        zeros=zeros,
        nans=nans,
        infinities=infinities,
    )


def compare(
    first: Checkpoint, second: Checkpoint, *, report: Callable[[int, int], None] = lambda done, total: None
) -> Comparison:
    """Return how two checkpoints differ, at any two world sizes: elements are compared, not files.

    `report` gets bytes of the first checkpoint's elements compared, and in all.

    Raises:
        Damaged, ReadFailed: as `Checkpoint.read`.
    """
    first_states, second_states = _states(first), _states(second)
    common = [key for key in first_states if second_states.get(key) == first_states[key]]
    total, done = sum(_bytes(first, *key) for key in common), 0
    differences = []
    for tensor, state in common:
        difference = _difference(first, second, tensor, state)
        if difference.differing:
            differences.append(difference)
        done += _bytes(first, tensor, state)
        report(done, total)
    shared = [name for name in first.buffers if name in set(second.buffers)]
    different = [name for name in shared if not _same_buffer(first, second, name)]
    return Comparison(
        facts=_facts(first, second),
        only_first=_missing(first_states, second_states) + _without(first.buffers, second.buffers),
        only_second=_missing(second_states, first_states) + _without(second.buffers, first.buffers),
        differences=tuple(differences),
        buffers=tuple(different),
        compared=len(common) + len(shared),
    )


_States = dict[tuple[str, str], tuple[tuple[int, ...], str]]


def _states(checkpoint: Checkpoint) -> _States:
    """(tensor, state) -> shape and dtype."""
    rows = checkpoint.manifest.tensors
    return {(row.name, state): (row.shape, dtype) for row in rows for state, dtype in row.states.items()}


def _missing(here: _States, there: _States) -> tuple[str, ...]:
    return tuple(
        f"{tensor}:{state} {dtype} {list(shape)}"
        for (tensor, state), (shape, dtype) in here.items()
        if there.get((tensor, state)) != (shape, dtype)
    )


def _without(here: Any, there: Any) -> tuple[str, ...]:
    return tuple(f"buffer {name}" for name in here if name not in set(there))


def _facts(first: Checkpoint, second: Checkpoint) -> dict[str, tuple[Any, Any]]:
    first_facts, second_facts = first.manifest, second.manifest
    pairs: dict[str, tuple[Any, Any]] = {
        name: (getattr(first_facts, name), getattr(second_facts, name))
        for name in ("step", "tokens", "world_size")
    }
    for section in ("model", "cursor", "state"):
        left, right = getattr(first_facts, section), getattr(second_facts, section)
        for key in sorted(left.keys() | right.keys()):
            pairs[f"{section}.{key}"] = (left.get(key), right.get(key))
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _bytes(checkpoint: Checkpoint, tensor: str, state: str) -> int:
    return math.prod(checkpoint.shape(tensor)) * DTYPES[checkpoint.dtype(tensor, state)].itemsize


def _chunks(checkpoint: Checkpoint, tensor: str, state: str) -> Iterator[Bits]:
    """Yield the elements in order, CHUNK at a time, in an array that the next chunk overwrites."""
    import numpy as np

    numel = math.prod(checkpoint.shape(tensor))
    out = np.empty(min(CHUNK, numel), DTYPES[checkpoint.dtype(tensor, state)])
    for start in range(0, numel, CHUNK):
        part = out[: min(CHUNK, numel - start)]
        checkpoint.read(tensor, state, start, start + part.size, part)
        yield part


def _widened(bits: Bits, dtype: str) -> Values:
    import numpy as np

    if dtype == "BF16":
        bits = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.astype(np.float64)


def _difference(first: Checkpoint, second: Checkpoint, tensor: str, state: str) -> Difference:
    import numpy as np

    dtype = first.dtype(tensor, state)
    elements = differing = 0
    largest = squares = norm = 0.0
    for first_values, second_values in zip(
        _chunks(first, tensor, state), _chunks(second, tensor, state), strict=True
    ):
        elements += first_values.size
        unequal = first_values.view(np.uint8).reshape(first_values.size, -1) != second_values.view(
            np.uint8
        ).reshape(first_values.size, -1)
        count = int(unequal.any(axis=1).sum())
        differing += count
        if dtype in _BITS_ONLY:
            largest = norm = math.nan
            continue
        with np.errstate(invalid="ignore", over="ignore"):
            values = _widened(first_values, dtype)
            norm += float(np.square(values).sum())
            if count:
                apart = np.abs(values - _widened(second_values, dtype))[unequal.any(axis=1)]
                largest = float(np.maximum(largest, apart.max()))
                squares += float(np.square(apart).sum())
    relative = math.sqrt(squares / norm) if norm > 0 else (math.inf if squares else 0.0)
    return Difference(tensor, state, elements, differing, largest, relative if norm == norm else math.nan)


def _same_buffer(first: Checkpoint, second: Checkpoint, name: str) -> bool:
    first_buffer, second_buffer = first.read_buffer(name), second.read_buffer(name)
    return (
        first_buffer.dtype == second_buffer.dtype
        and first_buffer.shape == second_buffer.shape
        and first_buffer.tobytes() == second_buffer.tobytes()
    )
