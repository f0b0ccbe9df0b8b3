"""The messages between a supervisor and its agents.

Agents send a `Report`, the supervisor a `Heartbeat` or a `Command`. Each is a union of small classes, whose field
`kind` names the class. Fields that a class does not have are ignored, those that are left out have their defaults,
so that versions which only add fields understand each other.

A report travels as lines of `slurm/on_nodes/message_lines.py`, for it passes srun; a message to the agents is one
line of JSON. Neither side fails because of what the other, or a third party, wrote: what cannot be read is
`Unreadable`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import msgspec

from zslurm.aegis.types import Fault
from zslurm.slurm.on_nodes.message_lines import Joiner, split
from zslurm.train.progress import Phase

M = TypeVar("M")

MARK = "zslurm-agent"
"""What the lines of reports begin with; prologs and modules print other lines."""

BATCH_NODE = "ZSLURM_BATCH_NODE"
"""Names, in an agent's environment, the node that the supervisor ran on."""

_LONGEST_TEXT = 260
"""Characters of a text in a report; what is longer is cut."""

CommandName = Literal["stacks", "clean_up", "check", "reach", "end_rank", "ras", "quit", "gpus_idle"]
"""What an agent can do: dump the ranks' stacks, kill orphans of an attempt, check its node, try whether a port of
another node answers, kill one rank, ask the collective library's RAS service, end, look for GPU memory that is
held."""


class Unreadable(Exception):
    """A message cannot be read.

    Attributes:
        is_damaged: it is no JSON; otherwise it is one that another version may know.
    """

    def __init__(self, why: str, *, is_damaged: bool) -> None:
        super().__init__(why)
        self.is_damaged = is_damaged


# --- from agents to the supervisor ------------------------------------------------------------------------------


class RankProgress(msgspec.Struct, frozen=True, array_like=True):
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


class Stamp(msgspec.Struct, frozen=True):
    """Who reports, and when.

    Attributes:
        node: as Slurm calls it.
        seq: number of the report, counted by the agent from 1; one that is missing got lost.
        t: UNIX seconds by the node's clock.
        mono: seconds of its monotonic clock; only differences mean anything, and only on that node.
    """

    node: str
    seq: int
    t: float
    mono: float


class ProgressReport(msgspec.Struct, frozen=True, tag_field="kind", tag="progress", omit_defaults=True):
    """The progress of the ranks of a node.

    Attributes:
        attempt: the attempt whose records were read; 0 if the agent does not know of one yet.
        ranks: those that have a record. A rank that ended in order has removed it.
        ok: false if the records could not be read.
        why: why not.
    """

    stamp: Stamp
    attempt: int
    ranks: tuple[RankProgress, ...] = ()
    ok: bool = True
    why: str = ""


class SensorReport(msgspec.Struct, frozen=True, tag_field="kind", tag="sensor", omit_defaults=True):
    """What a sensor read.

    Attributes:
        sensor: `kernel_log`, `gpu`, `nic`, `host`, `disk`, `agent` (its clock), ...
        ok: false if nothing could be read: then nothing is known about the node's health.
        why: why not; reported once each time it changes.
        faults: new ones since the last report.
        values: what was measured.
        first: the agent's first of this sensor: whatever is wrong now is among the faults.
    """

    stamp: Stamp
    sensor: str
    ok: bool = True
    why: str = ""
    faults: tuple[Fault, ...] = ()
    values: Mapping[str, Any] = msgspec.field(default_factory=dict)
    first: bool = False


class AgentReport(msgspec.Struct, frozen=True, tag_field="kind", tag="agent", omit_defaults=True):
    """What became of the agent itself.

    Attributes:
        event: `started`; `silent`, when it has not heard of the supervisor for aegis.standby_s; `heard`, when it
            has again; `signalled`, when it got a signal; `ended`.
        values: more about it: `pid`, `seconds`, `signal`, `reason`.
    """

    stamp: Stamp
    event: str
    values: Mapping[str, Any] = msgspec.field(default_factory=dict)


class Answer(msgspec.Struct, frozen=True, tag_field="kind", tag="answer", omit_defaults=True):
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
    """

    stamp: Stamp
    id: int
    ok: bool
    why: str = ""
    values: Mapping[str, Any] = msgspec.field(default_factory=dict)


Report = ProgressReport | SensorReport | AgentReport | Answer


def encode_report(report: Report) -> list[str]:
    """Return the lines of a report, each with its line break; long texts are cut."""
    words = report.stamp.node, str(report.stamp.seq)
    return split(MARK, words, _cut(msgspec.to_builtins(report)))


def _cut(value: Any) -> Any:
    if isinstance(value, str):
        return value[:_LONGEST_TEXT]
    if isinstance(value, dict):
        return {name: _cut(item) for name, item in value.items()}
    return [_cut(item) for item in value] if isinstance(value, list | tuple) else value


class ReportReader:
    """Reads the reports in the output of agents of one step."""

    def __init__(self, ignored: Callable[[str, Unreadable], None]) -> None:
        """Call `ignored` for each report that cannot be read, with its node, which is empty if it is not known."""
        self._joiner = Joiner(MARK, words=2, damaged=self._damaged)
        self._ignored = ignored

    def _damaged(self, node: str, line: str) -> None:
        why = f"a line is missing, or an agent of another version wrote it: {line[:200]}"
        self._ignored(node, Unreadable(why, is_damaged=True))

    def read(self, line: bytes) -> Report | None:
        """Return the report that a line completes; text before MARK (a label of srun) is ignored."""
        message = self._joiner.take(line.decode("utf-8", errors="replace"))
        if message is None:
            return None
        (node, _), text = message
        try:
            return _decoded(_REPORTS, text)
        except Unreadable as error:
            self._ignored(node, error)
            return None


# --- from the supervisor to agents ------------------------------------------------------------------------------


class Heartbeat(msgspec.Struct, frozen=True, tag_field="kind", tag="heartbeat"):
    """The supervisor is alive.

    Attributes:
        time: UNIX seconds by its clock.
        attempt: that runs now, or ran last; 0 before the first.
        generation: of this supervisor.
    """

    time: float
    attempt: int
    generation: str


class Command(msgspec.Struct, frozen=True, tag_field="kind", tag="command", omit_defaults=True):
    """Something to do, on every node, or on the one that is named.

    Attributes:
        id: that the answer will bear.
        attempt: that it is about; 0 if it is about none.
        kill: of clean_up: kill what is found; otherwise it is only counted.
        nodes: for which nodes; empty for all: srun gives every line to every agent.
        address: of reach: the IP address and the port.
        rank: of end_rank: which one.
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
    return msgspec.json.encode(command).decode() + "\n"


def decode_command(line: str | bytes) -> Heartbeat | Command:
    """Return the command in a line.

    Raises:
        Unreadable: there is none.
    """
    return _decoded(_COMMANDS, line)


_REPORTS: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)
_COMMANDS: msgspec.json.Decoder[Heartbeat | Command] = msgspec.json.Decoder(Heartbeat | Command)


def _decoded(decoder: msgspec.json.Decoder[M], text: str | bytes) -> M:
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        raise Unreadable(str(error), is_damaged=False) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Unreadable(str(error), is_damaged=True) from None
