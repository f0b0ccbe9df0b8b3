"""`zslurm watch`: the table of runs, again and again; without a terminal a line for every change.

One question to Slurm per look, for all runs together, and from the shared view if that is young enough: ten
people who watch cost slurmctld hardly more than one. If an answer is slow, the looks become rarer.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from zslurm.cli.options import SomeRuns
from zslurm.cli.run.run_rows import stale_line, why
from zslurm.cli.run.watch_terminal import pause_s, watch_on_terminal
from zslurm.core.errors import Exit
from zslurm.run.events import describe
from zslurm.run.find import find_all
from zslurm.run.index import known_runs
from zslurm.run.run_dir import RunDir
from zslurm.run.state.run_state import RunState, look_all


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
    named = find_all(runs) if runs else None
    try:
        if sys.stdout.isatty():
            states = watch_on_terminal(lambda seen: _look(named, seen), named, interval)
        else:
            states = _as_lines(_looks(named, interval))
    except KeyboardInterrupt:
        return
    raise typer.Exit(Exit.SLURM_UNAVAILABLE if stale_line(states) else Exit.DONE)


def _look(runs: Sequence[RunDir] | None, seen: set[RunDir]) -> tuple[list[RunState], float]:
    """Return the states of the runs, of all runs those that were active at any look, and the seconds it took."""
    started = time.monotonic()
    states = look_all(known_runs() if runs is None else runs, cached=True)
    seen |= {state.run for state in states if state.active or runs is not None}
    return [state for state in states if state.run in seen], time.monotonic() - started


def _looks(runs: Sequence[RunDir] | None, interval_s: float) -> Iterator[list[RunState]]:
    """Yield the states of the runs again and again, until the named ones rest."""
    seen: set[RunDir] = set()
    while True:
        states, took_s = _look(runs, seen)
        yield states
        if runs is not None and not any(state.active for state in states):
            return
        time.sleep(pause_s(interval_s, took_s))


def _as_lines(looks: Iterator[list[RunState]]) -> list[RunState]:
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
    return states


def changing_facts(state: RunState) -> tuple[str, ...]:
    """Return what is worth a line when it changes; the step alone is not."""
    return (
        state.state + (f" ({reason})" if (reason := why(state)) else ""),
        f"job {state.job_id}" if state.job_id else "",
        f"saved step {state.checkpoint_step}" if state.checkpoint_step is not None else "",
        *(dict.fromkeys(describe(event) for event in (state.aegis.last_decision, state.last_event) if event)),
    )
