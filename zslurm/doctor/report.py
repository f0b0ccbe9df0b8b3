"""What the checks found: results by check and node, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zslurm.core.errors import Exit
from zslurm.doctor.check import Check, CheckOutcome, Status
from zslurm.slurm.hostlist import compress, natural_key

LOGIN = "(login)"
"""What the machine is called that the doctor runs on: no node can have this name."""


@dataclass(frozen=True)
class CheckResult:
    """What one check found on one machine, which is LOGIN on the machine of the doctor itself."""

    check: str
    node: str
    outcome: CheckOutcome


@dataclass
class DoctorReport:
    """Everything that was found.

    Attributes:
        cluster: name of the profile.
        checks: that were run, in the order of the table.
        asked: nodes that were asked, whether they answered or not.
        not_asked: nodes that were not asked, and why.
        slurm_error: why no node could be asked.
        took_s: in all.
    """

    cluster: str
    checks: Sequence[Check]
    results: list[CheckResult] = field(default_factory=list)
    asked: tuple[str, ...] = ()
    not_asked: Mapping[str, str] = field(default_factory=dict)
    slurm_error: str | None = None
    took_s: float = 0.0

    def add(self, check: str, outcomes: Mapping[str, CheckOutcome | None]) -> None:
        """Add what a check found on several machines."""
        self.results += [
            CheckResult(check, node, outcome) for node, outcome in outcomes.items() if outcome is not None
        ]

    @property
    def failing(self) -> list[str]:
        """Compute nodes that should not be used, in natural order."""
        nodes = {
            result.node
            for result in self.results
            if result.outcome.status is Status.FAIL and result.outcome.node_fault and result.node != LOGIN
        }
        return sorted(nodes, key=natural_key)

    @property
    def exclude(self) -> str:
        """Those nodes as a hostlist for `--exclude`; empty if there are none."""
        return compress(self.failing)

    @property
    def worst(self) -> Status:
        """Of all results."""
        return max((result.outcome.status for result in self.results), key=lambda s: s.rank, default=Status.PASS)

    @property
    def exit_code(self) -> Exit:
        """4 if Slurm did not let us ask, 5 if a check failed, else 0."""
        if self.slurm_error is not None:
            return Exit.SLURM_UNAVAILABLE
        return Exit.CHECK_FAILED if self.worst is Status.FAIL else Exit.DONE

    def as_json(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        return {
            "cluster": self.cluster,
            "status": self.worst,
            "took_s": round(self.took_s, 3),
            "slurm_error": self.slurm_error,
            "checks": [
                {"name": check.name, "group": check.group, "about": check.about, "where": check.where}
                for check in self.checks
            ],
            "asked": list(self.asked),
            "not_asked": dict(self.not_asked),
            "failing": self.failing,
            "exclude": self.exclude,
            "results": [
                {"check": result.check, "node": result.node, **result.outcome.to_json()} for result in self.results
            ],
        }
