"""What `zslurm watch` draws: one run in full, or many as a table; both as high and as wide as the terminal.

Progress bars, sparklines and heat maps are of characters. Colours repeat what the characters show.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from zslurm.checkpoint_tools.quantities import counted, show_count, show_duration
from zslurm.cli.run.run_rows import COLUMNS, as_row, note, show_mfu, stale_line, time_left
from zslurm.cli.terminal.screen import Line, cut, paragraph, shorten_to
from zslurm.cli.terminal.table import BAD, GOOD, HEAD, QUIET, STATE_STYLES, WAITS, table_lines
from zslurm.core.units import show_time
from zslurm.run.events.event import from_row
from zslurm.run.events.event_log import EventLog, time_of
from zslurm.run.metrics.rank_times import RankTimes, read_rank_times
from zslurm.run.metrics.tail import newest_steps
from zslurm.run.run_dir import RunDir
from zslurm.run.state.run_state import RunState

STEPS = 500
"""Steps that sparklines show."""
_LABEL = 12
_VALUE = 10
_EVENTS = 30
_LOG_LINES = 60
_LOG_BYTES = 1 << 15
_SERIES = (
    ("loss", "loss", lambda value: f"{value:.4f}"),
    ("lr", "learn. rate", lambda value: f"{value:.3g}"),
    ("grad_norm", "grad. norm", lambda value: f"{value:.3g}"),
    ("tokens_per_s", "tokens/s", show_count),
)


@dataclass(frozen=True)
class RunPicture:
    """What is drawn of one run.

    Attributes:
        steps: the newest rows of metrics, oldest first.
        times: step work times of the ranks, if the supervisor has measured them.
        events: the last rows of its events.
        log: the last lines of rank 0.
    """

    state: RunState
    steps: list[dict[str, Any]] = field(default_factory=list)
    times: RankTimes | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, state: RunState) -> RunPicture:
        """Read the files of a run; what is missing or damaged is left out."""
        run = state.run
        attempts = run.attempt_dirs()
        return cls(
            state,
            newest_steps(run.metrics, STEPS),
            read_rank_times(attempts[-1]) if attempts else None,
            [row for _, row in EventLog([run]).newest(_EVENTS)],
            _last_lines(run),
        )


def _last_lines(run: RunDir) -> list[str]:
    attempts = run.attempt_dirs()
    try:
        with attempts[-1].rank_log(0).open("rb") as file:
            file.seek(max(file.seek(0, 2) - _LOG_BYTES, 0))
            text = file.read().decode("utf-8", "replace")
    except (IndexError, OSError):
        return []
    lines = ["".join(c if c.isprintable() else " " for c in line) for line in text.splitlines()]
    return lines[-_LOG_LINES:]


def draw_run(picture: RunPicture, width: int, height: int, *, panel: str = "events", keys: str = "") -> list[Line]:
    """Draw one run: state, progress, sparklines, heat map, and at the bottom its last events or rank 0's log."""
    state = picture.state
    hidden = state.step is None and bool(state.not_shown)
    progress = [] if hidden else [_progress(state, width)]
    lines = [_head(state, width), *_note(state, width), *progress, *_series(picture, width)]
    foot: list[Line] = [[(cut(keys, width), QUIET)]] if keys else []
    rows_left = height - len(lines) - len(foot)
    if len(heat := _heat_map(picture.times, width)) + 4 <= rows_left:
        lines += heat
        rows_left -= len(heat)
    below = _log(picture, width) if panel == "log" else _events(picture, width)
    if rows_left >= 2:
        title = "rank 0's log" if panel == "log" else "events"
        lines += [[(title, QUIET)], *below[max(len(below) - rows_left + 1, 0) :]]
    return [*lines[: height - len(foot)], *foot]


def _head(state: RunState, width: int) -> Line:
    job = [f"job {state.job_id}"] if state.job_id else []
    attempt = [f"attempt {state.attempt}"] if state.attempt else []
    text = "  ".join([*job, *attempt, *([f"on {state.nodes}"] if state.nodes else [])])
    used = len(state.run.name) + len(state.state) + 4
    return [
        (state.run.name, HEAD),
        ("  ", ""),
        (state.state, STATE_STYLES.get(state.state, "")),
        (f"  {cut(text, max(width - used, 0))}", ""),
    ]


def _note(state: RunState, width: int) -> list[Line]:
    """Return why the run is in its state, whole if it has failed, else one line."""
    text = note(state)
    if not text:
        return []
    style = STATE_STYLES.get(state.state, "")
    if style == BAD:
        return paragraph(text, width, style="red")
    return [[(shorten_to(text, width), style if style == WAITS else QUIET)]]


def _progress(state: RunState, width: int) -> Line:
    done, total = state.step or 0, state.total_steps or 0
    share = done / total if total else 0.0
    time_left_text = f"  {time_left(state)} left" if time_left(state) else ""
    saved = f"  saved {state.checkpoint_step}" if state.checkpoint_step is not None else ""
    mfu = f"  MFU {show_mfu(state)}" if state.mfu is not None else ""
    text = f" {100 * share:3.0f} %  step {done}/{total or '?'}"
    for word in (time_left_text, saved, mfu):
        if len(text) + len(word) <= width - 10:
            text += word
    return [*bar(share, max(min(width - len(text), 100), 4)), (text, "")]


