"""The wire protocol between a supervisor and its agents: one line of JSON for each message.

Agents send a `Report`, the supervisor a `Heartbeat` or a `Command`; each is a union of small classes. The field
`sensor` of a line names the class of a report, `do` or `heartbeat` that of a command.

An agent's line begins with MARK, for prologs and modules print lines of their own, and has at most LONGEST
characters: srun cuts lines at 1,024 and then mixes the pieces of several nodes. What is longer is split: `more`
says that further lines of the same look follow, with the same `seq`. A supervisor's line is the bare object.

Whatever is no such line, or only a piece of one, is read as None: neither side may fail because of what the other,
or a third party, wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from zslurm.aegis.types import Fault
from zslurm.train.progress import Phase

MARK = "zslurm-agent "
LONGEST = 700
"""Characters of a line, MARK and all; lines are ASCII, so as many bytes."""

BATCH_NODE = "ZSLURM_BATCH_NODE"
"""Names, in an agent's environment, the node that the supervisor ran on."""

_LONGEST_TEXT = 260
_LONGEST_NAME = 64

CommandName = Literal["stacks", "clean_up", "check", "reach", "end_rank", "ras", "quit"]
"""What an agent can do: dump the ranks' stacks, kill orphans of an attempt, check its node, try whether a port of
another node answers, kill one rank, ask the collective library's RAS service, end."""


# --- from agents to the supervisor ------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankProgress:
    """A rank as its record has it.

    Attributes:
        rank: global rank.
        pid: of the rank, on its node.
        step: optimizer step that it finished last; -1 before the first.
        committed_step: of the newest checkpoint that it knows to be complete; -1 before the first.
        age_s: seconds since it gave a sign of life, by the monotonic clock of its node.
        waiting: it has done its own part of the step and waits for its peers.
        work_s: seconds of its own work per microbatch, summed over the steps of the attempt.
        halted: its process is stopped, by SIGSTOP or a debugger.
        gone: its process has ended, though the record does not say so; only if the agent saw it alive before.
    """

    rank: int
    pid: int
    phase: Phase
    step: int
    committed_step: int
    age_s: float
    waiting: bool = False
    work_s: float = 0.0
    halted: bool = False
    gone: bool = False


@dataclass(frozen=True)
class Stamp:
    """Who reports, and when.

    Attributes:
        node: as Slurm calls it.
        seq: number of the look, counted by the agent from 1; one that is missing got lost.
        t: UNIX seconds by the node's clock.
        mono: seconds of its monotonic clock; only differences mean anything, and only on that node.
    """

    node: str
    seq: int
    t: float
    mono: float


@dataclass(frozen=True)
class ProgressReport:
    """Where the ranks of a node are.

    Attributes:
        attempt: the attempt whose records were read; 0 where the agent does not know of one yet.
        ranks: those that have a record. A rank that ended in order has removed it.
        ok: false where the records could not be read.
        why: why not.
        more: further ranks follow, with the same `seq`.
    """

    stamp: Stamp
    attempt: int
    ranks: tuple[RankProgress, ...] = ()
    ok: bool = True
    why: str = ""
    more: bool = False


