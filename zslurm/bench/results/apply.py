"""From results to settings: what runs on a cluster take from its measurements (cluster/measurements.py).

    collectives   measured.bucket_mb.N       for N nodes the knee of reduce_scatter, which buckets are (knee.py)
                  measured.collectives.N     for N nodes flat or two levels, by the time at that bucket
                  measured.variables.NAME    with --env: the value of a variable with the higher bandwidth
    speed         doctor.gemm_tflops         90 % of the GPUs' median for 8192 x 8192 x 8192 in bf16
                  doctor.hbm_gb_s            90 % of the GPUs' median in copies of 1 GiB
                  doctor.all_reduce_gb_s     90 % of the nodes' median at 64 MiB
    storage       storage_iops               pages of 4 KiB a second in random reads, of all nodes together

The doctor's thresholds are a part of the median and not the median itself, which half of the healthy GPUs are
below. `zslurm doctor --only speed` makes the same measurement and compares it with them; figures of CPUs give no
threshold. Kernels and tuned products give tables instead of values (tables.py).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zslurm.bench.result import BenchResult
from zslurm.bench.results.knee import Knee, Sample, knee_of, knee_spread
from zslurm.checkpoint_tools.quantities import counted, show_bytes
from zslurm.cluster.measurements import StoredValue
from zslurm.config.measured import MeasuredVariable
from zslurm.core.errors import ConfigError
from zslurm.slurm.hostlist import compress

OF_MEDIAN = 0.9
"""A node or GPU below this share of the healthy median is not in order."""

BUCKET_OPERATIONS = ("reduce_scatter", "all_reduce")
"""What decides the bucket, in order: buckets are reduce-scattered; an all-reduce has the same hops twice."""

SOFTWARE = ("driver", "rocm", "cuda", "rccl", "nccl", "torch")
"""The versions that a value is kept with."""

_FASTER = 1.03
_REPEATED = 2
_MIB = 1 << 20
_DOCTOR = {
    "product": ("gemm_tflops", "TFLOPS of bf16 products of 8192 x 8192 x 8192"),
    "memory": ("hbm_gb_s", "GB/s of copies of 1 GiB"),
    "all_reduce": ("all_reduce_gb_s", "GB/s of all_reduce of 64 MiB in a node"),
}
_LEVELS = ("flat", "two_level")

Row = Mapping[str, Any]


@dataclass
class Found:
    """What follows from a result.

    Attributes:
        result: the result.
        source: its file.
        values: by key of a profile below `cluster`.
        lines: what was found, and what could not be, a line each.
    """

    result: BenchResult
    source: Path
    values: dict[str, StoredValue] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def add(self, key: str, value: float | str | MeasuredVariable, spread: float | None) -> None:
        """Add a value, with the conditions of the result.

        Args:
            key: below `cluster`.
            value: as the profile takes it.
            spread: relative standard deviation of what the value follows from; None if it is not known.
        """
        result, machine = self.result, self.result.machine
        self.values[key] = StoredValue(
            value=value,
            spread=None if spread is None or not math.isfinite(spread) else _rounded(spread),
            date=result.date,
            nodes=compress(machine.nodes),
            ranks_per_node=machine.ranks_per_node,
            device=machine.gpu or "cpu",
            versions={name: result.versions[name] for name in SOFTWARE if name in result.versions},
            command=" ".join(result.command),
            result=str(self.source),
        )


def settings_from(result: BenchResult, source: Path) -> Found:
    """Return what a result gives for the profile; `source` is its file, which the values name.

    Raises:
        ConfigError: its rows lack columns, or have other values in them.
    """
    settings = Found(result, source)
    handlers: dict[str, Callable[[BenchResult, Path, Found], None]] = {
        "collectives": _collectives,
        "speed": _speed,
        "storage": _storage,
        "kernels": _kernels,
        "tuning": _tuning,
    }
    if (handler := handlers.get(result.benchmark)) is None:
        settings.lines.append(f"{source}: a result of {result.benchmark} has nothing for a profile")
        return settings
    with usable_rows(source):
        handler(result, source, settings)
    if not result.complete:
        settings.lines.append(f"{source}: a partial result; what it lacks is left as it is")
    return settings


@contextmanager
def usable_rows(source: Path) -> Iterator[None]:
    """Raise ConfigError if the rows of a result are not what its benchmark writes."""
    try:
        yield
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            f"{source}: its rows are damaged ({type(error).__name__}: {error}); measure again"
        ) from error


# --- collectives ------------------------------------------------------------------------------------------------


def _collectives(result: BenchResult, source: Path, found: Found) -> None:
    machine = result.machine
    plain = [row for row in result.rows if not row.get("environment") and not row.get("wrong")]
    operation = next(
        (candidate for candidate in BUCKET_OPERATIONS if any(row["operation"] == candidate for row in plain)), None
    )
    rising = False
    ways: dict[int, str] = {}
    for nodes in sorted({row["nodes"] for row in plain if _is_whole(row, machine.ranks_per_node)}):
        rows = [
            row
            for row in plain
            if row["operation"] == operation and row["nodes"] == nodes and _is_whole(row, machine.ranks_per_node)
        ]
        knees = {way: knee_of(_samples(rows, way)) for way in _LEVELS}
        knee = _best(
            nodes, {way: candidate for way, candidate in knees.items() if candidate is not None}, ways, found
        )
        if knee is None:
            continue
        if not knee.reached:
            largest = show_bytes(max(row["bytes"] for row in rows))
            rises = f"the bandwidth still rises at {largest}; measure larger sizes"
            found.lines.append(f"{counted(nodes, 'node')}: {rises}")
            rising = True
            continue
        bucket, way = float(max(1, math.ceil(knee.bytes / _MIB))), ways.get(nodes, "flat")
        found.add(f"measured.bucket_mb.{nodes}", bucket, knee_spread(_samples(rows, way)))
        gb_s = knee.rate / 1e9
        found.lines.append(
            f"{counted(nodes, 'node')}: a bucket of {bucket:g} MiB has 95 % of {gb_s:.3g} GB/s "
            f"({operation}, {way.replace('_', ' ')})"
        )
    _variables(result, found)
    if not found.values and not rising:
        found.lines.append(f"{source}: no reduce_scatter or all_reduce over four sizes; no bucket follows from it")


def _is_whole(row: Row, ranks_per_node: int) -> bool:
    """Return whether all ranks of its nodes took part."""
    return row["scope"] in ("node", "all") and row["ranks"] == row["nodes"] * ranks_per_node


def _samples(rows: Iterable[Row], way: str) -> list[Sample]:
    """Return the curve of one way: of several groups at the same size, such as nodes, the median one."""
    sizes: dict[int, list[Row]] = {}
    for row in rows:
        if row.get("levels", "flat") == way:
            sizes.setdefault(row["bytes"], []).append(row)
    return [
        Sample(
            size,
            statistics.median(row["seconds"] for row in same),
            statistics.median(row["spread"] for row in same),
            min(row["samples"] for row in same),
        )
        for size, same in sorted(sizes.items())
    ]


def _best(nodes: int, knees: dict[str, Knee], ways: dict[int, str], found: Found) -> Knee | None:
    """Return the knee of the faster way; if both were measured, the way is entered into `ways`."""
    if len(knees) < len(_LEVELS):
        return next(iter(knees.values()), None)
    if not all(knee.reached for knee in knees.values()):
        return max(knees.values(), key=lambda knee: knee.bytes)  # not to compare what was not measured
    # At the larger of both knees: there neither is held back by a message that is too small for it.
    size = max(knee.bytes for knee in knees.values())
    times = {way: knee.time(size) for way, knee in knees.items()}
    fast, slow = sorted(times, key=lambda way: times[way])
    ratio = times[slow] / times[fast]
    chosen = fast if ratio >= _FASTER else "flat"
    ways[nodes] = chosen
    found.add(f"measured.collectives.{nodes}", chosen, max(knee.error for knee in knees.values()))
    how = f"{ratio:.2f} times as fast" if ratio >= _FASTER else "equally fast, so that the simpler way is taken"
    found.lines.append(f"{counted(nodes, 'node')}: {chosen.replace('_', ' ')} is {how} at {show_bytes(int(size))}")
    return knees[chosen]


def _variables(result: BenchResult, found: Found) -> None:
    """Add the variables whose values `--env` compared: of each the best value by its median bandwidth.

    Each value is measured in several runs, whose mean counts at each point.
    """
    values: dict[str, dict[str, dict[tuple[Any, ...], list[float]]]] = {}
    for row in result.rows:
        name, equals, value = str(row.get("environment") or "").partition("=")
        if equals and not row.get("wrong") and "pair" not in row:
            point = tuple(row[key] for key in ("operation", "scope", "where", "nodes", "ranks", "levels", "bytes"))
            values.setdefault(name, {}).setdefault(value, {}).setdefault(point, []).append(row["busbw_gb_s"])
    for name, by_value in values.items():
        shared = set.intersection(*(set(points) for points in by_value.values()))
        if len(by_value) < 2 or not shared:
            continue
        means = {
            value: {point: statistics.mean(figures[point]) for point in shared}
            for value, figures in by_value.items()
        }
        if any(len(figures[point]) < _REPEATED for figures in by_value.values() for point in shared):
            found.lines.append(f"{name}: its values were compared only once, so the noise is not known")
            continue
        first = next(iter(by_value))
        gains = {value: _ratio(figures, means[first]) for value, figures in means.items()}
        best = max(gains, key=lambda value: gains[value])
        others = {value: round(_ratio(means[best], means[value]), 3) for value in means if value != best}
        noise = _noise_of(by_value.values())
        variable = MeasuredVariable(best=best, others=others, date=result.date, spread=_rounded(noise))
        found.add(f"measured.variables.{name}", variable, noise)
        shown = ", ".join(f"{ratio:.2f} times that of {value or 'unset'}" for value, ratio in others.items())
        found.lines.append(f"{name}={best or '(unset)'} has {shown} (median of {counted(len(shared), 'point')})")


def _noise_of(values: Iterable[Mapping[Any, list[float]]]) -> float:
    """Return the median relative difference of the repeated figures of a point."""
    return statistics.median(
        (max(figures) - min(figures)) / statistics.mean(figures)
        for points in values
        for figures in points.values()
        if len(figures) >= _REPEATED
    )


def _ratio(ours: Mapping[Any, float], theirs: Mapping[Any, float]) -> float:
    """Return the median ratio of two values' bandwidths at the same points."""
    return statistics.median(ours[point] / theirs[point] for point in ours)


