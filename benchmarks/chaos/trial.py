"""One trial: a contender runs the program, the plan's faults happen, and a patient user does what users do."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .contenders import Contender, Start
from .plans import PROGRAM, Plan, PlannedFault
from .site import Site

LIMIT_S, HANG_LIMIT_S = 210.0, 420.0
"""Seconds for a trial of one fault, and of one that is noticed late; a longer plan gets as many times more."""
_USER_S, _ACTIONS = 10.0, 2
"""Seconds after which a user submits a job again that ended too early, and how often at most."""
_EVERY_S = 0.2
_QUEUE_EVERY_S = 2.0


@dataclass
class Trial:
    """What happened.

    Attributes:
        contender: who ran the program.
        plan: what was to happen.
        rows: the record of the program.
        struck: faults that were injected from outside: name, node and UNIX time.
        actions: what the user had to do.
        excluded: nodes that the job does not want at its end.
        not_injected: faults that could not be injected, and why.
        error: of the submission.
        began: UNIX time of the submission.
        ended: UNIX time of the end of the trial.
        over: whether the program reached its last step.
        is_left: no job was in the queue any more, and the user has done everything that a user does.
    """

    contender: Contender
    plan: Plan
    rows: list[dict[str, Any]] = field(default_factory=list)
    struck: list[dict[str, Any]] = field(default_factory=list)
    actions: int = 0
    excluded: set[str] = field(default_factory=set)
    not_injected: dict[str, str] = field(default_factory=dict)
    error: str = ""
    began: float = 0.0
    ended: float = 0.0
    over: bool = False
    is_left: bool = False


class _Record:
    """Reads the record of a program as it grows."""

    def __init__(self, path: Path) -> None:
        self._path, self._read, self.rows = path, 0, list[dict[str, Any]]()

    def read(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._read += len(complete)
        self.rows += [json.loads(line) for line in complete.splitlines()]


def play(site: Site, contender: Contender, plan: Plan, directory: Path, port: int) -> Trial:
    """Run the program once; returns what happened.

    Raises:
        RuntimeError: the site cannot be brought back to its state before the trial.
    """
    site.prepare(directory)
    (directory / "plan.json").write_text(json.dumps(plan.content()))
    trial = Trial(contender, plan, began=time.time())
    start = Start(site, plan, directory, port)
    record = _Record(directory / "record.jsonl")
    trial.rows = record.rows
    is_silent = any(fault.fault == "hang" for fault in plan.faults)
    is_slow = is_silent or any(fault.fault == "time_limit" for fault in plan.faults)
    limit_s = (HANG_LIMIT_S if is_slow else LIMIT_S) * max(1.0, plan.steps / 60) + plan.steps * plan.pace_s
    outside = [fault for fault in plan.faults if fault.fault not in PROGRAM]
    mending: list[tuple[float, str, str]] = []
    left_since: float | None = None
    look_at = 0.0
    try:
        try:
            contender.start(start)
        except RuntimeError as error:
            trial.error = str(error)
        while not trial.error and time.time() < trial.began + limit_s:
            record.read()
            if any(row["moment"] == "done" for row in record.rows):
                trial.over = True
                break
            while outside and (node := _node_after(record.rows, outside[0].rank, outside[0].step)) is not None:
                fault = outside.pop(0)
                try:
                    site.strike(fault.fault, node, _job(site))
                except RuntimeError as error:
                    trial.not_injected[fault.fault] = str(error)
                    continue
                trial.struck.append({"fault": fault.fault, "node": node, "time": time.time()})
                if fault.seconds:
                    mending.append((time.time() + fault.seconds, fault.fault, node))
            while mending and time.time() >= mending[0][0]:
                _, name, node = mending.pop(0)
                site.undo(name, node)
            if time.time() >= look_at:
                look_at = time.time() + _QUEUE_EVERY_S
                left_since = _left_since(site, trial, left_since)
                if left_since is not None and time.time() > left_since + _USER_S:
                    trial.is_left = not plan.completes or trial.actions == _ACTIONS
                    if trial.is_left:
                        break
                    trial.actions, left_since = trial.actions + 1, None
                    with suppress(RuntimeError):  # Slurm is away: the next action tries again
                        contender.start(start)
            time.sleep(_EVERY_S)
        trial.ended = time.time()
        record.read()
    finally:  # also after Ctrl-C: no node stays dead, no job in the queue
        try:
            for _, name, node in mending:
                site.undo(name, node)
        finally:
            site.clear()
    if trial.over:
        trial.not_injected |= {
            fault.fault: "the program was complete before it" for fault in _missed(trial, outside)
        }
    return trial


def _missed(trial: Trial, outside: Sequence[PlannedFault]) -> list[PlannedFault]:
    """Return the faults of a trial that did not happen: a contender does not survive what it did not meet.

    Args:
        trial: that is over.
        outside: faults that were not injected from outside.
    """
    happened = {row["number"] for row in trial.rows if row["moment"] == "fault"}
    faults = enumerate(trial.plan.faults)
    missed = [fault for number, fault in faults if fault.fault in PROGRAM and number not in happened]
    for struck in trial.struck:
        ended = any(row["moment"] == "start" and row["time"] > struck["time"] for row in trial.rows)
        if struck["fault"] == "time_limit" and not ended:
            missed += [fault for fault in trial.plan.faults if fault.fault == "time_limit"]
    return [*missed, *outside]


def _left_since(site: Site, trial: Trial, before: float | None) -> float | None:
    """Return since when no job is in the queue; notes which nodes the job does not want."""
    try:
        jobs = site.jobs()
        if not jobs:
            return before or time.time()
        for job in jobs:
            shown = site.run(["scontrol", "show", "job", job]).stdout
            if (nodes := re.search(r"ExcNodeList=(\S+)", shown)) is not None and nodes[1] != "(null)":
                names = site.run(["scontrol", "show", "hostnames", nodes[1]]).stdout.split()
                trial.excluded.update(names)
    except RuntimeError:
        pass  # Slurm is away
    return None


def _job(site: Site) -> str:
    """Return the job of the trial."""
    return next(iter(site.jobs()), "")


def _node_after(rows: list[dict[str, Any]], rank: int, step: int) -> str | None:
    """Return the node of a rank that has finished a step; None before that."""
    steps = [row for row in rows if row["moment"] == "step" and row["rank"] == rank and row["step"] >= step]
    return steps[0]["node"] if steps else None
