"""One recovery in memory that is under way: from the first lost rank until the ranks train, or must not."""

from __future__ import annotations

from dataclasses import dataclass, field

from zslurm.aegis.core.policy.in_memory import InMemory


@dataclass
class Regrouping:
    """What is known of it; a further lost rank makes a further generation of the same recovery.

    Attributes:
        began: when (monotonic seconds).
        deadline: when its newest generation has failed (monotonic seconds).
        lost: ranks whose process is another one afterwards, or that are left out.
        dead: nodes that died.
        plan: of the newest generation; empty while none is published.
        awaits_warm: too few processes are ready, and more are being started.
        awaits_check: the spare that a plan needs is being checked.
        plan_again: something has changed beside the ranks that are lost: plan with what there is now.
        replacements_lost: processes that were lost on their way in.
    """

    began: float
    deadline: float
    lost: set[int] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)
    plan: InMemory = field(default_factory=InMemory)
    awaits_warm: bool = False
    awaits_check: bool = False
    plan_again: bool = False
    replacements_lost: int = 0

    @property
    def planned_members(self) -> tuple[str, ...]:
        """The members of the newest generation; none where it has another number of ranks."""
        return () if self.plan.former else self.plan.members
