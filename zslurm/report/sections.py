"""A report from the facts of its runs: which figures, tables and plots it has, and in which order."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zslurm.checkpoint_tools.quantities import counted, show_bytes, show_count, show_duration
from zslurm.core.redact import redact
from zslurm.core.units import show_time, show_value
from zslurm.report.comparison import compare
from zslurm.report.curves import curve_sections, curves_together
from zslurm.report.data import data_sections
from zslurm.report.efficiency import median
from zslurm.report.page_parts import (
    Bullets,
    Drawing,
    Fold,
    Item,
    PageSection,
    PageTable,
    ReportPage,
    RunPart,
    Text,
    Tile,
)
from zslurm.report.plots import Marker, PlotBlock, band
from zslurm.report.run_facts import RunFacts
from zslurm.report.scores import score_sections
from zslurm.report.timeline import PARTS, Attempt, Timeline
from zslurm.run.events.event_text import describe_cause
from zslurm.run.program_signals import NO_CHECKPOINTS

_MOST_ATTEMPTS = 40
_MOST_CHECKPOINTS = 20
_LOOKS = {"completed": "good", "running": "good", "failed": "bad", "lost": "bad", "out-of-memory": "bad"}


def build(runs: Sequence[RunFacts]) -> ReportPage:
    """Return the report of one run, or of several side by side."""
    names = ", ".join(facts.run.name for facts in runs)
    made = show_time(max((facts.made for facts in runs), default=time.time()))
    return ReportPage(names, made, list(_together(runs)) if len(runs) > 1 else [], [_run(facts) for facts in runs])


def _run(facts: RunFacts) -> RunPart:
    sections = [
        *curve_sections(facts),
        *data_sections(facts),
        *score_sections(facts),
        PageSection("Where the time went", list(_time(facts))),
        PageSection("Faults and actions", list(_happenings(facts))),
        PageSection("Checkpoints", list(_checkpoints(facts))),
        PageSection("Efficiency of the job", list(_efficiency(facts))),
        PageSection("Environment and configuration", list(_environment(facts))),
    ]
    look = _LOOKS.get(facts.state.state, "")
    return RunPart(
        facts.run.name, facts.state.state, look, facts.cause, list(_tiles(facts)), list(_notes(facts)), sections
    )


def _tiles(facts: RunFacts) -> Iterator[Tile]:
    state, steps = facts.state, facts.metrics.steps
    if state.step is not None:
        of = f" of {state.total_steps:,}" if state.total_steps else ""
        yield Tile("steps", f"{state.step:,}{of}")
    if len(steps.get("tokens", ())):
        yield Tile("tokens", show_count(float(steps["tokens"][-1])))
    if state.loss is not None:
        yield Tile("loss", f"{state.loss:.4f}")
    if state.evaluation_loss is not None:
        yield Tile("validation loss", f"{state.evaluation_loss:.4f}")
    if (rate := median(facts.metrics, "tokens_per_s")) is not None:
        yield Tile("tokens/s", show_count(rate))
    if (mfu := median(facts.metrics, "mfu")) is not None:
        yield Tile("MFU", f"{100 * mfu:.1f} %")
    line = facts.timeline
    if line.goodput is not None:
        yield Tile("goodput", f"{100 * line.goodput:.1f} %")
        yield Tile("wall time", show_duration(line.wall_s))
    if line.attempts:
        yield Tile("attempts", str(len(line.attempts)))


def _notes(facts: RunFacts) -> Iterator[str]:
    """Yield what a reader has to know about the report itself."""
    if facts.state.not_shown:
        yield f"The program of this run shows {'; '.join(facts.state.not_shown)}."
    if facts.state.active:
        yield f"The run is {facts.state.state}: this is how it was when the report was made."
    if damaged := facts.metrics.damaged:
        yield f"{counted(damaged, 'line')} of metrics.jsonl could not be read and {_were(damaged)} left out."
    if damaged := facts.damaged_events:
        yield f"{counted(damaged, 'line')} of the run's events could not be read and {_were(damaged)} left out."
    if not facts.config:
        yield "The configuration (config.json) could not be read."
    without = [attempt.number for attempt in facts.timeline.attempts if attempt.outcome == "no end recorded"]
    if without:
        numbers = ", ".join(map(str, without[:8])) + (" and more" if len(without) > 8 else "")
        yield f"No end was recorded of attempt {numbers}; the last sign of life counts as the end."
    recorded = {attempt.number for attempt in facts.timeline.attempts}
    if lost := [
        number
        for number in (known_attempt.number for known_attempt in facts.run.attempt_dirs())
        if number not in recorded
    ]:
        yield f"Of attempt {', '.join(map(str, lost[:8]))} there is a directory and no record of when it ran."


def _were(count: int) -> str:
    return "was" if count == 1 else "were"


# --- where the time went ---------------------------------------------------------------------------------------


def _time(facts: RunFacts) -> Iterator[Item]:
    line = facts.timeline
    if not line.attempts:
        yield Text("No attempt of the run was recorded.")
        return
    if line.goodput is not None and line.goodput_with_queue is not None:
        queue = line.seconds.get("queue", 0.0)
        with_queue = f", and {100 * line.goodput_with_queue:.1f} % with the time in the queue" if queue > 0 else ""
        yield Text(
            f"Goodput is {100 * line.goodput:.1f} %: this share of the time on the nodes became steps that were "
            f"kept{with_queue}."
        )
    yield Drawing(_goodput_band(line))
    rows = [
        (
            PARTS[time_part],
            show_duration(line.seconds[time_part]),
            f"{100 * line.seconds[time_part] / line.wall_s:.1f} %",
        )
        for time_part in PARTS
        if _is_shown(line, time_part)
    ]
    looks = [f"p-{time_part}" for time_part in PARTS if _is_shown(line, time_part)]
    yield PageTable(("part of the wall time", "time", "share"), rows, numbers=("time", "share"), looks=looks)
    yield Drawing(_attempt_bands(facts))
    shown = line.attempts[-_MOST_ATTEMPTS:]
    if len(shown) < len(line.attempts):
        yield Text(f"The last {len(shown)} of {counted(len(line.attempts), 'attempt')}:")
    columns = ("attempt", "began", "time", "nodes", "steps", "lost", "end")
    yield PageTable(columns, [_attempt_row(attempt) for attempt in shown], numbers=("attempt", "time", "lost"))


def _is_shown(line: Timeline, part: str) -> bool:
    """Return whether a part of the time is worth a row: it took a second, or a thousandth of all time."""
    seconds = line.seconds.get(part, 0.0)
    return seconds >= 1 or seconds > line.wall_s / 1000


def _goodput_band(line: Timeline) -> Any:
    blocks, at = [], 0.0
    for time_part in PARTS:
        if seconds := line.seconds.get(time_part, 0.0):
            text = f"{PARTS[time_part]}: {show_duration(seconds)}, {100 * seconds / line.wall_s:.1f} %"
            blocks.append(PlotBlock(at, at + seconds, f"p-{time_part}", text))
            at += seconds
    return band([("all time", blocks)], 0.0, line.wall_s, _duration_ticks(0.0, line.wall_s))


def _duration_ticks(begin: float, end: float) -> list[Marker]:
    return [
        Marker(begin + share * (end - begin), show_duration(share * (end - begin)))
        for share in (0, 0.25, 0.5, 0.75)
    ]


def _attempt_bands(facts: RunFacts) -> Any:
    """Return a row for each attempt, with the faults in it, over the time of the clock."""
    line = facts.timeline
    shown = line.attempts[-_MOST_ATTEMPTS:]
    numbers = {attempt.number for attempt in shown}
    spans = [span for span in line.spans if span.attempt in numbers]
    begin, end = min(span.begin for span in spans), max(span.end for span in spans)
    rows = []
    for attempt in shown:
        blocks = [
            PlotBlock(span.begin, span.end, f"p-{span.part}", f"{PARTS[span.part]}: {show_duration(span.seconds)}")
            for span in attempt.spans
        ]
        blocks += [
            PlotBlock(happening.time, happening.time, "p-fault", happening.text)
            for happening in facts.happenings
            if happening.sort == "fault" and happening.attempt == attempt.number and begin <= happening.time <= end
        ]
        blocks += [
            PlotBlock(save.time, save.time, "p-save", f"checkpoint of step {save.step}")
            for save in facts.checkpoints[-200:]
            if attempt.began <= save.time <= attempt.ended
        ]
        rows.append((f"attempt {attempt.number}", blocks))
    ticks = [Marker(begin + share * (end - begin), _clock(begin + share * (end - begin), end - begin)) for share in
             (0, 0.25, 0.5, 0.75)]  # fmt: skip
    return band(rows, begin, end, ticks)


def _clock(when: float, span: float) -> str:
    return show_time(when, "%m-%d %H:%M" if span > 86_400 else "%H:%M" if span > 3600 else "%H:%M:%S")


def _attempt_row(attempt: Attempt) -> tuple[str, ...]:
    steps = "-" if attempt.first_step is None else f"{attempt.first_step}-{attempt.last_step}"
    code = "" if attempt.exit_code in (None, 0) else f" (exit code {attempt.exit_code})"
    cause = f": {redact(describe_cause(attempt.cause))}" if attempt.cause else ""
    ranks = f", {counted(attempt.world_size, 'rank')}" if attempt.world_size else ""
    return (
        str(attempt.number),
        show_time(attempt.began),
        show_duration(attempt.ended - attempt.began),
        f"{attempt.nodes or '-'}{ranks}",
        steps,
        str(attempt.lost) if attempt.lost else "-",
        f"{attempt.outcome}{code}{cause}",
    )


# --- the other sections ----------------------------------------------------------------------------------------


def _happenings(facts: RunFacts) -> Iterator[Item]:
    if not facts.happenings:
        yield Text("Nothing happened that the supervisor recorded.")
        return
    faults = sum(happening.sort == "fault" for happening in facts.happenings)
    omitted = (
        f" {facts.left_out} older ones are left out; `zslurm logs --events` shows all." if facts.left_out else ""
    )
    yield Text(f"{counted(faults, 'fault')} among {counted(len(facts.happenings), 'event')}.{omitted}")
    rows = [
        (show_time(happening.time), "-" if happening.attempt is None else str(happening.attempt), happening.text)
        for happening in facts.happenings
    ]
    looks = [f"h-{happening.sort}" for happening in facts.happenings]
    yield PageTable(("time", "attempt", "what"), rows, numbers=("attempt",), looks=looks)


def _checkpoints(facts: RunFacts) -> Iterator[Item]:
    saved = facts.checkpoints
    if not saved:
        hidden = any(clause.startswith(NO_CHECKPOINTS) for clause in facts.state.not_shown)
        yield Text("The program shows none." if hidden else "No checkpoint was committed.")
        return
    if facts.config.get("trainer"):  # its checkpoints are its own: their sizes and what they cost are not known
        yield Text(f"{counted(len(saved), 'checkpoint')} of the program; these are the last.")
        noticed = [(f"{save.step:,}", show_time(save.time)) for save in saved[-_MOST_CHECKPOINTS:]]
        yield PageTable(("step", "noticed"), noticed, numbers=("step",))
        return
    kept, stall = [save for save in saved if save.kept], sum(save.stall_s for save in saved)
    failed = f" {counted(facts.failed_saves, 'save')} failed." if facts.failed_saves else ""
    yield Text(
        f"{counted(len(saved), 'checkpoint')} committed, {len(kept)} still there "
        f"({show_bytes(sum(save.bytes for save in kept))}). "
        f"Training stood still for them for {stall:.3g} s in all.{failed}"
    )
    shown = saved[-_MOST_CHECKPOINTS:]
    rows = [
        (
            f"{save.step:,}",
            show_time(save.time) if save.time else "-",
            show_bytes(save.bytes),
            f"{save.seconds:.2f} s",
            f"{save.stall_s:.3f} s",
            ("kept" if save.kept else "removed") + (", the best" if save.best else ""),
        )
        for save in shown
    ]
    if len(shown) < len(saved):
        yield Text(f"The last {len(shown)}:")
    yield PageTable(
        ("step", "committed", "size", "until on disk", "stall", ""), rows,
        numbers=("step", "size", "until on disk", "stall"),
    )  # fmt: skip


def _efficiency(facts: RunFacts) -> Iterator[Item]:
    findings = facts.efficiency
    if not findings.uses and not findings.advice:
        yield Text("Nothing was measured yet: ranks leave their records when they end.")
        return
    if findings.uses:
        rows = [
            (use.resource, use.used, use.asked or "-", "-" if use.share is None else f"{100 * use.share:.0f} %")
            for use in findings.uses
        ]
        yield PageTable(("resource", "used", "asked for, or there", "share"), rows, numbers=("share",))
    if findings.advice:
        yield Text("For the next submission:")
        yield Bullets(list(findings.advice))
    else:
        yield Text("There is nothing to advise for the next submission.")


def _environment(facts: RunFacts) -> Iterator[Item]:
    yield PageTable(("", ""), [(name, text) for name, text in _environment_rows(facts) if text])
    if facts.changed:
        rows = [(key, show_value(value)) for key, value in facts.changed.items()]
        yield Text("Keys whose values are not the defaults:")
        yield PageTable(("key", "value"), rows)
    if facts.config:
        yield Fold("The whole configuration", json.dumps(facts.config, indent=1))


def _environment_rows(facts: RunFacts) -> Iterator[tuple[str, str]]:
    state, code, config = facts.state, facts.code, facts.config
    last = facts.timeline.attempts[-1] if facts.timeline.attempts else None
    cluster = config.get("cluster") if isinstance(config.get("cluster"), dict) else {}
    yield "directory", str(facts.run.path)
    yield "job", f"{state.job_id} on {state.cluster}" if state.job_id else ""
    yield "submitted", show_time(state.submitted) if state.submitted else ""
    yield "nodes", (last.nodes if last is not None else "") or state.nodes or ""
    yield "ranks", str(last.world_size) if last is not None and last.world_size else ""
    yield "GPUs of a node", _gpus(cluster or {})
    yield "zslurm", str(code.get("zslurm") or "")
    yield "Python", str(code.get("python") or "")
    commit = code.get("git_commit")
    yield "git commit", f"{commit}{', with local changes' if code.get('git_changed') else ''}" if commit else ""
    for name in ("gpu_family", "network", "rocm_version", "rccl_version"):
        yield name.replace("_", " "), str((cluster or {}).get(name) or "")


def _gpus(cluster: Mapping[str, Any]) -> str:
    count, kind = cluster.get("gpus_per_node"), cluster.get("gpu_type")
    return f"{count} {kind or ''}".strip() if count else ""


# --- several runs ----------------------------------------------------------------------------------------------


def _together(runs: Sequence[RunFacts]) -> Iterator[PageSection]:
    """Yield the sections in which runs stand side by side."""
    rows = list(_side_by_side(runs))
    columns = ("", *(facts.run.name for facts in runs))
    yield PageSection("Side by side", [PageTable(columns, rows, numbers=columns[1:])])
    if plots := list(curves_together(runs)):
        yield PageSection("Curves", plots)
    if len(runs) == 2:
        comparison = compare(*runs)
        if comparison.config:
            rows = [(row.key, show_value(row.first), show_value(row.second)) for row in comparison.config]
            yield PageSection("What differs in the configuration", [PageTable(("key", *columns[1:]), rows)])


def _side_by_side(runs: Sequence[RunFacts]) -> Iterator[tuple[str, ...]]:
    yield "state", *(facts.state.state for facts in runs)
    tiles = [{tile.name: tile.value for tile in _tiles(facts)} for facts in runs]
    for name in dict.fromkeys(name for run_tiles in tiles for name in run_tiles):
        yield name, *(run_tiles.get(name, "-") for run_tiles in tiles)
    yield "failures", *(str(facts.timeline.failures) for facts in runs)
    yield "steps lost", *(str(sum(a.lost for a in facts.timeline.attempts)) for facts in runs)
