"""Tables that follow from results: which kernel a GPU takes for which sizes, and tuned matrix products.

tuning     gemm-table.json in the folder of the cluster's results (cluster/gemm_tables.py); `submit` gives it to
           every rank. A newer result of the same card and versions adds to it, others replace it
kernels    kernel-tables.json in the same folder, by operation and architecture; ranks choose by those of rank 0
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from zslurm.bench.result import BenchResult
from zslurm.checkpoint_tools.quantities import counted
from zslurm.cluster.gemm_tables import FILE, KERNEL_TABLES
from zslurm.cluster.measurements import results_folder
from zslurm.core.errors import ConfigError, ZslurmError
from zslurm.core.files import write_atomically
from zslurm.kernels.cache import with_tables
from zslurm.train.errors import ConfigError as TrainConfigError
from zslurm.train.plan.gemm_table import SCHEMA, GemmTable, TunedProduct, load_table

_REFERENCE = "reference"
_NO_END = 2**62
_CPU = "cpu"

Row = Mapping[str, Any]


def keep_tables(result: BenchResult, store: Path, *, dry_run: bool = False) -> list[str]:
    """Write the table that follows from a result, and return what was written or not, a line each.

    Args:
        result: of any benchmark; most have no table.
        store: the file of the cluster's measurements.
        dry_run: write nothing, and return what would be written.

    Raises:
        ConfigError: the rows are damaged.
        ZslurmError: a table cannot be written.
    """
    folder = results_folder(store)
    try:
        if result.benchmark == "tuning" and result.rows:
            path = folder / FILE
            text, lines = _tuned(gemm_table(result), path)
        elif result.benchmark == "kernels" and result.rows:
            if result.rows[0]["architecture"] == _CPU:
                return ["on a CPU the choice of kernels is fixed: nothing was written"]
            if not result.complete:
                return ["the tables of kernels stay as they are: not all sizes were measured"]
            path = folder / KERNEL_TABLES
            text, lines = json.dumps(with_tables(path, kernel_tables(result.rows)), indent=1), []
        else:
            return []
        if not dry_run:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text + "\n")
    except OSError as error:
        raise ZslurmError(f"{error.filename}: cannot be written: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: no tables of kernels ({error}); remove the file, and measure again") from error
    written = f"{'would write' if dry_run else 'wrote'} {path}"
    return [*lines[:-1], ": ".join([written, *lines[-1:]])]


def _tuned(table: GemmTable, path: Path) -> tuple[str, list[str]]:
    """Return a table merged with the one that is in a file, and what is to be said of it."""
    lines = []
    try:
        older = load_table(path)
        if not older.differences(table.device, table.validators):
            table = table.merged(older)
        else:
            lines.append(f"{path} was of another card or version, and is replaced")
    except TrainConfigError as error:
        if path.exists():
            lines.append(f"replaced: {error}")
    lines.append(f"{counted(len(table.results), 'result')} for {table.device}, {table.runtime}")
    return table.model_dump_json(indent=1), lines


def gemm_table(result: BenchResult) -> GemmTable:
    """Return the table of tuned products of a result.

    Raises:
        ConfigError: the rows are not what the benchmark writes.
    """
    versions = result.versions
    solutions = [solution for row in result.rows for solution in row["solutions"]]
    try:
        return GemmTable(
            schema_number=SCHEMA,
            device=result.machine.gpu or _CPU,
            torch=versions.get("torch") or "",
            runtime=f"ROCm {versions['rocm']}" if versions.get("rocm") else f"CUDA {versions.get('cuda')}",
            date=result.date,
            validators=result.rows[0]["validators"],
            products=tuple(
                TunedProduct(
                    name=row["product"], pass_name=row["pass"], dtype=row["dtype"],
                    m=row["m"], n=row["n"], k=row["k"],
                    default_tflops=row["default_tflops"], tuned_tflops=row["tflops"],
                )
                for row in result.rows
                if row["kept"]
            ),
            results=tuple(tuple(solution) for solution in solutions),  # pydantic checks the fields
            candidates=sum(solution[2] != "Default" for solution in solutions),
        )  # fmt: skip
    except ValidationError as error:
        raise ConfigError(f"torch's results are unexpected: {error.errors()[0]['msg']}; measure again") from error


def kernel_tables(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Return the table of each operation's folder, in the form that kernels/dispatch.py describes."""
    contents: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(row["operation"] for row in rows):
        folder, _, suffix = name.partition(".")
        of_operation = [row for row in rows if row["operation"] == name]
        rules = {of_operation[0]["architecture"]: kernel_rules(of_operation)}
        if suffix:
            contents.setdefault(folder, {})[suffix] = rules
        else:
            contents[folder] = rules
    return contents


def kernel_rules(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rules of one operation: by format, along the axis of its cases.

    Between two sizes with different winners the reference is taken, if it is one of the two: what was not measured
    is not assumed to be faster. Below the smallest and above the largest size holds what was measured there.
    """
    by_format = groupby(sorted(rows, key=_format), key=_format)
    return [rule for name, cases in by_format for rule in _along_axis(name, list(cases))]


def _format(row: Row) -> str:
    return str(row["sizes"]["dtype"])


def _along_axis(dtype: str, rows: Sequence[Row]) -> list[dict[str, Any]]:
    axis = rows[0]["axis"]
    points = sorted((int(row["sizes"][axis]), str(row["fastest"])) for row in rows)
    rules: list[dict[str, Any]] = []
    lowest = 0
    for index, (size, winner) in enumerate(points):
        following = points[index + 1] if index + 1 < len(points) else None
        if following is not None and following[1] == winner:
            continue
        if following is None:
            highest = _NO_END
        elif winner == _REFERENCE:
            highest = following[0] - 1
        else:
            highest = size
        if highest >= lowest:
            rules.append({"when": {"dtype": dtype, axis: [lowest, highest]}, "use": winner})
        lowest = highest + 1
    return rules
