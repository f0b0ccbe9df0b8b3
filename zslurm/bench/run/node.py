"""`python -m zslurm.bench.run.node`: the task on each node, which starts its ranks and passes their messages on.

It does what it reads from stdin (messages.py) until that ends, so it ends with the program that started it. It
imports no torch, so it is up at once, and its heartbeat does not depend on what the ranks do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress

from pydantic import ValidationError

from zslurm.bench.run.messages import (
    BEAT_S,
    OF_RANK,
    TASK_VARIABLE,
    TO_NODE,
    Address,
    Beat,
    Failed,
    FromRank,
    Here,
    MeasurementEnded,
    MeasurementStart,
    MessageOfRank,
    Sender,
    Task,
)
from zslurm.hardware.gpus import read_gpus
from zslurm.hardware.sysfs import sysroot
from zslurm.slurm.environment import node_index, node_name, own_job_id, step_nodes

PYTHON_VARIABLE = "ZSLURM_BENCH_PYTHON"
"""Environment variable with a program to start ranks with instead of Python: tests slow a rank by it."""

_LAST_LINES = 20


class BenchNode:
    """The ranks of this node."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._ranks: list[subprocess.Popen[str]] = []

    def start(self, task: Task) -> None:
        """Start the ranks."""
        self.stop()
        node = task.nodes.index(node_name())
        program = [os.environ[PYTHON_VARIABLE]] if PYTHON_VARIABLE in os.environ else [sys.executable, "-P"]
        for local_rank in range(task.ranks_per_node):
            rank = node * task.ranks_per_node + local_rank
            environ = {
                **{name: value for name, value in os.environ.items() if task.environ.get(name) != ""},
                **{name: value for name, value in task.environ.items() if value},
                TASK_VARIABLE: task.model_dump_json(),
                "RANK": str(rank),
                "WORLD_SIZE": str(len(task.nodes) * task.ranks_per_node),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(task.ranks_per_node),
            }
            process = subprocess.Popen(
                [*program, "-m", "zslurm.bench.run.rank"], env=environ, text=True, errors="replace",
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=1,
            )  # fmt: skip
            self._ranks.append(process)
            threading.Thread(target=self._follow, args=(rank, process, task.number), daemon=True).start()

    def _follow(self, rank: int, process: subprocess.Popen[str], number: int) -> None:
        """Pass a rank's messages on until it ends."""
        last: deque[str] = deque(maxlen=_LAST_LINES)
        assert process.stdout is not None
        assert process.stderr is not None
        errors = threading.Thread(target=last.extend, args=(process.stderr,), daemon=True)
        errors.start()
        for line in process.stdout:
            if (message := _message_in(line)) is not None:
                self._sender.send(FromRank(rank=rank, start=number, message=message))
        errors.join()
        code = process.wait()
        self._sender.send(MeasurementEnded(rank=rank, start=number, code=code, stderr="".join(last)[-2000:]))

    def meet(self, address: Address) -> None:
        """Give the ranks the address of the store next to rank 0."""
        for process in self._ranks:
            assert process.stdin is not None
            with suppress(OSError):  # it has ended
                process.stdin.write(address.model_dump_json() + "\n")

    def stop(self) -> None:
        """End the ranks that run."""
        for process in self._ranks:
            process.kill()
        for process in self._ranks:
            process.wait()
        self._ranks = []


def _message_in(line: str) -> MessageOfRank | None:
    """Return the message in a line of a rank; None in what libraries print."""
    try:
        body = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict) or "kind" not in body:
        return None
    try:
        return OF_RANK.validate_python(body)
    except ValidationError as error:
        return Failed(why=f"its message cannot be read: {error.errors()[0]['msg']}")


def _beat(sender: Sender) -> None:
    while True:
        threading.Event().wait(BEAT_S)
        try:
            sender.send(Beat())
        except OSError:  # no reader any more
            return


def main() -> None:
    """Do what stdin asks for, until it ends."""
    sender = Sender(os.environ)
    node = BenchNode(sender)
    nodes = step_nodes(os.environ)
    greeting = Here(
        index=node_index(os.environ) if nodes else 0,
        nodes=nodes or [node_name()],
        gpus=len(read_gpus(sysroot())),
        job=own_job_id() if nodes else None,
    )
    sender.send(greeting)
    threading.Thread(target=_beat, args=(sender,), daemon=True).start()
    try:
        for line in sys.stdin:
            message = TO_NODE.validate_json(line)
            if isinstance(message, MeasurementStart):
                node.start(message.task)
            else:
                node.meet(message)
    finally:
        node.stop()


if __name__ == "__main__":
    main()
