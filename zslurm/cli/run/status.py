"""`zslurm status`: runs as rows, and one run in full."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any

import typer

from zslurm.checkpoint_tools.format.layout import MANIFEST, step_of
from zslurm.checkpoint_tools.plain import shorten
from zslurm.checkpoint_tools.quantities import counted, show_count, show_duration
from zslurm.cli.options import TIMES, Json, SomeRuns, complete_states, parse_since
from zslurm.cli.run.run_rows import (
    COLUMNS,
    as_json,
    as_row,
    describe_root,
    note,
    notify_overdue,
    orphan_as_json,
    release_held,
    show_mfu,
    stale_line,
    time_left,
    waits_for_person,
)
from zslurm.cli.terminal.screen import Line, columns_of_terminal, paragraph, print_styled
from zslurm.cli.terminal.table import BAD, HEAD, QUIET, STATE_STYLES, Column, print_table, table_lines
from zslurm.core.console import harmless, print_json, say
from zslurm.core.errors import ConfigError, Exit, ZslurmError
from zslurm.core.units import show_time
from zslurm.run.events import AttemptEnded, AttemptStarted, describe
from zslurm.run.events.event_text import describe_cause, describe_fault
from zslurm.run.find import OrphanJob, find
from zslurm.run.index import known_runs
from zslurm.run.run_dir import RunDir
from zslurm.run.state.run_state import STATES, RunState, look_all
from zslurm.run.state.state_events import read_state_events
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.hostlist import compress, expand
from zslurm.slurm.run_command import Retries


def status(
    runs: SomeRuns = None,
    active: Annotated[bool, typer.Option("--active", help="Only runs that are running or waiting.")] = False,
    state: Annotated[
        str | None,
        typer.Option(
            metavar="STATES", help="Only runs in these states: failed,pending.", autocompletion=complete_states
        ),
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help=f"Only runs in which something happened since: {TIMES}.")
    ] = None,
    json: Json = False,
) -> None:
    """Show your runs, or everything about one.

    Runs that wait for a person come first: held ones, and those that failed in the last three days. A job that
    Slurm holds because a node could not start it is released without that node.

    Exit code 4 if Slurm does not answer: the states are from its last answer then, with their age on
    stderr.

    Example: zslurm status my-run
    """
    wanted_states, earliest = _states(state), None if since is None else parse_since(since)
    chosen_runs: dict[RunDir, None] = {}
    orphans: list[OrphanJob] = []
    for reference in runs or ():
        try:
            chosen_runs[find(reference)] = None
        except OrphanJob as orphan:
            orphans.append(orphan)
    states = look_all(list(chosen_runs) if runs else known_runs(), cached=True)
    if lines := release_held(states):
        states = look_all([run_state.run for run_state in states], cached=True)
    for line in lines:
        say(line)
    stale = stale_line(states)
    for problem in notify_overdue(states):
        say(f"note: {problem}")
    if active:
        states = [state for state in states if state.active]
        orphans = [lost for lost in orphans if lost.job.state.is_active]
    if wanted_states:
        states = [run_state for run_state in states if run_state.state in wanted_states]
    if earliest is not None:
        states = [run_state for run_state in states if _last_change(run_state) >= earliest]
    states.sort(key=lambda run_state: not waits_for_person(run_state))
    alone = states[0] if runs and len(states) == 1 and not orphans else None
    asks_slurm = alone is not None and alone.active and alone.launcher == "slurm" and not stale
    excluded = _excluded(alone.job_id) if alone is not None and asks_slurm else None
    if json:
        rows = [details_as_json(alone, excluded)] if alone else [as_json(state) for state in states]
        print_json(rows + [orphan_as_json(lost.job, lost.run) for lost in orphans])
    elif alone:
        print_styled(details(alone, excluded, columns_of_terminal()))
    elif states or orphans:
        if states:
            print_table(COLUMNS, [as_row(state) for state in states])
        for lost in orphans:
            print(harmless(str(lost)))
    else:
        filtered = wanted_states or earliest is not None
        say(
            "no runs are active"
            if active
            else "no such runs"
            if filtered
            else "no runs yet; `zslurm submit run.yaml` starts one"
        )
    for run_state in states:
        if run_state.damaged_events:
            damaged = counted(run_state.damaged_events, "damaged line is", "damaged lines are")
            say(f"{run_state.run.events}: {damaged} left out: what they tell is missing here")
    if stale:
        say(f"zslurm: {stale}")
        raise typer.Exit(Exit.SLURM_UNAVAILABLE)


_VALUES_AT = 14
"""Column at which the values of `zslurm status RUN` begin."""


def _states(given: str | None) -> set[str]:
    """Return the states of `failed,pending`; none if none are given.

    Raises:
        ConfigError: a word is no state.
    """
    wanted_states = {word for word in (given or "").replace(" ", "").split(",") if word}
    if unknown := sorted(wanted_states - set(STATES)):
        near = get_close_matches(unknown[0], STATES, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(STATES)}"
        raise ConfigError(f"--state {shorten(unknown[0])}: not a state of runs; {hint}")
    return wanted_states


def _last_change(state: RunState) -> float:
    """Return when something happened to a run last (UNIX seconds)."""
    event = float((state.last_event or {}).get("time") or 0.0)
    return max(event, state.submitted or 0.0, time.time() if state.state in ("running", "stopping") else 0.0)


def _excluded(job_id: str | None) -> str | None:
    """Ask Slurm for the nodes that a job must not use; None if it does not answer."""
    try:
        return SlurmClient(retries=Retries(attempts=1)).excluded_nodes(job_id or "")
    except ZslurmError:
        return None


def details_as_json(state: RunState, excluded: str | None) -> dict[str, Any]:
    """Return one run in full: its attempts, checkpoints and excluded nodes too."""
    return as_json(state) | {
        "excluded_nodes": excluded,
        "checkpoints": _checkpoint_steps(state.run),
        "attempts": list(_attempts(state)),
    }


def details(state: RunState, excluded: str | None = None, width: int | None = None) -> Iterator[Line]:
    """Describe one run in full, line by line; `excluded` are the nodes of Slurm's list, None if not known.

    With `width` no line is longer, if its words allow that.
    """
    job = f" (job {state.job_id} on {state.cluster})" if state.job_id else ""
    style = STATE_STYLES.get(state.state, "")
    yield [(state.run.name, HEAD), (": ", ""), (state.state, style), (job, "")]
    if text := note(state):
        yield from paragraph(text, width, indent=2, style="red" if style == BAD else "")
    for name, fact in _facts(state, excluded):
        if fact:
            first, *more = paragraph(fact, width, indent=_VALUES_AT)
            yield [(f"  {name:<{_VALUES_AT - 2}}", QUIET), (first[0][0].lstrip(), "")]
            yield from more
    if attempts := list(_attempts(state)):
        yield [("  attempts", QUIET)]
        yield from table_lines(_ATTEMPT_COLUMNS, list(_attempt_rows(attempts, state)), width)


def _facts(state: RunState, excluded: str | None) -> Iterator[tuple[str, str | None]]:
    """Yield names and values; an empty value is not shown."""
    aegis = state.aegis
    yield "directory", str(state.run.path)
    if state.submitted:
        age = show_duration(time.time() - state.submitted)
        yield "submitted", f"{show_time(state.submitted)}, {age} ago"
    yield "nodes", state.nodes
    yield "excluded", _exclusions(state, excluded)
    if state.successor:
        yield "successor", f"job {state.successor} continues the run if this one ends early"
    if state.step is not None:
        loss = f", loss {state.loss:.4f}" if state.loss is not None else ""
        remaining = f", {time_left(state)} left" if time_left(state) else ""
        of = f" of {state.total_steps}" if state.total_steps else ""
        yield "step", f"{state.step}{of}{loss}{remaining}"
    if state.tokens_per_s is not None:
        mfu = f", MFU {show_mfu(state)}" if state.mfu is not None else ""
        yield "speed", f"{show_count(state.tokens_per_s)} tokens/s{mfu}"
    if state.evaluation_loss is not None:
        yield "validation", f"loss {state.evaluation_loss:.4f} at step {state.evaluation_step}"
    if taken := described_sources(state.sources):
        yield "data", ", ".join(taken)
    if state.checkpoint_step is not None:
        best = f", the best: step {state.best_step}" if state.best_step is not None else ""
        kept = _checkpoint_steps(state.run)
        listed = f"; kept: {', '.join(map(str, kept))}" if len(kept) > 1 else ""
        yield "checkpoint", f"step {state.checkpoint_step}{best}{listed}"
    if state.not_shown:
        yield "not shown", "; ".join(state.not_shown)
    if aegis.last_cause is not None and aegis.last_cause["message"] not in note(state):
        yield "last cause", f"{_when(aegis.last_cause)}{describe_root(aegis.last_cause)}"
    if aegis.last_decision is not None:
        cause = f": {describe_fault(aegis.last_decision.get('root') or {'kind': '?'})}"
        yield "decision", f"{_when(aegis.last_decision)}{describe(aegis.last_decision).removesuffix(cause)}"
    if aegis.restarts_in_place:
        yield "restarts", f"{aegis.restarts_in_place} in place, {state.restarts} by Slurm"
    if times := aegis.recovered_in_memory:
        yield "recovered", f"{'once' if times == 1 else f'{times} times'} in memory, without a restart"
    for helper in aegis.helpers:
        yield "helper", f"{_when(helper)}{describe(helper)}"
    if times := aegis.planned_moves:
        yield (
            "moved",
            f"{'once' if times == 1 else f'{times} times'} to another node, as planned; no step was lost",
        )


def described_sources(sources: Mapping[str, Any]) -> list[str]:
    """Return what was trained on of each source, as in metrics.jsonl, in words."""
    named_sources = [(name, taken) for name, taken in sources.items() if isinstance(taken, dict)]
    return [
        f"{name} {counted(int(taken.get('tokens', 0)), 'token', shown=show_count(taken.get('tokens', 0)))} "
        f"({taken.get('epochs', 0):.3g} epochs)"
        for name, taken in named_sources
        if taken.get("tokens")
    ]


def _checkpoint_steps(run: RunDir) -> list[int]:
    """Return the steps of the checkpoints in the run's directory that were committed."""
    steps = {step_of(path.parent.name) for path in run.checkpoints.glob(f"*/{MANIFEST}")}
    return sorted(step for step in steps if step is not None)


