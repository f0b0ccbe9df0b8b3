"""Run a measurement for the command line: progress on stderr, table or JSON on stdout, the result in a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from zslurm.bench.result import BenchResult, ResultWriter, default_path
from zslurm.bench.results.apply import settings_from
from zslurm.bench.results.plots import NoPlots
from zslurm.bench.results.published import lines_for
from zslurm.bench.run.launch import launch
from zslurm.bench.run.request import BenchProgress, BenchRequest
from zslurm.checkpoint_tools.quantities import counted, show_duration
from zslurm.cli.bench.measure_options import Measure
from zslurm.cli.bench.results import draw_plots, keep_measurements
from zslurm.cli.bench.tables import show_side_by_side, show_table
from zslurm.cluster.profile import LOCAL
from zslurm.cluster.site import Site, load_site
from zslurm.core import log
from zslurm.core.console import print_json, say
from zslurm.core.errors import ConfigError, Exit
from zslurm.slurm.hostlist import compress

_MOST_SKIPPED = 4
_LINE_EVERY_S = 60.0


def site_of(common: Measure) -> Site:
    """Return the profile: of this machine, if no node of a cluster is asked for and no profile is named.

    Raises:
        ConfigError, NotFound, NoProfile: there is none, or it is not valid.
    """
    if common.nodes is not None and common.nodelist is not None:
        raise ConfigError("--nodes and --nodelist exclude each other")
    if common.cluster is None and common.nodes is None and common.nodelist is None:
        return load_site(LOCAL)
    return load_site(common.cluster)


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
    site = site_of(common)
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
    _use(result, path, site, common)
    raise typer.Exit(exit_code(result))


def _use(result: BenchResult, path: Path, site: Site, common: Measure) -> None:
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
        keep_measurements(site.cluster.name, [settings_from(result, path)])


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
