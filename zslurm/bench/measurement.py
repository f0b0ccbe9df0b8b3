"""What a measurement is: one file of this folder, and one line of the table `BENCHMARKS` below.

The file is imported by the ranks only, so it may import torch at its top. It has two functions:

    points(options, machine) -> Plan    which points will be measured on this machine, and which do not fit; rank 0
                                        calls it, and the others get its plan
    run(point, ranks) -> rows           measure one point; every rank calls it at the same time. The rows that
                                        rank 0 returns go into the result; what the others return is dropped

A point is a dictionary of plain values, such as {"operation": "all_reduce", "bytes": 1048576}. A row holds the
point's values again and what was measured, as plain numbers and strings, and each row of a benchmark has the same
columns. Three columns mean the same in all benchmarks:

    seconds   median time of one operation
    spread    how far single measurements of it are from the median, relative to it (robust standard deviation);
              with `samples`, comparisons judge by it what is noise
    samples   how many measurements the median is of

A command (zslurm/cli/bench/measurements.py) turns its options into the dictionary `options` and calls
`run_benchmark` of zslurm/cli/bench/run.py; the rest (ranks, Slurm, progress, time limit, result file, table) is
the same for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Protocol

from zslurm.bench.result import MeasuredMachine, Skipped

if TYPE_CHECKING:
    from zslurm.bench.ranks import BenchRanks

Options = Mapping[str, Any]
"""Of one measurement, as JSON has them."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """One thing to measure.

    Attributes:
        values: what identifies it; plain values of JSON.
        seconds: estimate of how long measuring it takes.
    """

    values: dict[str, Any]
    seconds: float


@dataclass(frozen=True)
class MeasurementPlan:
    """What will be measured, in this order, and what will not."""

    points: Sequence[Point]
    skipped: Sequence[Skipped] = field(default=())

    def within(self, seconds: float | None) -> MeasurementPlan:
        """Return the part that fits into a time in seconds: the cheapest points first, kept in their order."""
        if seconds is None:
            return self
        kept: set[int] = set()
        remaining = seconds
        for index in sorted(range(len(self.points)), key=lambda index: self.points[index].seconds):
            remaining -= self.points[index].seconds
            if remaining < 0:
                break
            kept.add(index)
        dropped = [
            Skipped(
                point=point.values, reason=f"it takes about {point.seconds:.1f} s, more than the time that is left"
            )
            for index, point in enumerate(self.points)
            if index not in kept
        ]
        return MeasurementPlan([self.points[index] for index in sorted(kept)], [*self.skipped, *dropped])


class CannotMeasure(Exception):
    """This machine, or these options, leave nothing to measure; the message is a sentence for the user."""


class Measurement(Protocol):
    """A module with these two functions."""

    def points(self, options: Options, machine: MeasuredMachine) -> MeasurementPlan:
        """Return what will be measured.

        Raises:
            CannotMeasure: there is nothing that could be.
        """

    def run(self, point: Point, ranks: BenchRanks) -> Row | list[Row] | None:
        """Measure one point together with all other ranks; rank 0's rows count."""


@dataclass(frozen=True)
class Benchmark:
    """A measurement as the login node knows it, without torch.

    Attributes:
        name: as in `zslurm bench NAME`.
        module: the measurement.
        about: what it measures, in a few words.
        keys: columns that identify a row; rows of two results are compared if these are equal.
        value: the column with the main figure.
        unit: of that column.
        better: whether more of it or less of it is better.
        columns: what the table on the terminal shows.
        communicates: whether the ranks need a process group of their devices' backend (NCCL or RCCL, or gloo).
    """

    name: str
    module: str
    about: str
    keys: tuple[str, ...]
    value: str
    unit: str
    better: Literal["higher", "lower"] = "higher"
    columns: tuple[str, ...] = ()
    communicates: bool = True

    def load(self) -> Measurement:
        """Import the measurement; in a rank only."""
        module: Any = import_module(self.module)
        return module  # type: ignore[no-any-return]


