"""Messages between the program and the nodes: lines of JSON on the nodes' stdin and stdout.

No port is opened and no file is shared for them: from a Slurm job they travel through srun. A node's task
(node.py) writes what it and its ranks have to report; what the program writes reaches every node.

    to the nodes     {"do": "start", ...}     start the ranks (the fields of `Task`)
                     {"do": "meet", ...}      the address of the store, for the ranks
                     {"do": "stop"}           end the ranks; the end of stdin stops the node's task as well
    from a node      {"is": "here", ...}      the node is up: its name, its GPUs, the nodes of the step
                     {"is": "beat"}           every few seconds, for as long as it lives
                     {"is": "ended", ...}     a rank ended: its number, its exit code, the end of its stderr
    from a rank      {"is": "address", ...}   where the store beside rank 0 is
                     {"is": "plan", ...}      rank 0: the machine, how many points, the estimate, what is skipped
                     {"is": "rows", ...}      rank 0: rows of a point, and the seconds that it took
                     {"is": "skipped", ...}   rank 0: a point for which no time was left
                     {"is": "done"}           rank 0: all points are measured
                     {"is": "failed", ...}    any rank: why it gives up
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from typing import IO, Any

from pydantic import BaseModel

from zslurm.slurm.environment import node_name
from zslurm.slurm.on_nodes.message_lines import Joiner, split

Message = dict[str, Any]

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
        number: of this start of the ranks; their messages carry it, for those of an earlier start may still come.
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


class Sender:
    """Writes a node's messages to stdout, from several threads."""

    def __init__(self, environ: Mapping[str, str], stream: IO[str] = sys.stdout) -> None:
        self._node, self._stream = node_name(environ), stream
        self._lock = threading.Lock()
        self._number = 0

    def send(self, message: Message) -> None:
        """Write one message."""
        with self._lock:
            self._number += 1
            for line in split(_MARK, (self._node, str(self._number)), message):
                self._stream.write(line)
                self._stream.flush()


class Receiver:
    """Puts the messages of all nodes together from the lines that came through."""

    def __init__(self) -> None:
        self._joiner = Joiner(_MARK, words=2)

    def read(self, line: str) -> tuple[str, Message] | None:
        """Return the node and its message, where a line completes one."""
        if (whole := self._joiner.take(line)) is None:
            return None
        (node, _), message = whole
        return (node, message) if isinstance(message, dict) else None
