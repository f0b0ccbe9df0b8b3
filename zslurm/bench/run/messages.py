"""Messages between the program and the nodes: lines of JSON on the nodes' stdin and stdout.

No port is opened and no file is shared for them: from a Slurm job they travel through srun. A node's task
(node.py) writes what it and its ranks have to report; what the program writes reaches every node. Each message is
of a class here, which its field `kind` names. The end of a node's stdin ends its ranks.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from typing import IO, Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from zslurm.bench.result import MeasuredMachine, Skipped
from zslurm.slurm.environment import node_name
from zslurm.slurm.on_nodes.message_lines import Joiner, split

BEAT_S = 2.0
"""Between two heartbeats of a node."""

TASK_VARIABLE = "ZSLURM_BENCH_TASK"
"""Environment variable with the `Task` of a rank."""

_MARK = "zslurm-bench"
"""What the part of a line with a message begins with."""


class Task(BaseModel):
    """What the ranks are started with.

    Attributes:
        benchmark: its name.
        options: of the benchmark.
        cluster: name of the profile.
        nodes: in the order of the ranks.
        ranks_per_node: on each node.
        number: of this start of the ranks; their messages carry it, as messages of an earlier start may still
        come.
        environ: variables that the ranks get on top of the node's; an empty one is taken away.
        seconds: the time for all points; None is no limit.
        timeout_s: a collective that takes longer than this is given up.
    """

    benchmark: str
    options: dict[str, Any]
    cluster: str
    nodes: list[str]
    ranks_per_node: int
    number: int = 0
    environ: dict[str, str] = {}
    seconds: float | None = None
    timeout_s: float = 300.0


# --- to the nodes -----------------------------------------------------------------------------------------------


class MeasurementStart(BaseModel):
    """Start the ranks."""

    kind: Literal["start"] = "start"
    task: Task


class Address(BaseModel):
    """Where the store next to rank 0 is: rank 0 reports it, and every rank gets it."""

    kind: Literal["address"] = "address"
    host: str
    port: int


# --- from a rank ------------------------------------------------------------------------------------------------


class Planned(BaseModel):
    """Rank 0 knows the machine and what to measure: how many points, in about how many seconds."""

    kind: Literal["planned"] = "planned"
    machine: MeasuredMachine
    versions: dict[str, str | None]
    environment: dict[str, str]
    points: int
    seconds: float
    skipped: list[Skipped]


class PointMeasured(BaseModel):
    """Rank 0 has measured a point: its rows, its number in the plan, the seconds that it took and should take."""

    kind: Literal["measured"] = "measured"
    rows: list[dict[str, Any]]
    index: int
    seconds: float
    expected: float


class NoTimeLeft(BaseModel):
    """Rank 0 skips a point, for which no time was left; it would have taken the expected seconds."""

    kind: Literal["no time left"] = "no time left"
    point: dict[str, Any]
    reason: str
    expected: float


class PointDone(BaseModel):
    """Rank 0: all points are measured."""

    kind: Literal["done"] = "done"


class Failed(BaseModel):
    """A rank gives up; `refused`: because of what the user asked for."""

    kind: Literal["failed"] = "failed"
    why: str
    refused: bool = False


MessageOfRank = Address | Planned | PointMeasured | NoTimeLeft | PointDone | Failed

# --- from a node ------------------------------------------------------------------------------------------------


class Here(BaseModel):
    """The node is up: its place among the nodes of the step, its GPUs, its job."""

    kind: Literal["here"] = "here"
    index: int
    nodes: list[str]
    gpus: int
    job: str | None


class Beat(BaseModel):
    """The node lives."""

    kind: Literal["beat"] = "beat"


class MeasurementEnded(BaseModel):
    """A rank ended: its exit code, and the end of its stderr."""

    kind: Literal["ended"] = "ended"
    rank: int
    start: int
    code: int
    stderr: str


class FromRank(BaseModel):
    """A message of a rank, of the start with this number."""

    kind: Literal["from rank"] = "from rank"
    rank: int
    start: int
    message: MessageOfRank = Field(discriminator="kind")


MessageOfNode = Here | Beat | MeasurementEnded | FromRank

TO_NODE: TypeAdapter[MeasurementStart | Address] = TypeAdapter(
    Annotated[MeasurementStart | Address, Field(discriminator="kind")]
)
OF_RANK: TypeAdapter[MessageOfRank] = TypeAdapter(Annotated[MessageOfRank, Field(discriminator="kind")])
_OF_NODE: TypeAdapter[MessageOfNode] = TypeAdapter(Annotated[MessageOfNode, Field(discriminator="kind")])


class Sender:
    """Writes a node's messages to stdout, from several threads."""

    def __init__(self, environ: Mapping[str, str], stream: IO[str] = sys.stdout) -> None:
        self._node, self._stream = node_name(environ), stream
        self._lock = threading.Lock()
        self._number = 0

    def send(self, message: MessageOfNode) -> None:
        """Write one message."""
        with self._lock:
            self._number += 1
            for line in split(_MARK, (self._node, str(self._number)), message.model_dump()):
                self._stream.write(line)
                self._stream.flush()


class Receiver:
    """Puts the messages of all nodes together from the lines that came through."""

    def __init__(self) -> None:
        self._joiner = Joiner(_MARK, words=2)

    def read(self, line: str) -> tuple[str, MessageOfNode] | None:
        """Return the node and its message, if a line completes one; None also for one that is damaged."""
        if (message := self._joiner.take(line)) is None:
            return None
        (node, _), text = message
        try:
            return node, _OF_NODE.validate_json(text)
        except ValidationError:
            return None