def _exclusions(state: RunState, by_slurm: str | None) -> str:
    """Return the nodes that the run does not use: what Slurm excludes, and what Aegis leaves out besides."""
    if by_slurm is None:
        return compress(state.aegis.excluded)
    excluded_by_aegis = sorted(set(state.aegis.excluded) - set(expand(by_slurm)))
    return (
        f"{by_slurm}{'; ' if by_slurm else ''}by Aegis: {compress(excluded_by_aegis)}"
        if excluded_by_aegis
        else by_slurm
    )


def _when(event: Mapping[str, Any]) -> str:
    return f"{show_time(float(event['time']))}  " if event.get("time") is not None else ""


_ATTEMPT_COLUMNS = (
    Column(""),
    Column("attempt"),
    Column("started", drop=1),
    Column("outcome", "state"),
    Column("exit code"),
    Column("nodes", drop=2, most=24),
    Column("cause", "text"),
)


def _attempt_rows(attempts: Sequence[dict[str, Any]], state: RunState) -> Iterator[list[str]]:
    """Yield a row for each attempt; its cause only if that is neither above nor the attempt's before."""
    above, before = note(state), ""
    for attempt in attempts:
        cause = describe_cause(attempt["cause"]) if attempt["cause"] else ""
        shown = "" if not cause else "as above" if cause in above else "the same" if cause == before else cause
        before = cause
        when = show_time(attempt["started"]) if attempt["started"] else "?"
        code = "-" if attempt["exit_code"] is None else str(attempt["exit_code"])
        yield ["", str(attempt["attempt"]), when, attempt["outcome"], code, str(attempt["nodes"] or "-"), shown]


def _attempts(state: RunState) -> Iterator[dict[str, Any]]:
    """Yield every attempt with its nodes and its end; one that has none runs, or its end was not recorded."""
    started: dict[int, AttemptStarted] = {}
    for event in read_state_events(state.run.events).events:
        if event.attempt is None:
            continue
        if isinstance(event, AttemptStarted):
            started[event.attempt] = event
        elif isinstance(event, AttemptEnded):
            yield _attempt(event.attempt, started.pop(event.attempt, None), event, event.outcome)
    for number, begin in started.items():
        running = state.state in ("running", "stopping")
        yield _attempt(number, begin, None, "running" if running else "no end recorded")


def _attempt(number: int, begin: AttemptStarted | None, end: AttemptEnded | None, outcome: str) -> dict[str, Any]:
    return {
        "attempt": number,
        "started": begin.row.get("time") if begin is not None else None,
        "ended": end.row.get("time") if end is not None else None,
        "nodes": begin.nodes if begin is not None else None,
        "outcome": outcome,
        "exit_code": end.exit_code if end is not None else None,
        "cause": end.cause if end is not None else None,
    }
