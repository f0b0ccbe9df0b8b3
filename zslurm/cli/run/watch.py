"""`zslurm watch`: the table of runs, again and again; without a terminal a line for every change.

On a terminal the picture of one run or of many is drawn again at every look and every key.

One question to Slurm per look, for all runs together, and from the shared view if that is young enough: ten
people who watch cost slurmctld hardly more than one. If an answer is slow, the looks become rarer.
"""

from __future__ import annotations

import os
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from zslurm.cli.options import SomeRuns
from zslurm.cli.run.dashboard import RunPicture, draw_run, draw_runs
from zslurm.cli.run.run_rows import notify_overdue, release_held, stale_line, why
from zslurm.cli.terminal.screen import Line, encodable, print_lines
from zslurm.core.console import say
from zslurm.core.errors import Exit
from zslurm.run.events import describe
from zslurm.run.find import find_all
from zslurm.run.index import known_runs
from zslurm.run.run_dir import RunDir
from zslurm.run.state.run_state import RunState, look_all

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live


def watch(
    runs: SomeRuns = None,
    interval: Annotated[
        float, typer.Option("-i", "--interval", min=1.0, metavar="SECONDS", help="Seconds between two looks.")
    ] = 5.0,
) -> None:
    """Show your active runs, or those that are named until they rest. Ctrl-C ends the view, not the runs.

    Without a terminal, prints a line for every change. A job that Slurm holds because a node could not start it is
    released without that node.

    Example: zslurm watch my-run
    """
    named = find_all(runs) if runs else None
    on_terminal = sys.stdout.isatty()
    released: dict[str, None] = {}  # in the order in which it was done

    def note_release(line: str) -> None:
        if line not in released and not on_terminal:
            say(line)
        released[line] = None

    try:
        if on_terminal:
            states = watch_on_terminal(lambda seen: _look(named, seen, note_release), named, interval)
        else:
            states = _as_lines(_looks(named, interval, note_release))
    except KeyboardInterrupt:
        return
    finally:
        for line in released if on_terminal else ():  # the picture is gone then
            say(line)
    raise typer.Exit(Exit.SLURM_UNAVAILABLE if stale_line(states) else Exit.DONE)


def _look(
    runs: Sequence[RunDir] | None, seen: set[RunDir], note_release: Callable[[str], None]
) -> tuple[list[RunState], float]:
    """Return the states of the runs, of all runs those that were active at any look, and the seconds it took."""
    started = time.monotonic()
    states = look_all(known_runs() if runs is None else runs, cached=True)
    notify_overdue(states)
    for line in release_held(states):
        note_release(line)
    seen |= {state.run for state in states if state.active or runs is not None}
    return [state for state in states if state.run in seen], time.monotonic() - started


def _looks(
    runs: Sequence[RunDir] | None, interval_s: float, note_release: Callable[[str], None]
) -> Iterator[list[RunState]]:
    """Yield the states of the runs again and again, until the named ones rest."""
    seen: set[RunDir] = set()
    while True:
        states, took_s = _look(runs, seen, note_release)
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
    """Return what is worth a line when it changes; a step is not."""
    return (
        state.state + (f" ({reason})" if (reason := why(state)) else ""),
        f"job {state.job_id}" if state.job_id else "",
        f"saved step {state.checkpoint_step}" if state.checkpoint_step is not None else "",
        *(dict.fromkeys(describe(event) for event in (state.aegis.last_decision, state.last_event) if event)),
    )


Look = Callable[[set[RunDir]], tuple[list[RunState], float]]
"""Asks for the states of runs, given those that are shown already; also returns how long that took."""

_SLOW = 10.0
"""The inverse of the largest share of the time that is spent asking."""
_REDRAW_S = 0.25
_ESCAPES = {"\x1b[A": "up", "\x1b[B": "down", "\x1b[D": "back", "\x1b[C": "open", "\x1bOA": "up", "\x1bOB": "down"}
_NAMES = {"\r": "open", "\n": "open", "\x7f": "back", "\x1b": "back", "k": "up", "j": "down", "b": "back"}
_RUN_KEYS = "q quit   e events   l log   r look now"
_RUNS_KEYS = "q quit   arrows or j, k choose   Enter opens   r look now"


def pause_s(interval_s: float, took_s: float) -> float:
    """Return the seconds until the next look: if an answer is slow, looks become rarer."""
    return max(interval_s, _SLOW * took_s)


