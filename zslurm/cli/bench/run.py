"""Run a measurement for the command line: progress on stderr, table or JSON on stdout, the result in a file.

The options that all measurements of `zslurm bench` share are here as well, and how their values are read.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer import Option

from zslurm.bench.calibration import check_writable
from zslurm.bench.result import BenchResult, ResultWriter, default_path
from zslurm.bench.results.apply import settings_from
from zslurm.bench.results.plots import NoPlots
from zslurm.bench.results.published import lines_for
from zslurm.bench.run.launch import launch
from zslurm.bench.run.request import BenchProgress, BenchRequest
from zslurm.checkpoint_tools.quantities import counted, show_duration
from zslurm.cli.bench.results import draw_plots, keep_measurements
from zslurm.cli.bench.tables import show_side_by_side, show_table
from zslurm.cli.options import Cluster, Json
from zslurm.cluster.measurements import read_measurements
from zslurm.cluster.profile import LOCAL, default_name, find_profile, measured_path
from zslurm.cluster.site import load_site
from zslurm.core import log
from zslurm.core.console import print_json, say
from zslurm.core.errors import ConfigError, Exit
from zslurm.core.units import parse_size
from zslurm.slurm.hostlist import compress

_MOST = 1 << 20
_DIGITS = 20


@dataclass(frozen=True)
class Measure:
    """Where to measure, for how long, and what becomes of the result: the options that all measurements share."""

    cluster: Cluster = None
    nodes: Annotated[
        int | None, Option(metavar="N", min=1, help="As a Slurm job on N nodes; default: on this machine.")
    ] = None
    nodelist: Annotated[str | None, Option(metavar="LIST", help="As a Slurm job on these nodes.")] = None
    ranks: Annotated[
        int | None, Option(metavar="R", min=1, help="Ranks on each node; default: one for each GPU, two on CPUs.")
    ] = None
    quick: Annotated[bool, Option("--quick", help="Measure a few points only.")] = False
    minutes: Annotated[
        float | None,
        Option(metavar="M", min=0.01, help="Measure what fits into so many minutes, the shortest points first."),
    ] = None
    out: Annotated[
        Path | None, Option(metavar="FILE", help="Write the result here; default: in the user's state directory.")
    ] = None
    plot: Annotated[Path | None, Option(metavar="DIR", help="Draw plots of the result there (SVG and PNG).")] = (
        None
    )
    apply: Annotated[
        bool, Option("--apply", help="Keep what follows from the result for runs on the cluster.")
    ] = False
    json: Json = False

    @property
    def on_cluster(self) -> bool:
        """Return whether nodes of a cluster are asked for."""
        return self.nodes is not None or self.nodelist is not None

    @property
    def profile(self) -> str:
        """Return the name of the profile: this machine's, if no node and no profile is named."""
        return self.cluster or (default_name() if self.on_cluster else LOCAL)


