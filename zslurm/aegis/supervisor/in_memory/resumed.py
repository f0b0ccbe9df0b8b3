"""What an earlier supervisor of an attempt has left of its recovery in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zslurm.aegis.supervisor.in_memory.boundary_moves import Move
from zslurm.train.recovery.generation import Generation


@dataclass(frozen=True)
class Resumed:
    """Where an attempt is.

    Attributes:
        members: by rank, before `pending`.
        number: of the newest generation.
        step: to which the last recovery went back; -1 where there was none.
        trained: the last step that is known to be finished; -1 where none is.
        dead: nodes that died, and whose ranks are elsewhere now.
        left: nodes that ranks have left as planned.
        ended: ranks that hung, and were killed alone, since the last recovery.
        died: nodes that have died in this attempt.
        given_up: nothing is recovered in memory in this attempt any more.
        pending: the newest generation where nobody has recorded yet how it ended.
        outcome: of `pending`, where the store server knows it.
        move: the planned move that `pending` is, or that waits for a boundary.
        in_vain: the ranks have held in vain for the next generation.
    """

    members: tuple[str, ...]
    number: int = 0
    step: int = -1
    trained: int = -1
    dead: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()
    ended: frozenset[int] = frozenset()
    died: frozenset[str] = frozenset()
    given_up: bool = False
    pending: Generation | None = None
    outcome: Mapping[str, Any] | None = None
    move: Move | None = None
    in_vain: bool = False
