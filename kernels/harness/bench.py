"""Time every implementation of every operation on its cases, and make the tables that dispatch reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from zslurm.kernels.arch import CPU, Arch
from zslurm.kernels.cache import write_table
from zslurm.kernels.case import Case, benchmarks_of
from zslurm.kernels.dispatch import REFERENCE, Operation, failed_to_start, forget_tables, operations
from zslurm.kernels.harness.timing import medians

_WORTH = 0.98
"""Another implementation is taken if it needs less than this share of the reference's time."""

_NO_END = 2**62


@dataclass(frozen=True)
class MeasuredCase:
    """What was timed of one case.

    Attributes:
        axis: the key of `sizes` along which implementations cross over.
        seconds: of one call, by implementation, the reference among them.
        flops: of one call; bytes: that it moves at least; 0 if that is not known.
        missing: implementations that were not timed, and why.
    """

    operation: str
    case: str
    axis: str
    sizes: dict[str, Any]
    seconds: dict[str, float]
    flops: float
    bytes: float
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def fastest(self) -> str:
        """Return the implementation to take: the reference, unless another one is clearly faster."""
        best = min(self.seconds, key=lambda name: self.seconds[name])
        return best if self.seconds[best] < _WORTH * self.seconds[REFERENCE] else REFERENCE


def bench_all(device: torch.device, *, small: bool, only: Sequence[str] = ()) -> Iterator[MeasuredCase]:
    """Time all operations on a device, or those whose folder is named."""
    for operation in operations().values():
        if only and operation.name.partition(".")[0] not in only:
            continue
        for case in benchmarks_of(operation.name, small=small):
            yield measure(operation, case, device)


def measure(operation: Operation, case: Case, device: torch.device) -> MeasuredCase:
    """Time the reference and every other implementation that takes the operands and can start."""
    call = case.make(device)
    runs, missing = {}, {}
    for implementation in operation.all():
        lacks = implementation.supports(*call.args(), **call.kwargs)
        if lacks is not None:
            missing[implementation.name] = f"does not take {lacks}"
            continue
        run = partial(_call, implementation.run, call)
        try:
            run()
        except Exception as error:
            if not failed_to_start(error):
                raise
            missing[implementation.name] = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            runs[implementation.name] = run
    return MeasuredCase(
        operation=operation.name,
        case=case.name,
        axis=case.axis,
        sizes=dict(operation.sizes(*call.args(), **call.kwargs)),
        seconds=medians(runs, device),
        flops=case.flops,
        bytes=case.bytes,
        missing=missing,
    )


def _call(run: Any, call: Any) -> None:
    run(*call.args(), **call.kwargs)


def rules(measured: Iterable[MeasuredCase]) -> list[dict[str, Any]]:
    """Return the rules of one operation: by format, along the axis of its cases.

    Between two sizes with different winners the reference is taken, if it is one of the two: what was not measured
    is not assumed to be faster. Below the smallest and above the largest size holds what was measured there.
    """
    by_format = groupby(sorted(measured, key=_format), key=_format)
    return [rule for name, cases in by_format for rule in _along_axis(name, list(cases))]


def _format(case: MeasuredCase) -> str:
    return str(case.sizes["dtype"])


def _along_axis(dtype: str, cases: list[MeasuredCase]) -> list[dict[str, Any]]:
    axis = cases[0].axis
    points = sorted((int(case.sizes[axis]), case.fastest) for case in cases)
    rules: list[dict[str, Any]] = []
    lowest = 0
    for index, (size, winner) in enumerate(points):
        following = points[index + 1] if index + 1 < len(points) else None
        if following is not None and following[1] == winner:
            continue
        if following is None:
            highest = _NO_END
        elif winner == REFERENCE:
            highest = following[0] - 1
        else:
            highest = size
        if highest >= lowest:
            rules.append({"when": {"dtype": dtype, axis: [lowest, highest]}, "use": winner})
        lowest = highest + 1
    return rules


def tables(measured: Sequence[MeasuredCase], arch: Arch) -> dict[str, dict[str, Any]]:
    """Return what goes into the table of each folder, in the form that dispatch.py describes."""
    contents: dict[str, dict[str, Any]] = {}
    names = dict.fromkeys(measurement.operation for measurement in measured)
    for name in names:
        folder, _, suffix = name.partition(".")
        own_rules = {arch.name: rules(measurement for measurement in measured if measurement.operation == name)}
        if suffix:
            contents.setdefault(folder, {})[suffix] = own_rules
        else:
            contents[folder] = own_rules
    return contents


def write_tables(measured: Sequence[MeasuredCase], arch: Arch) -> list[Path]:
    """Write the tables of a GPU into the user's cache directory, from which dispatch reads them from now on.

    Raises:
        OSError: the directory cannot be written.
        ValueError: the architecture is the CPU, whose choices are fixed, so that runs repeat bit by bit.
    """
    if arch == CPU:
        raise ValueError("no table is kept for a CPU: its choices are fixed, so that runs repeat bit by bit")
    files = [write_table(arch.name, folder, table) for folder, table in tables(measured, arch).items()]
    forget_tables()
    return files
