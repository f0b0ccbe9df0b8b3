"""`zslurm watch` on a terminal: the picture of one run or of many, drawn again at every look and every key."""

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
from typing import TYPE_CHECKING

from zslurm.cli.run.dashboard import RunPicture, draw_run, draw_runs
from zslurm.cli.terminal.screen import Line, encodable, print_lines
from zslurm.run.run_dir import RunDir
from zslurm.run.state.run_state import RunState

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live

Look = Callable[[set[RunDir]], tuple[list[RunState], float]]
"""Asks for the states of runs, given those that are shown already; also returns how long that took."""

_SLOW = 10.0
"""Of the time, at most one part in so many is spent asking."""
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