# --- thresholds, kernels, storage -------------------------------------------------------------------------------


def _speed(result: BenchResult, source: Path, found: Found) -> None:
    if result.machine.device != "cuda":
        found.lines.append(f"{source}: of CPUs; nothing follows from it")
        return
    for row in result.rows:
        key, what = _DOCTOR[row["what"]]
        step = (
            result.machine.ranks_per_node if row["what"] == "all_reduce" else 1
        )  # a node's ranks have one figure
        figures = row["ranks_rate"][::step]
        median = statistics.median(figures)
        threshold = _rounded(OF_MEDIAN * median)
        found.add(f"doctor.{key}", threshold, statistics.stdev(figures) / median if len(figures) > 1 else None)
        share = f"{100 * OF_MEDIAN:.0f} % of the median"
        found.lines.append(f"doctor.{key}: {threshold:g}, {share} {median:.4g} {what}")


def _kernels(result: BenchResult, source: Path, found: Found) -> None:
    others = sum(row["fastest"] != "reference" for row in result.rows)
    found.lines.append(f"another kernel than the reference is the fastest in {others} of {len(result.rows)} cases")


def _tuning(result: BenchResult, source: Path, found: Found) -> None:
    gains = [row["gain"] for row in result.rows if row["kept"]]
    if gains:
        gain = f"{statistics.median(gains):.2f} times the default's speed, {max(gains):.2f} at most"
        found.lines.append(f"{counted(len(gains), 'tuned product')}: {gain} (median)")
    if not any(solution[2] != "Default" for row in result.rows for solution in row["solutions"]):
        found.lines.append("torch's default is the fastest solution of every product: the table changes nothing")
    for name in dict.fromkeys(row["product"] for row in result.rows if not row["kept"]):
        found.lines.append(f"{name}: the fastest solution gives other results; torch's default stays")


def _storage(result: BenchResult, source: Path, found: Found) -> None:
    reads = [row for row in result.rows if row["operation"] == "random_read" and row["pages_per_s"]]
    if reads:
        best = max(reads, key=lambda row: row["pages_per_s"])
        found.add("storage_iops", _rounded(best["pages_per_s"]), best.get("spread"))
        what = f"pages of 4 KiB a second in random reads at depth {best['depth']}, {best['how']}"
        found.lines.append(f"storage_iops: {_rounded(best['pages_per_s']):,.0f} {what}")
    else:
        found.lines.append(f"{source}: has no random reads; nothing follows from it")


def _rounded(value: float) -> float:
    """Return a value with three digits: more are noise."""
    return float(f"{value:.3g}")
