"""Collects the answers of agents to a command: by the command's number, from each node, line by line."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Set

from zslurm.aegis.protocol import Answer, joined


class AgentAnswers:
    """Answers to the commands that are waited for; those to others are dropped."""

    def __init__(self, lock: threading.RLock) -> None:
        """Wait for nothing yet; `lock` is that of the reading threads."""
        self._changed = threading.Condition(lock)
        self._ids = itertools.count(1)
        self._lines: dict[int, dict[str, list[Answer]]] = {}

    @contextlib.contextmanager
    def collected(self) -> Iterator[int]:
        """Collect answers while the block runs, under the number that it gets."""
        with self._changed:
            number = next(self._ids)
            self._lines[number] = {}
        try:
            yield number
        finally:
            with self._changed:
                del self._lines[number]

    def take(self, node: str, answer: Answer) -> None:
        """Take one line of an answer."""
        with self._changed:
            if answer.id in self._lines:
                self._lines[answer.id].setdefault(node, []).append(answer)
                self._changed.notify_all()

    def wait(self, number: int, nodes: Set[str], timeout_s: float) -> dict[str, Answer]:
        """Wait for whole answers of these nodes; return those that came in time."""
        with self._changed:
            self._changed.wait_for(lambda: nodes <= self._whole(number).keys(), timeout_s)
            return {node: answer for node, answer in self._whole(number).items() if node in nodes}

    def _whole(self, number: int) -> dict[str, Answer]:
        return {node: joined(lines) for node, lines in self._lines[number].items() if lines[-1].done}
