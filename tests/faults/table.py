"""The tables that a run of the matrix writes: for each fault how it was named, what was done, and what it cost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, machine
from tests.faults.in_memory import MEMORY_ROWS, MemoryRow
from tests.faults.kept_results import Rows, commit, merged, today, update
from tests.faults.matrix import ROWS, Row
from tests.faults.parts import PARTS, InMemory


@dataclass(frozen=True)
class Entry:
    """One row.

    Attributes:
        detect_s: from the fault to its event; None if nothing had to be noticed.
        lost_steps: of every attempt that ended early.
        parts: seconds from the fault to the first new step, by part; empty if training never stopped.
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


@dataclass(frozen=True)
class MemoryEntry:
    """One row of a run that recovers in memory.

    Attributes:
        rungs: of the ladder that were taken: `memory` for each recovery in memory, then what was decided.
        replaced: ranks that recoveries in memory replaced.
        why: reason for which the first rung was left; empty if it was not, or never entered.
        lost_steps: of every recovery in memory, and of every attempt that ended early.
        found: the recoveries in memory; None if there was none.
    """

    number: int
    fault: str
    detected_as: str | None
    detect_s: float | None
    rungs: tuple[str, ...]
    replaced: tuple[int, ...]
    why: str
    ended: str
    wrongly_excluded: tuple[str, ...]
    lost_steps: tuple[int, ...]
    found: InMemory | None

    def fields(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "number": self.number,
            "fault": self.fault,
            "detected_as": self.detected_as,
            "detect_s": _rounded(self.detect_s),
            "rungs": list(self.rungs),
            "replaced": list(self.replaced),
            "why": self.why,
            "ended": self.ended,
            "wrong_exclusions": len(self.wrongly_excluded),
            "lost_steps": list(self.lost_steps),
            "regroup_s": _rounded(self.found.regroup_s if self.found else None),
            "to_first_new_step_s": _rounded(self.found.first_step_s if self.found else None),
        }


class Table:
    """Faults of one run of the tests, which need not be all, without and with recovery in memory.

    Args:
        place: directory of the table.
    """

    def __init__(self, place: Path = RESULTS) -> None:
        self._place = place
        self._restart: Rows = {}
        self._in_memory: Rows = {}

    def passed(self, entry: Entry | MemoryEntry) -> None:
        """A run ended as its row has it."""
        rows = self._restart if isinstance(entry, Entry) else self._in_memory
        rows[entry.number] = entry.fields() | {"date": today(), "commit": commit()}

    def failed(self, row: Row) -> None:
        """A run did not: what an earlier one came to no longer holds."""
        rows = self._in_memory if isinstance(row, MemoryRow) else self._restart
        rows[row.number] = None

    def write(self) -> None:
        """Replace these rows in faults.json and faults.md, unless they are the samples of `make test`."""
        samples = (
            {row.number for row in ROWS if row.sample},
            {row.number for row in MEMORY_ROWS if row.sample},
        )
        if set(self._restart) <= samples[0] and set(self._in_memory) <= samples[1]:
            return
        body = update(self._place / "faults.json", self._after)
        text = f"{_RESTART}\n{markdown(body['rows'])}\n{_MEMORY}\n{memory_markdown(body['in_memory'])}"
        (self._place / "faults.md").write_text(text)

    def _after(self, body: dict[str, Any]) -> dict[str, Any]:
        rows = merged(body.get("rows", []), self._restart, "number", [row.number for row in ROWS])
        in_memory = merged(
            body.get("in_memory", []), self._in_memory, "number", [row.number for row in MEMORY_ROWS]
        )
        return {
            "benchmark": "faults",
            "command": "make faults",
            "date": today(),
            "machine": machine(),
            "faults": len(ROWS) + len(MEMORY_ROWS),
            "passed": len(rows) + len(in_memory),
            "wrong_exclusions": sum(row["wrong_exclusions"] for row in [*rows, *in_memory]),
            "rows": rows,
            "in_memory": in_memory,
        }


_RESTART = """# Every fault of the matrix

Seconds, on the machine of faults.json; each row has the day and the commit of the run that came to its end as it
should. With `aegis.recovery: restart`:
"""
_MEMORY = """With `aegis.recovery: memory`. Rungs are those of the ladder that were taken: `memory` for each
recovery in memory, then what was decided. Ranks are given 60 s to regroup here, the default is 10 s.
"""


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table for people; seconds."""
    head = ["", "fault", "named", "noticed after", "done", "end", "lost steps", *PARTS, "to first new step", "run"]
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
            _run(row),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def memory_markdown(rows: list[dict[str, Any]]) -> str:
    """The table of runs that recover in memory."""
    head = ["", "fault", "named", "noticed after", "rungs", "ranks replaced", "why not in memory", "end",
            "lost steps", "regroup", "to first new step", "run"]  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    for row in rows:
        cells = [
            str(row["number"]),
            row["fault"],
            row["detected_as"] or "",
            _shown(row["detect_s"]),
            ", ".join(row["rungs"]),
            ", ".join(map(str, row["replaced"])),
            row["why"],
            row["ended"],
            ", ".join(map(str, row["lost_steps"])),
            _shown(row["regroup_s"], 2),
            _shown(row["to_first_new_step_s"], 2),
            _run(row),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _run(row: dict[str, Any]) -> str:
    return ", ".join(str(row[name]) for name in ("date", "commit") if name in row)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 2)


def _shown(seconds: float | None, digits: int = 1) -> str:
    return "" if seconds is None else f"{seconds:.{digits}f}"
