"""Set up what a program of zslurm logs: the standard `logging`, one handler, here.

Modules log to `logging.getLogger(__name__)`. A program calls `set_up` once, with what precedes each message. The
ranks log by train/log.py.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TextIO

from zslurm.core.redact import redact

_ROOT = "zslurm"


class _Output(logging.StreamHandler[TextIO]):
    """Prints, without secrets, to what sys.stdout or sys.stderr is when a message comes."""

    def __init__(self, stream: Literal["stdout", "stderr"]) -> None:
        self._name_of_stream = stream
        super().__init__(getattr(sys, stream))

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = getattr(sys, self._name_of_stream)
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - as logging calls it
        """Do without a message that cannot be written, as if the disk is full; a mistake in it is shown."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def set_up(prefix: str = "", stream: Literal["stdout", "stderr"] = "stderr") -> None:
    """Print what zslurm's modules log from now on, each message with `prefix` in front."""
    handler = _Output(stream)
    handler.setFormatter(logging.Formatter(f"{prefix}%(message)s"))
    logger = logging.getLogger(_ROOT)
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)


@contextmanager
def detailed(module: str) -> Iterator[None]:
    """Print the debug messages of a module, too, for as long as the context lasts."""
    logger = logging.getLogger(module)
    before = logger.level
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.setLevel(before)
