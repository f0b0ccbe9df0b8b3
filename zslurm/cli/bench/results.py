"""`zslurm bench compare`, `plot` and `apply`: what results show, and what follows from them for the profile."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from zslurm.bench.measurement import BENCHMARKS
from zslurm.bench.result import BenchResult, read_result
from zslurm.bench.results.apply import Found, settings_from, usable_rows
from zslurm.bench.results.compare import FigureChange, ResultComparison, compare
from zslurm.bench.results.plots import draw
from zslurm.bench.results.tables import keep_tables
from zslurm.checkpoint_tools.quantities import show_bytes
from zslurm.cli.options import Cluster, Json
from zslurm.cli.terminal.table import print_table
from zslurm.cli.values import print_measurements
from zslurm.cluster.measurements import Measurements, StoredValue, read_measurements, write_measurements
from zslurm.cluster.profile import default_name, find_profile, measured_path
from zslurm.core.console import print_json, say
from zslurm.core.errors import CheckFailed, ConfigError, Exit

File = Annotated[Path, Argument(metavar="FILE", help="A result of `zslurm bench`.")]


def compare_results(
    first: Annotated[Path, Argument(metavar="A", help="A result of `zslurm bench`.")],
    second: Annotated[Path, Argument(metavar="B", help="Another of the same benchmark.")],
    changed: Annotated[bool, Option("--changed", help="Show only the rows that changed.")] = False,
    strict: Annotated[bool, Option("--strict", help="Exit with 5 if a row is worse.")] = False,
    json: Json = False,
) -> None:
    """Compare two results of one benchmark row by row, and tell changes from noise.

    Example: zslurm bench compare before.json after.json --changed
    """
    results = [read_result(path) for path in (first, second)]
    with usable_rows(second):
        comparison = compare(*results)
    if json:
        facts = [
            asdict(change) | {"key": dict(change.key), "ratio": change.ratio} for change in comparison.changes
        ]
        print_json(asdict(comparison) | {"changes": facts})
    else:
        _print_comparison(comparison, BENCHMARKS[results[0].benchmark].unit, only_changed=changed)
    for line in comparison.warnings:
        say(f"note: {line}")
    if comparison.only_first or comparison.only_second:
        say(
            f"note: not compared: {comparison.only_first} rows of the first alone, "
            f"{comparison.only_second} of the second"
        )
    say(comparison.summary)
    if strict and comparison.count("worse"):
        raise typer.Exit(Exit.CHECK_FAILED)


def _print_comparison(found: ResultComparison, unit: str, *, only_changed: bool) -> None:
    changes = [change for change in found.changes if not only_changed or change.outcome in ("better", "worse")]
    names = list(dict.fromkeys(name for change in changes for name, _ in change.key))
    # A column that is the same in all rows identifies none.
    names = [name for name in names if len({dict(change.key).get(name) for change in changes}) > 1] or names[:1]
    columns = [*names, f"first, {unit}", "second", "ratio", "noise", "outcome"]
    print_table(columns, [_row(measured_row, names) for measured_row in changes])


def _row(change: FigureChange, names: list[str]) -> list[str]:
    values = dict(change.key)
    noise = "not known" if change.noise is None else f"{100 * change.noise:.1f} %"
    figures = [f"{change.before:.4g}", f"{change.after:.4g}", f"{change.ratio:.3f}", noise]
    return [*(_cell(name, values.get(name)) for name in names), *figures, change.outcome]


def _cell(name: str, value: Any) -> str:
    return "-" if value is None else show_bytes(value) if name == "bytes" else str(value)


def plot_result(
    file: File, folder: Annotated[Path, Argument(metavar="DIR", help="Where the plots go; it is made.")]
) -> None:
    """Draw a result as SVG and PNG: bandwidth over size, heat maps of matrix products, memory, peers.

    Example: zslurm bench plot collectives.json plots
    """
    draw_plots(read_result(file), file, folder)


def draw_plots(result: BenchResult, file: Path, folder: Path) -> None:
    """Draw a result, which is in `file`, and name the plots on stderr.

    Raises:
        ConfigError: its rows are damaged.
        ZslurmError: matplotlib is not installed, or the folder cannot be written.
    """
    with usable_rows(file):
        written = draw(result, folder)
    for path in written:
        say(f"plot: {path}")
    if not written:
        say(f"no plots: there are none of {result.benchmark}, or the result has no rows")


def apply(
    files: Annotated[list[Path], Argument(metavar="FILE...", help="Results of `zslurm bench`.")],
    cluster: Cluster = None,
    out: Annotated[
        Path | None, Option(metavar="FILE", help="Write the values here; default: next to the cluster's profile.")
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Print what would be written, and write nothing.")] = False,
    json: Json = False,
) -> None:
    """Keep what follows from results for the runs of a cluster: buckets, levels, storage, the doctor's limits.

    Example: zslurm bench apply collectives.json speed.json
    """
    results = [(read_result(path), path) for path in files]
    name = cluster or _cluster_of([result for result, _ in results])
    settings = [settings_from(result, path.absolute()) for result, path in results]
    keep_measurements(name, settings, out=out, dry_run=dry_run, json=json)


def _cluster_of(results: list[BenchResult]) -> str:
    """Return the profile that the results were measured with.

    Raises:
        ConfigError: they are of several.
    """
    names = sorted({result.machine.cluster for result in results})
    if len(names) > 1:
        raise ConfigError(f"results of several clusters ({', '.join(names)}): name the profile with --cluster")
    return names[0] if names else default_name()


def keep_measurements(
    name: str, found: list[Found], *, out: Path | None = None, dry_run: bool = False, json: bool = False
) -> None:
    """Write values into the measurements of a profile, or into the file `out`.

    Raises:
        CheckFailed: there is nothing to write.
        NotFound: there is no such profile.
        ConfigError: the measurements that are there cannot be used.
        ZslurmError: the file cannot be written.
    """
    find_profile(name)
    values: dict[str, StoredValue] = {}
    for setting in found:
        for line in setting.lines:
            say(line)
        values |= setting.values
    path = out or measured_path(name)
    tables = [line for setting in found for line in keep_tables(setting.result, path, dry_run=dry_run)]
    for line in tables:
        say(line)
    if not values and tables:
        return
    if not values:
        raise CheckFailed("nothing in the results is for a cluster; the lines above have the reasons")
    if json:
        print_json({key: value.model_dump(mode="json") for key, value in values.items()})
    elif dry_run:
        print_measurements(values)
    if dry_run:
        return
    before = read_measurements(path, name) or Measurements(profile=name)
    write_measurements(path, before.with_values(values))
    say(f"wrote {path}; `zslurm cluster show {name} --measured` prints the whole")
