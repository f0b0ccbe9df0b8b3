"""The table that a run of the matrix writes: for each fault how it was named, what was done, and what it cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.common import RESULTS, write_result
from tests.faults.matrix import ROWS
from tests.faults.parts import PARTS


@dataclass(frozen=True)
class Entry:
    """One row.

    Attributes:
        detect_s: from the fault to its event; None where nothing had to be noticed.
        lost_steps: of every attempt that ended early.
        parts: seconds from the fault to the first new step, by part; empty where training never stopped.
    """

    number: int
    fault: str
    detected_as: str | None
    detect_s: float | None
    actions: tuple[str, ...]
    ended: str
    excluded: tuple[str, ...]
    wrongly_excluded: tuple[str, ...]
    lost_steps: tuple[int, ...]
    parts: dict[str, float]

    def fields(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "number": self.number,
            "fault": self.fault,
            "detected_as": self.detected_as,
            "detect_s": _rounded(self.detect_s),
            "actions": list(self.actions),
            "ended": self.ended,
            "excluded_nodes": len(self.excluded),
            "wrong_exclusions": len(self.wrongly_excluded),
            "lost_steps": list(self.lost_steps),
            "parts_s": {part: _rounded(seconds) for part, seconds in self.parts.items()},
            "to_first_new_step_s": _rounded(sum(self.parts.values())) if self.parts else None,
        }


class Table:
    """Entries of one run of the tests."""

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}

    def add(self, entry: Entry) -> None:
        self.entries[entry.number] = entry

    def write_if_whole(self) -> None:
        """Write benchmarks/results/faults.json and faults.md, where every fault of the matrix was injected."""
        if set(self.entries) != {row.number for row in ROWS}:
            return
        rows = [self.entries[number].fields() for number in sorted(self.entries)]
        write_result(
            "faults",
            {
                "command": "make faults",
                "wrong_exclusions": sum(row["wrong_exclusions"] for row in rows),
                "rows": rows,
            },
        )
        (RESULTS / "faults.md").write_text(markdown(rows))


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table for people; seconds."""
    head = ["", "fault", "named", "noticed after", "done", "end", "lost steps", *PARTS, "to first new step"]
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    for row in rows:
        parts = [_shown(row["parts_s"].get(part)) for part in PARTS]
        cells = [
            str(row["number"]),
            row["fault"],
            row["detected_as"] or "",
            _shown(row["detect_s"]),
            ", ".join(row["actions"]),
            row["ended"],
            ", ".join(map(str, row["lost_steps"])),
            *parts,
            _shown(row["to_first_new_step_s"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 2)


def _shown(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f}"
