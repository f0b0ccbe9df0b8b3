"""What another policy would have done about the attempts of a run, read from its events.

Each attempt is decided by itself, with the history that it really had: what would have come after another decision
is not known. What the events do not say (if a supervisor recorded no `resources`) is taken from the
nodes of the attempt, and marked as assumed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

from pydantic import Field, TypeAdapter, ValidationError

from zslurm.aegis.core.policy.history import NOTHING_SAVED, fault_of, history_of
from zslurm.aegis.core.policy.policy import alarm, decide
from zslurm.aegis.fault_kinds import NODE_DEAD, SLURM_NODE_FAIL
from zslurm.aegis.types import AttemptSummary, Decision, EndedAs, Resources
from zslurm.checkpoint_tools.quantities import counted
from zslurm.config import yaml12
from zslurm.config.aegis import AegisSection
from zslurm.config.layers import Layers, Origin, Override
from zslurm.config.problems import describe
from zslurm.config.spec import RunSpec
from zslurm.core.console import say
from zslurm.core.errors import ConfigError, NotFound
from zslurm.core.files import read_json
from zslurm.run.events import AttemptEnded, AttemptStarted, Decided, FaultDetected, StepKilled, StopAsked
from zslurm.run.events.event import select
from zslurm.run.events.event_text import node_names
from zslurm.run.exclusions import active_exclusions
from zslurm.train.jsonl import JsonLinesTail
from zslurm.train.sections.section import Section

Row = Mapping[str, Any]
_MOMENT_S = 1e-3
_SOONER_S = 5.0
"""An end that comes by itself so soon after a fault is no difference from one that is made."""
_RESOURCES = TypeAdapter(Resources)


@dataclass(frozen=True)
class Done:
    """What was decided then; in mode `observe` it was not done."""

    action: str
    reason: str
    exclude: tuple[str, ...]
    mode: str


@dataclass(frozen=True)
class Replayed:
    """One attempt that ended.

    Attributes:
        attempt: its number.
        ended: UNIX seconds.
        outcome: how its step ended.
        done: what was decided; None if the events do not say.
        policy: what the policy decides.
        gives_up_after: seconds after its start when the policy ends the attempt, though it was not ended then.
        goes_on: the policy does not end the attempt, though it was ended for a fault.
        assumed: the events do not say what there was to continue with.
    """

    attempt: int
    ended: float
    outcome: EndedAs
    done: Done | None
    policy: Decision
    gives_up_after: float | None = None
    goes_on: bool = False
    assumed: bool = False

    @property
    def differs(self) -> bool:
        """True if the policy would have done something else than was done."""
        if self.gives_up_after is not None or self.goes_on:
            return True
        policy = (self.policy.action, set(self.policy.exclude))
        return self.done is not None and (self.done.action, set(self.done.exclude)) != policy


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the rows of an events file, without a last line that a crash left unfinished; name damaged ones.

    Raises:
        NotFound: there is no such file.
        ConfigError: it holds no event.
        OSError: it cannot be read.
    """
    if not path.is_file():
        raise NotFound(f"{path}: no such file; a run writes its events when its job starts")
    tail = JsonLinesTail(path)
    rows = [row for row in tail.iter_records() if isinstance(row.get("event"), str)]
    if not rows:
        raise ConfigError(f"{path}: not an events file: none of its lines is an event; give RUN_DIR/events.jsonl")
    if tail.damaged:
        say(f"{path}: {counted(tail.damaged, 'damaged line')} left out: the replay lacks what they told")
    return rows


class _Run(Section):
    """As much of a run's configuration as a replay needs."""

    aegis: AegisSection = Field(AegisSection(), description="the supervisor")


def settings_of(config: Path, overrides: Sequence[Override] = (), policy: Path | None = None) -> AegisSection:
    """Return the section `aegis` of a run, under a policy file's and `aegis.KEY=VALUE`.

    Args:
        config: the run's `config.json`; the defaults hold if there is none.
        overrides: applied last, in order.
        policy: a YAML file with a section `aegis`, such as a run file; its other sections do not count.

    Raises:
        NotFound: there is no such policy file.
        ConfigError: an override is wrong, or the configuration or the policy file is.
    """
    origin = Origin("run file", str(config))
    section = (read_json(config) or {}).get("aegis", {})
    layers = Layers({"aegis": section}, {(): origin}, origin)
    if policy is not None:
        layers.add(yaml12.read(policy), "run file", yaml12.called(policy))
        for unused_section in (RunSpec.model_fields.keys() | {"extends"}) - {"aegis"}:
            layers.data.pop(unused_section, None)
    for override in overrides:
        if override.path[0] != "aegis":
            raise ConfigError(f"{override.option}: only settings of `aegis` matter here, such as aegis.retries=5")
        layers.override(override)
    try:
        return _Run.model_validate(layers.data).aegis
    except ValidationError as error:
        raise ConfigError("\n".join(describe(error, layers, _Run))) from error


def replay(events: Sequence[Row], settings: AegisSection) -> list[Replayed]:
    """Decide again about every attempt that ended, from the rows of events.jsonl, oldest first."""
    rows = [row for row in events if isinstance(row.get("time"), int | float)]
    starts = select(rows, AttemptStarted)
    attempts = [_Attempt(rows, start) for start in starts]
    needed = max((len(attempt.nodes) for attempt in attempts), default=1)
    return [_again(attempt, needed, settings) for attempt in attempts if attempt.ended is not None]


