"""`zslurm watch`: the table of runs, again and again; without a terminal a line for every change.

One question to Slurm per look, for all runs together, and from the shared view where that is young enough: ten
people who watch cost slurmctld hardly more than one. Where an answer is slow, the looks become rarer.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zslurm.checkpoint_tools.quantities import counted, show_duration
from zslurm.cli.options import SomeRuns
from zslurm.cli.run.run_rows import COLUMNS, as_row, stale_line, why
from zslurm.cli.terminal.screen import columns_of_terminal
from zslurm.cli.terminal.table import table_lines
from zslurm.core.errors import Exit
from zslurm.run.events import describe
from zslurm.run.find import find_all
from zslurm.run.index import known_runs
from zslurm.run.run_dir import RunDir
from zslurm.run.state import RunState, look_all

if TYPE_CHECKING:
    from rich.console import RenderableType

_SLOW = 10.0
"""Of the time, at most one part in so many is spent asking."""


def watch(
    runs: SomeRuns = None,
    interval: Annotated[
        float, typer.Option("-i", "--interval", min=1.0, metavar="SECONDS", help="Seconds between two looks.")
    ] = 5.0,
) -> None:
    """Show your active runs, or those that are named until they rest. Ctrl-C ends the view, not the runs.

    Without a terminal, prints a line for every change.

    Example: zslurm watch my-run
    """
    states = _looks(find_all(runs) if runs else None, interval)
    try:
        raise typer.Exit(_on_terminal(states, interval) if sys.stdout.isatty() else _as_lines(states))
    except KeyboardInterrupt:
        return


def _looks(runs: Sequence[RunDir] | None, interval_s: float) -> Iterator[list[RunState]]:
    """Yield the states of the runs, of all runs those that were active at any look, until the named ones rest."""
    seen: set[RunDir] = set()
    while True:
        started = time.monotonic()
        states = look_all(known_runs() if runs is None else runs, cached=True)
        took = time.monotonic() - started
        seen |= {state.run for state in states if state.active or runs is not None}
        yield [state for state in states if state.run in seen]
        if runs is not None and not any(state.active for state in states):
            return
        time.sleep(max(interval_s, _SLOW * took))


def _on_terminal(looks: Iterator[list[RunState]], interval_s: float) -> int:
    from rich.console import Console
    from rich.live import Live

    states: list[RunState] = []
    with Live(console=Console(highlight=False), auto_refresh=False, screen=False) as live:
        for states in looks:
            live.update(_picture(states, interval_s), refresh=True)
    return _exit_code(states)


def _picture(states: Sequence[RunState], interval_s: float) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    width = columns_of_terminal() or sys.maxsize
    table = [Text.assemble(*line) for line in table_lines(COLUMNS, [as_row(state) for state in states], width)]
    clock, runs = time.strftime("%H:%M:%S"), counted(len(states), "run")
    head = f"{clock}  {runs}, every {show_duration(interval_s)}; Ctrl-C ends the view, not the runs"
    stale = stale_line(states)
    lines: list[Any] = [Text(head, style="dim"), *([Text(stale, style="bold")] if stale else [])]
    return Group(*lines, *table)


def _as_lines(looks: Iterator[list[RunState]]) -> int:
    shown: dict[str, tuple[str, ...]] = {}
    states: list[RunState] = []
    stale = False
    for states in looks:
        for state in states:
            facts = changing_facts(state)
            before = shown.get(str(state.run.path), ())
            if news := [fact for fact in facts if fact and fact not in before]:
                print(f"{time.strftime('%H:%M:%S')}  {state.run.name}  {'  '.join(news)}", flush=True)
            shown[str(state.run.path)] = facts
        if bool(message := stale_line(states)) != stale:
            print(f"zslurm: {message or 'the Slurm controller answers again'}", file=sys.stderr, flush=True)
            stale = not stale
    return _exit_code(states)


def changing_facts(state: RunState) -> tuple[str, ...]:
    """Return what is worth a line when it changes; the step alone is not."""
    return (
        state.state + (f" ({reason})" if (reason := why(state)) else ""),
        f"job {state.job_id}" if state.job_id else "",
        f"saved step {state.checkpoint_step}" if state.checkpoint_step is not None else "",
        *(dict.fromkeys(describe(event) for event in (state.aegis.last_decision, state.last_event) if event)),
    )


def _exit_code(states: Sequence[RunState]) -> int:
    return Exit.SLURM_UNAVAILABLE if stale_line(states) else Exit.DONE
