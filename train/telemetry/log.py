"""Set up what a rank prints: the standard `logging`, one handler, here.

Modules log to `logging.getLogger(__name__)`. Rank 0 prints messages as they are; another rank prints warnings
only, with its rank in front, because what concerns the whole run is printed once.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

_ROOTS = ("zslurm.train", "zslurm.kernels")


class _StandardOutput(logging.StreamHandler[TextIO]):
    """Prints to what sys.stdout is when a message comes, and flushes."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stdout
        super().emit(record)


def set_up(rank: int) -> None:
    """Print the messages of the trainer and its kernels to standard output, as rank `rank`."""
    handler = _StandardOutput(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s" if rank == 0 else f"rank {rank}: %(message)s"))
    for root in _ROOTS:
        logger = logging.getLogger(root)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
