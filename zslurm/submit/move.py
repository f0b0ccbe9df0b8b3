"""Ask the supervisor of a running run to move its ranks off nodes, and wait for its answers.

A request is a line of submissions.jsonl; the supervisor looks there, and answers for each node with an event that
has the request's number. What can be found out here is refused here, before anything is asked.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zslurm.config.spec import RunSpec
from zslurm.core.errors import ConfigError, NotFound, SlurmUnavailable, ZslurmError
from zslurm.run.events import AttemptStarted, MoveAsked, MoveRefused, RanksMoved, RecoveredInMemory
from zslurm.run.events.event import select
from zslurm.run.events.event_text import node_names
from zslurm.run.run_dir import RunDir
from zslurm.run.state.run_state import RunState, look
from zslurm.slurm.hostlist import compress, expand
from zslurm.submit.submit import record_action, spec_of
from zslurm.train.jsonl import JsonLinesTail, read_jsonl

_POLL_S = 0.3
_STATE_S = 10.0
"""Seconds between two questions whether the run still runs."""


@dataclass(frozen=True)
class Asked:
    """A request.

    Attributes:
        job_id: of the run.
        nodes: to leave.
        request: its number.
    """

    job_id: str
    nodes: tuple[str, ...]
    request: str


@dataclass(frozen=True)
class MoveAnswer:
    """What came of a request for one node.

    Attributes:
        line: a sentence.
        moved: whether the ranks have left it.
    """

    line: str
    moved: bool


def ask_to_move(run: RunDir, off: str) -> Asked:
    """Ask that the ranks of a run leave the nodes of a hostlist.

    Raises:
        NotFound: it was never submitted, or a node has no ranks of it.
        ConfigError: the run has no recovery in memory, no spares, or runs on this machine only.
        ZslurmError: it does not run; or it is a copy of another run.
        SlurmUnavailable: whether it runs cannot be found out.
    """
    state = look(run)
    job_id = _running_job(run, state)
    spec = spec_of(run)
    _refuse_settings(run, spec, state)
    asked = tuple(dict.fromkeys(expand(off)))
    if not asked:
        raise ConfigError("--off: no node is named")
    nodes = _rank_nodes(run, job_id)
    if not nodes:
        raise ZslurmError(f"{run.name}: no ranks run yet, so none can move")
    if absent := [node for node in asked if node not in nodes]:
        raise NotFound(f"--off: no rank of {run.name} is on {compress(absent)}; ranks are on {compress(nodes)}")
    in_job = expand(state.nodes or "")
    spares = [node for node in in_job if node not in nodes and node not in state.aegis.excluded]
    if len(spares) < len(asked):
        spares_text = f"the spares left are {compress(spares)}" if spares else "the job has no spare node left"
        raise ConfigError(
            f"{run.name}: {spares_text}, and each node to leave takes one; submit the run with more slurm.spares"
        )
    request = secrets.token_hex(4)
    record_action(run, MoveAsked(job_id=job_id, off=compress(asked), request=request), spec)
    return Asked(job_id, asked, request)


def _running_job(run: RunDir, state: RunState) -> str:
    if state.state == "copied":
        raise ZslurmError(f"{run.path}: {state.reason}")
    if state.job_id is None:
        raise NotFound(f"{run.name}: it was never submitted; `zslurm submit` starts it")
    if state.state == "unknown":
        raise SlurmUnavailable(f"{run.name}: {state.reason}")
    if state.state != "running":
        raise ZslurmError(f"{run.name}: it is {state.state}, and only the ranks of a run that runs can move")
    return state.job_id


def _refuse_settings(run: RunDir, spec: RunSpec, state: RunState) -> None:
    aegis = spec.aegis
    if state.launcher == "local":
        raise ConfigError(f"{run.name}: it runs on this machine alone; there is no other node to move to")
    if aegis.mode != "act":
        raise ConfigError(
            f"{run.name}: aegis.mode is {aegis.mode}, and the supervisor moves ranks only if it is `act`"
        )
    if spec.trainer is not None or aegis.recovery == "restart":
        what = "aegis.recovery is restart" if spec.trainer is None else "its ranks are those of another program"
        raise ConfigError(
            f"{run.name}: {what}, and ranks move only with recovery in memory; without it, "
            f"`zslurm requeue {run.name} --exclude NODES` restarts the run elsewhere"
        )


def _rank_nodes(run: RunDir, job_id: str) -> list[str]:
    """Return the nodes of the newest attempt's ranks now; none if the job has started none."""
    nodes: list[str] = []
    rows = [row for row in read_jsonl(run.events) if row.get("job_id") == job_id]
    for event in select(rows, AttemptStarted, RecoveredInMemory, RanksMoved):
        nodes = node_names(event.nodes) or nodes
    return nodes


def answers_to(run: RunDir, asked: Asked) -> Iterator[MoveAnswer]:
    """Yield what comes of a request, node by node; ends when every node is answered for, or the run is over."""
    tail, waiting = JsonLinesTail(run.events), set(asked.nodes)
    state_at = time.monotonic() + _STATE_S
    while waiting:
        over = False
        if time.monotonic() > state_at:
            over, state_at = not look(run).active, time.monotonic() + _STATE_S
        yield from _answers(tail.new_records(), asked.request, waiting)
        if over:
            for node in sorted(waiting):
                yield MoveAnswer(f"{run.name} has ended before its ranks moved off {node}", moved=False)
            return
        if waiting:
            time.sleep(_POLL_S)


def _answers(rows: Sequence[dict[str, object]], request: str, waiting: set[str]) -> Iterator[MoveAnswer]:
    for moved in select(rows, RanksMoved):
        if moved.request == request and moved.off in waiting:
            waiting.discard(moved.off)
            yield MoveAnswer(moved.describe(), moved=True)
    for refused in select(rows, MoveRefused):
        if refused.request == request and refused.off in waiting:
            waiting.discard(refused.off)
            yield MoveAnswer(refused.describe(), moved=False)