def _series(picture: RunPicture, width: int) -> list[Line]:
    if not picture.steps:
        shown = "; ".join(picture.state.not_shown)
        return [[(shorten_to(f"not shown: {shown}" if shown else "no steps yet", width), QUIET)]]
    lines: list[Line] = []
    for key, label, show in _SERIES:
        values = [float(row[key]) for row in picture.steps if _is_number(row.get(key))]
        if values:
            line = sparkline(values, width - _LABEL - _VALUE - 1)
            lines.append([(f"{label:<{_LABEL}}", QUIET), (f"{show(values[-1]):>{_VALUE}} ", HEAD), (line, "cyan")])
    return lines


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _heat_map(times: RankTimes | None, width: int) -> list[Line]:
    """Draw the step work times: a line for each rail, a cell for each node."""
    if times is None or times.median is None or times.slowest is None or len(times.seconds) < 2:
        return []
    rails = times.by_rail()
    slowest = times.slowest
    ratio = (times.seconds[slowest] or 0.0) / times.median
    head = f"step work time by rail and node: median {show_seconds(times.median)}"
    worst = f", rank {slowest} on {times.nodes[slowest]} {ratio:.2f}x"
    label = len(f"rail {len(rails) - 1} ")
    drawn = heat_map(rails, width - label)
    rows = [[(f"rail {rail}".ljust(label), QUIET), *cells] for rail, cells in enumerate(drawn)]
    return [
        [(shorten_to(head + worst, width), QUIET)],
        *rows,
        [(" " * label, ""), *heat_map_legend(width - label)],
    ]


def show_seconds(seconds: float) -> str:
    """Return a duration below a minute with three digits."""
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _events(picture: RunPicture, width: int) -> list[Line]:
    lines: list[Line] = []
    for row in picture.events:
        text = shorten_to(from_row(row).describe(), width - 10)
        lines.append([(f"{show_time(time_of(row), '%H:%M:%S')}  ", QUIET), (text, "")])
    return lines


def _log(picture: RunPicture, width: int) -> list[Line]:
    return [[(shorten_to(line, width), "")] for line in picture.log]


def draw_runs(
    states: Sequence[RunState], width: int, height: int, *, interval_s: float, chosen: int = 0, keys: str = ""
) -> list[Line]:
    """Draw many runs as a table of `height` lines; if more runs exist than fit, the ones around the chosen one."""
    clock, runs = time.strftime("%H:%M:%S"), counted(len(states), "run")
    head = f"{clock}  {runs}, every {show_duration(interval_s)}; Ctrl-C ends the view, not the runs"
    lines: list[Line] = [[(cut(head, width), QUIET)]]
    if stale := stale_line(states):
        lines.append([(shorten_to(stale, width), HEAD)])
    foot: list[Line] = [[(cut(keys, width), QUIET)]] if keys else []
    room = height - len(lines) - len(foot)
    rows = [as_row(state) for state in states]
    table = table_lines(COLUMNS, rows, width)
    if len(table) > room:
        columns = COLUMNS[:-1]  # without the notes
        table = table_lines(columns, [row[:-1] for row in rows], width)
    titles, body = table[:1], table[1:]
    if len(body) > room - 2:
        size = max(room - 2, 1)
        first = min(max(chosen - size // 2, 0), max(len(body) - size, 0))
        more = len(body) - size
        body = [*body[first : first + size], [(f"and {counted(more, 'more run')}", QUIET)]]
    return [*lines, *titles, *body, *foot]


_LEVELS = "▁▂▃▄▅▆▇█"
_SHADES = (
    (1.05, "░", GOOD),
    (1.15, "▒", ""),
    (1.3, "▓", WAITS),
    (math.inf, "█", BAD),
)
"""Of a heat map: up to which multiple of the median, the character, the style."""


def bar(share: float, width: int) -> Line:
    """Return a progress bar of `width` characters."""
    done = round(min(max(share, 0.0), 1.0) * width)
    return [("█" * done, GOOD), ("░" * (width - done), QUIET)]


def sparkline(values: Sequence[float], width: int) -> str:
    """Return values as a line of at most `width` bars, the newest at the right; means if there are more.

    Values that are not finite are left out.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return ""
    count = min(width, len(finite))
    means = []
    for index in range(count):
        chunk = finite[index * len(finite) // count : (index + 1) * len(finite) // count]
        means.append(sum(chunk) / len(chunk))
    lowest, highest = min(means), max(means)
    if highest == lowest:
        return _LEVELS[len(_LEVELS) // 2] * count
    top = len(_LEVELS) - 1
    return "".join(_LEVELS[round((value - lowest) / (highest - lowest) * top)] for value in means)


def heat_map(rows: Sequence[Sequence[float | None]], width: int) -> list[Line]:
    """Return a line for each row, with a cell for each value by its ratio to 1.

    Of values that share a cell the highest counts; one that is not known is a blank.
    """
    longest = max(map(len, rows), default=0)
    if not longest or width < 1:
        return []
    cells = min(longest, width)
    lines: list[Line] = []
    for row in rows:
        line: Line = []
        for index in range(cells):
            chunk = row[index * longest // cells : (index + 1) * longest // cells]
            finite_values = [value for value in chunk if value is not None and math.isfinite(value)]
            line.append(_cell(max(finite_values)) if finite_values else (" ", ""))
        lines.append(line)
    return lines


def heat_map_legend(width: int) -> Line:
    """Return what the characters of a heat map mean, as far as there is room."""
    line: Line = []
    used = 0
    for limit, character, style in _SHADES:
        text = f" to {limit:g}x  " if math.isfinite(limit) else " slower"
        used += len(character + text)
        if used <= width:
            line += [(character, style), (text, QUIET)]
    return line


def _cell(ratio: float) -> tuple[str, str]:
    return next((character, style) for limit, character, style in _SHADES if ratio <= limit)