def watch_on_terminal(look: Look, named: Sequence[RunDir] | None, interval_s: float) -> list[RunState]:
    """Show runs until the named ones rest, or a person quits; returns their last states."""
    view = _View(interval_s, open_run=named[0] if named is not None and len(named) == 1 else None)
    view.alone = view.open_run is not None
    seen: set[RunDir] = set()
    with _keyboard() as has_keys, _live() as live:
        view.has_keys = has_keys
        while True:
            view.states, took_s = look(seen)
            view.take_pictures()
            live.update(view.draw(), refresh=True)
            if named is not None and not any(state.active for state in view.states):
                break
            if not _wait(view, live, time.monotonic() + pause_s(interval_s, took_s)):
                break
    print_lines(view.lines(whole=True))
    return view.states


def _wait(view: _View, live: Live, until: float) -> bool:
    """Handle keys until the next look; returns False if the person quits."""
    while (remaining := until - time.monotonic()) > 0:
        if not view.has_keys:
            time.sleep(remaining)
            return True
        key = _read_key(min(remaining, _REDRAW_S))
        if key in ("q", "\x04"):
            return False
        if key == "r":
            return True
        if (key and view.handle(key)) or view.resized():
            live.update(view.draw(), refresh=True)
    return True


@dataclass
class _View:
    """What is on the screen.

    Attributes:
        open_run: the run that is shown in full; None for the table.
        alone: it is the only one: there is no table to go back to.
    """

    interval_s: float
    open_run: RunDir | None
    alone: bool = False
    has_keys: bool = False
    states: list[RunState] = field(default_factory=list)
    chosen: int = 0
    panel: str = "events"
    picture: RunPicture | None = None
    size: tuple[int, int] = (0, 0)

    def handle(self, key: str) -> bool:
        """Act on a key; returns whether something changed."""
        if self.open_run is None:
            if key in ("up", "down"):
                self.chosen = min(max(self.chosen + (1 if key == "down" else -1), 0), max(len(self.states) - 1, 0))
            elif key == "open" and self.states:
                self.open_run = self.states[self.chosen].run
                self.take_pictures()
            else:
                return False
            return True
        if key in ("e", "l"):
            self.panel = "events" if key == "e" else "log"
        elif key == "back" and not self.alone:
            self.open_run = None
        else:
            return False
        return True

    def take_pictures(self) -> None:
        """Read what is drawn of the run that is open."""
        state = next((state for state in self.states if state.run == self.open_run), None)
        self.picture = RunPicture.read(state) if state is not None else None
        self.chosen = min(self.chosen, max(len(self.states) - 1, 0))

    def resized(self) -> bool:
        """Return whether the terminal has another size than that which was drawn."""
        return self.size != shutil.get_terminal_size()

    def lines(self, *, whole: bool = False) -> list[Line]:
        """Return the lines of the screen; with `whole` as they are left behind, without keys and choice."""
        width, height = self.size = shutil.get_terminal_size()
        keys = "" if whole or not self.has_keys else _RUN_KEYS if self.open_run is not None else _RUNS_KEYS
        if self.open_run is not None and keys and not self.alone:
            keys += "   b back"
        if self.open_run is not None and self.picture is not None:
            return draw_run(self.picture, width, height - whole, panel=self.panel, keys=keys)
        lines = draw_runs(
            self.states, width, height - whole, interval_s=self.interval_s, chosen=self.chosen, keys=keys
        )
        if keys and self.states:
            name = self.states[self.chosen].run.name
            return [
                [(text, f"{style} reverse".strip() if text.rstrip() == name else style) for text, style in line]
                for line in lines
            ]
        return lines

    def draw(self) -> Group:
        """Return the screen as rich draws it."""
        from rich.console import Group
        from rich.text import Text

        lines = ([(encodable(text), style) for text, style in line] for line in self.lines())
        return Group(*(Text.assemble(*line, no_wrap=True, overflow="crop") for line in lines))


def _live() -> Live:
    from rich.console import Console
    from rich.live import Live

    return Live(console=Console(highlight=False), auto_refresh=False, screen=True, redirect_stdout=False)


@contextmanager
def _keyboard() -> Iterator[bool]:
    """Have keys come as they are typed, without an echo; yields whether there is a keyboard."""
    try:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (OSError, ValueError, termios.error):
        yield False
        return
    try:
        tty.setcbreak(descriptor)
        yield True
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _read_key(wait_s: float) -> str:
    """Return a key, by its name if it is a special one; empty if none was typed."""
    ready, _, _ = select.select([sys.stdin], [], [], wait_s)
    if not ready:
        return ""
    text = os.read(sys.stdin.fileno(), 16).decode("utf-8", "replace")
    return _ESCAPES.get(text) or _NAMES.get(text[:1] or "\x04", text[:1] or "\x04")
