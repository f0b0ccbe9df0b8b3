"""Collects the answers of agents to a command: by the command's number, from each node."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Set

from zslurm.aegis.protocol import Answer


class AgentAnswers:
    """Answers to the commands that are waited for; those to others are dropped."""

    def __init__(self, lock: threading.RLock) -> None:
        """Wait for nothing yet; `lock` is the reading threads'."""
        self._changed = threading.Condition(lock)
        self._ids = itertools.count(1)
        self._given: dict[int, dict[str, Answer]] = {}

    @contextlib.contextmanager
    def collected(self) -> Iterator[int]:
        """Collect answers while the block runs, under the number that it gets."""
        with self._changed:
            number = next(self._ids)
            self._given[number] = {}
        try:
            yield number
        finally:
            with self._changed:
                del self._given[number]

    def take(self, node: str, answer: Answer) -> None:
        """Take an answer."""
        with self._changed:
            if answer.id in self._given:
                self._given[answer.id][node] = answer
                self._changed.notify_all()

    def wait(self, number: int, nodes: Set[str], timeout_s: float) -> dict[str, Answer]:
        """Wait for the answers of these nodes; return those that came in time."""
        with self._changed:
            answers_so_far = self._given[number]
            self._changed.wait_for(lambda: nodes <= answers_so_far.keys(), timeout_s)
            return {node: answer for node, answer in answers_so_far.items() if node in nodes}