_ALL = (
    Benchmark(
        "collectives",
        "zslurm.bench.collectives",
        "collectives between GPUs: bandwidth, latency, right data",
        keys=("operation", "scope", "where", "nodes", "ranks", "levels", "bytes"),
        value="busbw_gb_s",
        unit="GB/s",
        columns=("operation", "scope", "where", "nodes", "ranks", "levels", "bytes", "us", "algbw_gb_s",
                 "busbw_gb_s", "spread", "data"),
    ),
    Benchmark(
        "hbm",
        "zslurm.bench.hbm",
        "memory of each GPU: BabelStream's copy, scale, add, triad, dot",
        keys=("pattern", "bytes", "dtype"),
        value="gb_s",
        unit="GB/s",
        columns=("pattern", "bytes", "dtype", "gb_s", "least_gb_s", "slowest", "total_gb_s", "spread", "wrong"),
        communicates=False,
    ),
    Benchmark(
        "gemm",
        "zslurm.bench.gemm",
        "matrix products: a sweep of M, N, K, or those of a run by name",
        keys=("product", "pass", "m", "n", "k", "batch", "group", "dtype"),
        value="tflops",
        unit="TFLOPS",
        columns=("product", "pass", "m", "n", "k", "batch", "us", "tflops", "least_tflops", "slowest", "spread",
                 "wrong"),
        communicates=False,
    ),
    Benchmark(
        "speed",
        "zslurm.bench.speed",
        "one figure of product, memory and all-reduce for each GPU",
        keys=("what", "size"),
        value="rate",
        unit="rate",
        columns=("what", "size", "rate", "unit", "least_rate", "slowest", "spread", "wrong"),
    ),
    Benchmark(
        "kernels",
        "zslurm.bench.kernels",
        "every kernel of an operation on one GPU: which is the fastest",
        keys=("operation", "case"),
        value="us",
        unit="us",
        better="lower",
        columns=("operation", "case", "fastest", "us", "of_reference", "tflops", "of_triad"),
        communicates=False,
    ),
    Benchmark(
        "tuning",
        "zslurm.bench.tuning",
        "BLAS solutions for a run's matrix products, by TunableOp",
        keys=("product", "pass", "m", "n", "k", "dtype"),
        value="tflops",
        unit="TFLOPS",
        columns=("product", "pass", "m", "n", "k", "default_tflops", "tflops", "gain"),
        communicates=False,
    ),
    Benchmark(
        "mlp",
        "zslurm.bench.mlp",
        "a stack of MLPs forward and backward on all GPUs at once",
        keys=("where", "layers", "hidden", "inner", "tokens", "dtype"),
        value="tflops",
        unit="TFLOPS",
        columns=("where", "layers", "hidden", "inner", "tokens", "dtype", "seconds", "tflops", "spread", "slower",
                 "wrong"),
        communicates=False,
    ),
    Benchmark(
        "storage",
        "zslurm.bench.storage",
        "storage: random and sequential reads, writes, saves, operations on names",
        keys=("operation", "depth", "bytes", "nodes", "ranks", "how"),
        value="per_s",
        unit="/s",
        columns=("operation", "depth", "bytes", "per_s", "mb_s", "p99_us", "spread", "how",
                 "from_storage", "slowest"),
        communicates=False,
    ),
    Benchmark(
        "train",
        "zslurm.bench.train",
        "a run's training step with its parts, on synthetic tokens",
        keys=("run", "phase", "ranks", "context", "micro_batch", "microbatches", "dtype"),
        value="tokens_per_s",
        unit="tokens/s",
        columns=("phase", "ranks", "seconds", "spread", "tokens_per_s", "tflops_per_rank", "mfu", "data_s",
                 "forward_s", "backward_s", "reduce_s", "optimizer_s", "gather_s", "other_s"),
    ),
)  # fmt: skip
BENCHMARKS = {benchmark.name: benchmark for benchmark in _ALL}
