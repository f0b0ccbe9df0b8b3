"""Read what the nodes of a benchmark write, without waiting for it."""

from __future__ import annotations

import queue
import threading
import time

from zslurm.bench.run.messages import MessageOfNode, Receiver
from zslurm.slurm.on_nodes.node_tasks import NodeTasks

_LOOK_S = 0.2


class Following:
    """Reads what the nodes write, in threads, so that waiting for it can end."""

    def __init__(self, tasks: NodeTasks) -> None:
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._receiver = Receiver()
        self.errors: list[tuple[float, str]] = []
        threading.Thread(target=self._read, args=(tasks,), daemon=True).start()
        self._err = threading.Thread(target=self._read_errors, args=(tasks,), daemon=True)
        self._err.start()
        self.over = False

    def _read(self, tasks: NodeTasks) -> None:
        for line in tasks.process.stdout or ():
            self._lines.put(line)
        self._lines.put(None)

    def _read_errors(self, tasks: NodeTasks) -> None:
        for line in tasks.process.stderr or ():
            self.errors.append((time.time(), line))

    @property
    def error_text(self) -> str:
        """Return what srun printed so far."""
        return "".join(line for _, line in list(self.errors))

    def next(self) -> tuple[str, MessageOfNode] | None:
        """Return the next message; None if there is none within a moment, or ever (`over`)."""
        try:
            line = self._lines.get(timeout=_LOOK_S)
        except queue.Empty:
            return None
        if line is None:
            self._err.join(1.0)
            self.over = True
            return None
        return self._receiver.read(line)
