"""The planned move of one attempt that waits for a step's boundary, or is being made there."""

from __future__ import annotations

from dataclasses import dataclass

from zslurm.aegis.core.policy.in_memory import InMemory


@dataclass(frozen=True)
class Move:
    """A planned move.

    Attributes:
        off: the node that ranks leave.
        plan: who continues as them.
        ranks: which they are.
        number: of the generation in which they do.
        reason: why.
        request: the request that it answers, where a person asked.
    """

    off: str
    plan: InMemory
    ranks: tuple[int, ...]
    number: int
    reason: str
    request: str | None = None


@dataclass
class BoundaryMoves:
    """At most one move at a time; a fault may come before it.

    Attributes:
        move: the one that is under way; None where none is.
        overtaken: one in whose place a fault's generation was published; the ranks may have reached its boundary
            at the same moment, and the server published that generation first.
        in_vain: the ranks have held for a move in vain: before the next generation they do not do so again.
    """

    move: Move | None = None
    overtaken: Move | None = None
    in_vain: bool = False

    def leaving(self, number: int) -> set[str]:
        """Return the node that ranks leave in generations up to `number`."""
        return {self.move.off} if self.move is not None and self.move.number <= number else set()

    def overtake(self, number: int) -> None:
        """Note that a generation after `number`, the newest, is published for a fault."""
        if self.move is not None and self.move.number > number:
            self.overtaken, self.move = self.move, None
        self.in_vain = False

    def was_refused(self, number: object) -> bool:
        """Return whether the server refused the fault's generation `number`, as that of a move was there."""
        return self.overtaken is not None and self.overtaken.number == number

    def give_up(self, number: object) -> None:
        """Note that the ranks have held for generation `number` in vain."""
        if self.move is not None and self.move.number == number:
            self.move, self.in_vain = None, True

    def take(self) -> Move | None:
        """Return the move that was made, and forget it."""
        move, self.move, self.overtaken = self.move, None, None
        return move
