"""Bandwidth of the memory of GPUs, or of CPUs: BabelStream's five patterns over arrays of many sizes.

With arrays a, b and c of S bytes each and a scalar s, computed and counted as in BabelStream (src/main.cpp):

    copy    c = a            2 S
    scale   b = s c          2 S        BabelStream calls it mul
    add     c = a + b        3 S
    triad   a = b + s c      3 S
    dot     sum of a b       2 S        its result is read by the host if it does so in training, here never

Bandwidth is these bytes over the time. Arrays that a cache holds show the cache, not the memory: at 64 MiB each,
three still fit into the 256 MiB of an MI300X's Infinity Cache. fp64 is BabelStream's default and ours.

Every rank measures its own memory at the same time as the others. Ranks on CPUs share theirs: their sum
(`total_gb_s`) is what the node's memory gives. Each result is compared with what it must be, in every element.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zslurm.bench.measurement import MeasurementPlan, Options, Point, Row
from zslurm.bench.ranks import BenchRanks
from zslurm.bench.result import MeasuredMachine, Skipped
from zslurm.bench.run.local import rates_of_all, time_alone
from zslurm.checkpoint_tools.quantities import show_bytes
from zslurm.train.parallel.world import DTYPES

ARRAYS = {"copy": 2, "scale": 2, "add": 3, "triad": 3, "dot": 2}
"""Arrays whose bytes each pattern moves."""

SCALAR = 0.4
_FIRST = {"a": 0.1, "b": 0.2, "c": 0.3}
_POINT_S = 0.5
_DOT_AT_ONCE = 1 << 30  # elements; BLAS counts in 32 bits
_CHECKED_AT_ONCE = 1 << 24
# Bytes a second for the first estimate of how long a point takes.
_GUESS = {"cuda": 2e12, "cpu": 3e9}


def points(options: Options, machine: MeasuredMachine) -> MeasurementPlan:
    """Return patterns x sizes; sizes of which three arrays do not fit into memory are skipped."""
    planned: list[Point] = []
    skipped: list[Skipped] = []
    for size in options["sizes"]:
        for pattern in options["patterns"]:
            values = {"pattern": pattern, "bytes": size, "dtype": options["dtype"]}
            # Comparing with what it must be takes a few pieces more.
            if (needed := 3 * size + (1 << 29)) > 0.9 * machine.gpu_memory:
                free = show_bytes(machine.gpu_memory)
                reason = f"its arrays take {show_bytes(needed)} for each rank, of {free} that are free"
                skipped.append(Skipped(point=values, reason=reason))
                continue
            once = 3 * size / _GUESS[machine.device]
            planned.append(Point(values, max(0.1, min(_POINT_S, 60 * once), 10 * once)))
    return MeasurementPlan(planned, skipped)


def run(point: Point, ranks: BenchRanks) -> Row | None:
    """Measure a pattern on every rank at the same time; the row is rank 0's."""
    values = point.values
    pattern = Pattern(values["pattern"], values["bytes"], DTYPES[values["dtype"]], ranks.device)
    timing = time_alone(pattern.call, ranks, _POINT_S)
    row = rates_of_all(pattern.moved / timing.seconds / 1e9, timing, ranks, "gb_s", wrong=pattern.wrong())
    return None if row is None else {**values, "bytes": pattern.bytes, **row}


class Pattern:
    """One pattern with its arrays.

    Attributes:
        bytes: of each array: what was asked for, rounded down to whole elements.
        moved: bytes that count, of one call.
        call: computes it once.
    """

    def __init__(self, name: str, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.name = name
        elements = max(1, size // dtype.itemsize)
        self.bytes = elements * dtype.itemsize
        self.moved = ARRAYS[name] * self.bytes
        self.a, self.b, self.c = (
            torch.full((elements,), value, dtype=dtype, device=device) for value in _FIRST.values()
        )
        self.dots: list[Tensor] = []
        self.call = self._call()

    def _call(self) -> Callable[[], object]:
        a, b, c = self.a, self.b, self.c

        def dot() -> None:
            starts = range(0, len(a), _DOT_AT_ONCE)
            self.dots = [
                torch.dot(*(operand[start : start + _DOT_AT_ONCE] for operand in (a, b))) for start in starts
            ]

        return {
            "copy": lambda: c.copy_(a),
            "scale": lambda: torch.mul(c, SCALAR, out=b),
            "add": lambda: torch.add(a, b, out=c),
            "triad": lambda: torch.add(b, c, alpha=SCALAR, out=a),
            "dot": dot,
        }[self.name]

    def wrong(self) -> int:
        """Return how many elements of the last call's result are wrong; of a dot, whether it is.

        Every element is computed from the same numbers, so all must be what one element gives.
        """
        a, b, c = (torch.tensor([value], dtype=self.a.dtype) for value in _FIRST.values())
        eps = torch.finfo(self.a.dtype).eps
        if self.name == "dot":
            self.call()
            total, expected = sum(float(dot) for dot in self.dots), float(a) * float(b) * len(self.a)
            # Sums of equal numbers may round one way at each step; a device makes 16 partial sums at least.
            return int(not abs(total - expected) <= eps * max(1024, len(self.a) / 16) * expected)
        value, result = {
            "copy": (a, self.c),
            "scale": (c * SCALAR, self.b),
            "add": (a + b, self.c),
            "triad": (torch.add(b, c, alpha=SCALAR), self.a),
        }[self.name]
        # A fused multiply-add rounds once, others twice.
        allowed, expected_value = eps * float(value), float(value)
        parts = (result[start : start + _CHECKED_AT_ONCE] for start in range(0, len(result), _CHECKED_AT_ONCE))
        return sum(int(((chunk - expected_value).abs() > allowed).sum().item()) for chunk in parts)