@dataclass(frozen=True)
class SensorReport:
    """What a sensor read.

    Attributes:
        sensor: `kernel_log`, `gpu`, `nic`, `host`, `disk`, `agent` (its clock), ...
        ok: false where nothing could be read: then nothing is known about the node's health.
        why: why not; reported once each time it changes.
        faults: new ones since the last look.
        values: what was measured.
        more: further faults or values follow, with the same `seq`.
        first: the agent's first of this sensor: whatever is wrong now is among the faults, its lines put together.
    """

    stamp: Stamp
    sensor: str
    ok: bool = True
    why: str = ""
    faults: tuple[Fault, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    more: bool = False
    first: bool = False


@dataclass(frozen=True)
class AgentReport:
    """What became of the agent itself.

    Attributes:
        event: `started`; `silent`, when it has not heard of the supervisor for aegis.standby_s; `heard`, when it
            has again; `signalled`, when it got a signal; `warmed`, when its spare node has read a checkpoint into
            its page cache; `ended`.
        values: more about it: `pid`, `seconds`, `signal`, `reason`; of `warmed` the fields of `Warmed`.
    """

    stamp: Stamp
    event: str
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What came of a command.

    Attributes:
        id: of the command.
        ok: whether the command succeeded: every rank was signalled, nothing is left, the node is healthy.
        why: why not, one line.
        values: particulars. Of stacks: `ranks`, those that were signalled, and `missed`, those that could not be.
            Of clean_up: `killed` and `left` ([[pid, state, name], ...]), `seconds`, `gpu_released` (None: not
            known), `gpu_used` (bytes of each GPU) and `progress_removed`. Of check: `problems` and `notes`. Of
            reach: `port` (zslurm.core.reach.Reach). Of end_rank: `pid`. Of ras: `there`, `version` and `found`, a
            line for each finding, and `behind`, ranks by number.
        done: false where further lines of the same answer follow; see `joined`.
    """

    stamp: Stamp
    id: int
    ok: bool
    why: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    done: bool = True


Report = ProgressReport | SensorReport | AgentReport | Answer


def joined(parts: Sequence[Answer]) -> Answer:
    """Return one answer from its lines, in the order in which they came: lists are put together.

    Raises:
        IndexError: there are none.
    """
    values: dict[str, Any] = {}
    for part in parts:
        for name, value in part.values.items():
            known = values.get(name)
            values[name] = known + value if isinstance(known, list) and isinstance(value, list) else value
    return replace(parts[-1], values=values)


def encode_report(report: Report) -> list[str]:
    """Return the lines of a report, each with MARK in front and a line break at its end.

    Text that alone would not fit a line is cut.
    """
    head = _stamp_fields(report.stamp)
    if isinstance(report, ProgressReport):
        head |= {"sensor": "progress", "ok": report.ok, "attempt": report.attempt}
        return _split(head, report.why, (("ranks", _row(rank)) for rank in report.ranks))
    if isinstance(report, AgentReport):
        return _split(head | {"sensor": "agent", "event": report.event}, "", _pieces(report.values))
    if isinstance(report, Answer):
        head |= {"sensor": "answer", "id": report.id, "ok": report.ok, "done": report.done}
        return _split(head, report.why, _pieces(report.values), ("done", False))
    head |= {"sensor": report.sensor, "ok": report.ok} | ({"first": True} if report.first else {})
    faults = (("faults", _short_fields(fault.fields())) for fault in report.faults)
    return _split(head, report.why, [*faults, *_pieces(report.values)])


def decode_report(line: str | bytes) -> Report | None:
    """Return the report in a line; None where there is none. Text before MARK (a label of srun) is ignored."""
    text = line.decode("utf-8", errors="replace") if isinstance(line, bytes) else line
    _, mark, rest = text.partition(MARK)
    body = _object(rest) if mark else None
    if body is None:
        return None
    try:
        return _report(body)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None


# --- from the supervisor to agents ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heartbeat:
    """The supervisor is alive.

    Attributes:
        time: UNIX seconds by its clock.
        attempt: that runs now, or ran last; 0 before the first.
        generation: of this supervisor.
    """

    time: float
    attempt: int
    generation: str


@dataclass(frozen=True)
class Command:
    """Something to do, on every node, or on the one that is named.

    Attributes:
        id: that the answer will bear.
        attempt: that it is about; 0 where it is about none.
        kill: of clean_up: kill what is found; otherwise it is only counted.
        address: of reach: the IP address and the port.
        rank: of end_rank: which one.
        nodes: for which nodes; empty for all: srun gives every line to every agent.
    """

    do: CommandName
    id: int = 0
    attempt: int = 0
    kill: bool = True
    nodes: tuple[str, ...] = ()
    address: tuple[str, int] | None = None
    rank: int = -1


def encode_command(command: Heartbeat | Command) -> str:
    """Return the line of a command, with its line break."""
    if isinstance(command, Heartbeat):
        body: dict[str, Any] = {
            "heartbeat": round(command.time, 3), "attempt": command.attempt, "generation": command.generation,
        }  # fmt: skip
    else:
        body = {"do": command.do, "id": command.id, "attempt": command.attempt, "kill": command.kill}
        body |= {"nodes": list(command.nodes)} if command.nodes else {}
        body |= {"address": list(command.address)} if command.address else {}
        body |= {"rank": command.rank} if command.rank >= 0 else {}
    return _dump(body) + "\n"


def decode_command(line: str | bytes) -> Heartbeat | Command | None:
    """Return the command in a line; None where there is none."""
    body = _object(line.decode("utf-8", errors="replace") if isinstance(line, bytes) else line)
    if body is None:
        return None
    try:
        if "heartbeat" in body:
            return Heartbeat(float(body["heartbeat"]), int(body["attempt"]), str(body["generation"]))
        do = body["do"]
        if do not in get_args(CommandName):
            return None
        host, port = body.get("address") or ("", 0)
        return Command(
            do,
            id=int(body.get("id", 0)),
            attempt=int(body.get("attempt", 0)),
            kill=bool(body.get("kill", True)),
            nodes=tuple(str(node) for node in body.get("nodes", ())),
            address=(str(host), int(port)) if host else None,
            rank=int(body.get("rank", -1)),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


# --- how lines are made and read --------------------------------------------------------------------------------


def _dump(body: Mapping[str, Any]) -> str:
    return json.dumps(body, separators=(",", ":"))


def _object(text: str) -> dict[str, Any] | None:
    """The JSON object at the start of a text; None where there is none, or one with NaN in it."""
    try:
        value, _ = _DECODER.raw_decode(text.strip())
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _stamp_fields(stamp: Stamp) -> dict[str, Any]:
    return {"node": stamp.node, "seq": stamp.seq, "t": round(stamp.t, 3), "mono": round(stamp.mono, 3)}


_HALTED, _GONE = 1, 2
"""Bits of the last value in the row of a rank. Older versions read any of them as `halted`."""


def _row(rank: RankProgress) -> list[Any]:
    row = [rank.rank, rank.pid, int(rank.phase), rank.step, rank.committed_step, round(rank.age_s, 2)]
    row += [int(rank.waiting), round(rank.work_s, 4)]
    state = _HALTED * rank.halted + _GONE * rank.gone
    return [*row, state] if state else row


def _short(text: str, longest: int = _LONGEST_TEXT) -> str:
    """The text, cut so that it takes at most so many characters of JSON, which writes some letters as six."""
    kept = text[:longest]
    while (size := len(json.dumps(kept))) > longest:
        kept = kept[: len(kept) * longest // size]
    return kept


def _short_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A fault's fields, such that they fit a line."""
    return {
        name: _short(value, _LONGEST_TEXT if name == "line" else _LONGEST_NAME)
        if isinstance(value, str)
        else value
        for name, value in fields.items()
    }


def _pieces(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values as pieces of which each fits a line: (`values.NAME`, value); lists element by element."""
    for name, value in values.items():
        if isinstance(value, list | tuple):
            yield f"values.{name}", []
            for element in value:
                yield f"values.{name}", [_short(element) if isinstance(element, str) else element]
        else:
            yield f"values.{name}", _short(value) if isinstance(value, str) else value


def _with(body: dict[str, Any], name: str, piece: Any) -> dict[str, Any]:
    """The body with one more piece: a row of `ranks` or `faults`, or one of the values."""
    place, _, key = name.partition(".")
    if not key:
        return body | {place: [*body.get(place, []), piece]}
    values = body.get(place, {})
    if isinstance(piece, list):
        piece = [*values.get(key, []), *piece]
    return body | {place: values | {key: piece}}


def _split(
    head: dict[str, Any],
    why: str,
    pieces: Iterable[tuple[str, Any]],
    unfinished: tuple[str, bool] = ("more", True),
) -> list[str]:
    """Return as many lines as it takes, all but the last `unfinished`. A value that fits no line is left out."""
    bodies = [head | {"why": _short(why)} if why else head]
    room = LONGEST - len(MARK) - len(',"more":true')
    for name, piece in pieces:
        longer = _with(bodies[-1], name, piece)
        if len(_dump(longer)) <= room:
            bodies[-1] = longer
        elif len(_dump(alone := _with(head, name, piece))) <= room:
            bodies.append(alone)
    word, value = unfinished
    bodies = [body | {word: value} for body in bodies[:-1]] + bodies[-1:]
    return [f"{MARK}{_dump(body)}\n" for body in bodies]


def _report(body: Mapping[str, Any]) -> Report:
    stamp = Stamp(str(body["node"]), int(body["seq"]), float(body["t"]), float(body["mono"]))
    sensor = str(body["sensor"])
    if sensor == "agent" and "event" in body:
        return AgentReport(stamp, str(body["event"]), dict(body.get("values", {})))
    why, ok = str(body.get("why", "")), bool(body["ok"])
    if sensor == "progress":
        ranks = tuple(_rank(row) for row in body.get("ranks", ()))
        return ProgressReport(stamp, int(body["attempt"]), ranks, ok, why, bool(body.get("more", False)))
    values = dict(body.get("values", {}))
    if sensor == "answer":
        return Answer(stamp, int(body["id"]), ok, why, values, bool(body["done"]))
    faults = tuple(Fault.of(fault) for fault in body.get("faults", ()))
    more, first = bool(body.get("more", False)), bool(body.get("first", False))
    return SensorReport(stamp, sensor, ok, why, faults, values, more, first)


_OF_RANK: Sequence[Callable[[Any], Any]] = (
    int, int, lambda phase: Phase(int(phase)), int, int, float, bool, float, int,
)  # fmt: skip
"""Types of the values in the row of a rank, in the order of RankProgress; `halted` and `gone` are one."""


def _rank(row: Sequence[Any]) -> RankProgress:
    whole = [*row, *(0, 0.0, 0)[len(row) - 6 :]]
    values: list[Any] = [kind(value) for kind, value in zip(_OF_RANK, whole, strict=True)]
    state = values.pop()
    return replace(RankProgress(*values), halted=bool(state & _HALTED), gone=bool(state & _GONE))