def measuring(*left_out: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of `Measure`, which it gets as its argument `measure`, without those left out."""
    hints = get_type_hints(Measure, include_extras=True)
    shared = [
        Parameter(option.name, Parameter.KEYWORD_ONLY, default=option.default, annotation=hints[option.name])
        for option in fields(Measure)
        if option.name not in left_out
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        annotations = get_type_hints(command, include_extras=True)
        parameters = [
            parameter.replace(annotation=annotations[name])
            for name, parameter in signature(command).parameters.items()
            if name != "measure"
        ]

        @wraps(command)
        def with_measure(**values: Any) -> None:
            measure = Measure(**{option.name: values.pop(option.name) for option in shared})
            command(**values, measure=measure)

        with_measure.__signature__ = Signature([*parameters, *shared])  # type: ignore[attr-defined]
        with_measure.__annotations__ = {option.name: option.annotation for option in (*parameters, *shared)}
        return with_measure

    return decorate


def chosen(option: str, given: list[str] | None, known: Sequence[str]) -> list[str]:
    """Return the names that an option selects, in the order of `known`; all without it.

    Raises:
        ConfigError: one is not known.
    """
    if unknown := [name for name in given or [] if name not in known]:
        raise ConfigError(f"{option} {unknown[0]}: expected one of {', '.join(known)}")
    return [name for name in known if not given or name in given]


def format_of(given: str, known: Sequence[str]) -> str:
    """Return a format of numbers.

    Raises:
        ConfigError: it is not known.
    """
    if given not in known:
        raise ConfigError(f"--dtype {given}: expected one of {', '.join(known)}")
    return given


def sizes_between(smallest: str, largest: str, *, factor: int) -> list[int]:
    """Return sizes in bytes, each `factor` times the one before, and the largest.

    Raises:
        ConfigError: these are no sizes, or the first is the larger one.
    """
    least, most = size_of("--min", smallest), size_of("--max", largest)
    if least > most:
        raise ConfigError(f"--min {smallest} is more than --max {largest}")
    sizes = [least]
    while sizes[-1] * factor <= most:
        sizes.append(sizes[-1] * factor)
    return sizes if sizes[-1] == most else [*sizes, most]


def size_of(option: str, text: str) -> int:
    """Return a size in bytes.

    Raises:
        ConfigError: it is none; the message names the option.
    """
    try:
        return parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None


def numbers(option: str, given: str | None) -> list[int] | None:
    """Return a list such as "512,1024"; None without the option.

    Raises:
        ConfigError: it has something else than whole numbers from 1 to 2^20.
    """
    if given is None:
        return None
    parts = [word.strip().replace("_", "") for word in given.split(",")]
    # Python reads no number of more than 4,300 digits.
    if not all(word.isdecimal() and len(word) <= _DIGITS and 0 < int(word) <= _MOST for word in parts):
        raise ConfigError(
            f"{option} {given:.40}: expected numbers from 1 to {_MOST:,} with commas, such as 512,1024"
        )
    return list(dict.fromkeys(int(word) for word in parts))


_MOST_SKIPPED = 4
_LINE_EVERY_S = 60.0


def run_benchmark(
    name: str,
    options: dict[str, Any],
    common: Measure,
    *,
    environments: Sequence[Mapping[str, str]] = ({},),
    show: Callable[[BenchResult], None] | None = None,
) -> None:
    """Measure, print, write, and leave with the documented exit code.

    Args:
        name: of the benchmark.
        options: of it, as JSON has them.
        common: the options that all share.
        environments: see `BenchRequest`.
        show: prints the result on a terminal; default: a table of the benchmark's columns.

    Raises:
        typer.Exit: always: 0, 5 if data was wrong, 75 if it was interrupted and a part was kept.
        ZslurmError: nothing was measured.
    """
    if common.nodes is not None and common.nodelist is not None:
        raise ConfigError("--nodes and --nodelist exclude each other")
    site = load_site(common.profile)
    if common.apply:  # before minutes of measuring
        find_profile(common.profile)
        read_measurements(store := measured_path(common.profile), common.profile)
        check_writable(store)
    path = (common.out or default_path(name, site.cluster.name)).absolute()
    request = BenchRequest(
        benchmark=name,
        options=options,
        command=["zslurm", *sys.argv[1:]],
        nodes=common.nodes,
        nodelist=common.nodelist,
        ranks=common.ranks,
        minutes=common.minutes,
        environments=environments,
    )
    log.set_up()
    try:
        with log.detailed("zslurm.bench"):
            result = launch(request, site, ResultWriter(path), BenchShown())
    except KeyboardInterrupt:
        raise typer.Abort from None
    if common.json:
        print_json(result.model_dump(mode="json"))
    else:
        (show_side_by_side if len(environments) > 1 else show or show_table)(result)
    for line in summary(result):
        say(line)
    say(f"result: {path}")
    _use(result, path, common)
    raise typer.Exit(exit_code(result))


def _use(result: BenchResult, path: Path, common: Measure) -> None:
    """Print others' figures with the result, draw it, and keep what follows from it for runs, as asked.

    Raises:
        ZslurmError: the measurements or the plots cannot be written.
    """
    for line in lines_for(result):
        say(line)
    if common.plot is not None:
        try:
            draw_plots(result, path, common.plot)
        except NoPlots as error:
            say(str(error))
    if common.apply:
        keep_measurements(common.profile, [settings_from(result, path)])


def exit_code(result: BenchResult) -> Exit:
    """Return the documented exit code of a result."""
    if not result.complete:
        return Exit.INTERRUPTED
    return Exit.CHECK_FAILED if any(row.get("wrong") for row in result.rows) else Exit.DONE


class BenchShown(BenchProgress):
    """A line that is replaced on a terminal; elsewhere a line a minute."""

    def __init__(self) -> None:
        self._shown = time.monotonic()

    def planned(self, points: int, seconds: float) -> None:
        """Print how much is to be measured."""
        say(f"{counted(points, 'point')}, about {show_duration(seconds)}")

    def advanced(self, done: int, points: int, left_s: float) -> None:
        """Print how far the measurement is."""
        text = f"{done} of {counted(points, 'point')}; about {show_duration(left_s)} left"
        if sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="\n" if done == points else "", file=sys.stderr, flush=True)
        elif time.monotonic() - self._shown > _LINE_EVERY_S:
            self._shown = time.monotonic()
            say(text)


def summary(result: BenchResult) -> list[str]:
    """Return what a reader must know in addition to the table, a line each."""
    lines = []
    by_reason: dict[str, int] = {}
    for skipped in result.skipped:
        by_reason[skipped.reason] = by_reason.get(skipped.reason, 0) + 1
    shown = list(by_reason.items())
    for reason, count in shown[:_MOST_SKIPPED]:
        lines.append(f"skipped {counted(count, 'point')}: {reason}")
    if len(shown) > _MOST_SKIPPED:
        remaining = sum(count for _, count in shown[_MOST_SKIPPED:])
        lines.append(f"skipped {counted(remaining, 'further point')} (--json has all, with the reasons)")
    lines += [*result.findings, *result.notes]
    if result.lost_nodes:
        lines.append(f"lost nodes: {compress(result.lost_nodes)}; look at them with `zslurm doctor --nodelist`")
    return lines