class _Attempt:
    """The events of one attempt."""

    def __init__(self, rows: Sequence[Row], start: AttemptStarted) -> None:
        self.number, self.started = start.attempt, start.time
        self.nodes = tuple(node_names(start.nodes))
        begin = next(i for i, row in enumerate(rows) if row == start.row)
        own_rows = [row for row in rows[begin + 1 :] if row.get("attempt") == self.number]
        self.ended = next(select(own_rows, AttemptEnded), None)
        ended_as = self.ended.outcome if self.ended is not None else None
        self.outcome = cast(EndedAs, ended_as) if ended_as in get_args(EndedAs) else "failed"
        self.decision = next(select(own_rows, Decided), None)
        self.killed = next(select(own_rows, StepKilled), None)
        self.signal = next((event.signal for event in select(own_rows, StopAsked)), None)
        before = self.decision or self.ended
        self.history = history_of(rows if before is None else rows[: rows.index(before.row)])
        faults = (fault_of(event) for event in select(own_rows, FaultDetected))
        self.faults = tuple(fault for fault in faults if fault is not None)


def _again(attempt: _Attempt, needed: int, settings: AegisSection) -> Replayed:
    assert attempt.ended is not None
    attempt_state = _attempt_state(attempt)
    recorded = resources_in(attempt.decision.resources if attempt.decision else None)
    resources = recorded or _assumed(attempt, needed, settings, attempt_state)
    given_up = _given_up(attempt, attempt_state, settings, len(set(resources.nodes) - set(resources.in_use)))
    ended = attempt.ended.time
    early = given_up is not None and attempt.killed is None and ended - given_up.now > _SOONER_S
    if given_up is not None and early:
        attempt_state = given_up
    return Replayed(
        attempt=attempt.number,
        ended=ended,
        outcome=attempt.outcome,
        done=_done(attempt.decision),
        policy=decide(attempt_state, attempt.history, resources, settings),
        gives_up_after=attempt_state.now - attempt.started if early else None,
        goes_on=given_up is None and attempt.killed is not None and attempt.killed.root is not None,
        assumed=recorded is None,
    )


def _attempt_state(attempt: _Attempt) -> AttemptSummary:
    """Return the attempt when it was over."""
    assert attempt.ended is not None
    recorded = (attempt.decision.attempt_state if attempt.decision else None) or {}
    now, step = recorded.get("now"), attempt.decision.committed_step if attempt.decision else None
    last = attempt.history.incidents[-1].committed_step if attempt.history.incidents else NOTHING_SAVED
    progressed, asked = recorded.get("progressed_at"), recorded.get("asked_to_stop", attempt.signal)
    preempted = recorded.get("preempted")
    return AttemptSummary(
        now=float(now) if isinstance(now, int | float) else attempt.ended.time,
        attempt=attempt.number,
        outcome=attempt.outcome,
        faults=attempt.faults,
        committed_step=last if step is None else step,
        asked_to_stop=asked if isinstance(asked, str) else None,
        requeued=recorded.get("requeued") is True,
        progressed_at=float(progressed) if isinstance(progressed, int | float) else None,
        nodes=attempt.nodes,
        preempted=preempted if preempted in ("requeue", "cancel") else None,
    )


def resources_in(recorded: object) -> Resources | None:
    """Return the resources that a decision recorded; None if it recorded none, or they are damaged."""
    try:
        return _RESOURCES.validate_json(json.dumps(recorded), strict=True)
    except ValidationError:
        return None


def _assumed(attempt: _Attempt, needed: int, settings: AegisSection, attempt_state: AttemptSummary) -> Resources:
    """Return what there may have been: the nodes of the attempt, without the dead ones, and a queue."""
    dead = {fault.node for fault in attempt.faults if fault.kind in (NODE_DEAD, SLURM_NODE_FAIL)}
    gone = dead | active_exclusions(attempt.history.exclusions, attempt_state.now).keys()
    alive = tuple(node for node in attempt.nodes if node not in gone)
    return Resources(alive, attempt.nodes, needed, outlives_nodes=True)


def _done(decision: Decided | None) -> Done | None:
    if decision is None:
        return None
    return Done(decision.action, decision.reason or "", tuple(decision.exclude or ()), decision.mode)


def _given_up(
    attempt: _Attempt, end: AttemptSummary, settings: AegisSection, spares: int
) -> AttemptSummary | None:
    """Return the attempt state in which the policy ends the attempt before it was over; None if it does not.

    An alarm can begin when a fault is noticed, or when one has lasted long enough.
    """
    assert attempt.ended is not None
    over = (attempt.killed or attempt.ended).time
    times = {fault.time + wait + _MOMENT_S for fault in attempt.faults for wait in (0.0, settings.tolerate_s)}
    for now in sorted(time for time in times if attempt.started <= time <= over):
        seen = tuple(fault for fault in attempt.faults if fault.time <= now)
        progressed = None if end.progressed_at is None else min(end.progressed_at, now)
        then = replace(end, now=now, outcome=None, faults=seen, progressed_at=progressed)
        if alarm(then, attempt.history, settings, spares=spares).give_up:
            return replace(then, outcome="failed", asked_to_stop=None, requeued=False)
    return None
