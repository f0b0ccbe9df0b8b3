"""The tables that a run of the matrix writes: for each fault how it was named, what was done, and what it cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.common import RESULTS, write_result
from tests.faults.in_memory import MEMORY_ROWS
from tests.faults.matrix import ROWS
from tests.faults.parts import PARTS, InMemory
from zslurm.core.files import read_json


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


@dataclass(frozen=True)
class MemoryEntry:
    """One row of a run that recovers in memory.

    Attributes:
        rungs: of the ladder that were taken: `memory` for each recovery in memory, then what was decided.
        replaced: ranks that recoveries in memory replaced.
        why: reason for which the first rung was left; empty where it was not, or never entered.
        lost_steps: of every recovery in memory, and of every attempt that ended early.
        found: the recoveries in memory; None where there was none.
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
    """Entries of one run of the tests, without and with recovery in memory."""

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self.in_memory: dict[int, MemoryEntry] = {}

    def add(self, entry: Entry | MemoryEntry) -> None:
        if isinstance(entry, Entry):
            self.entries[entry.number] = entry
        else:
            self.in_memory[entry.number] = entry

    def write_what_is_whole(self) -> None:
        """Write benchmarks/results/faults.json and faults.md, where every fault of a mode was injected.

        The rows of the other mode stay as they are in the file.
        """
        whole: dict[str, list[dict[str, Any]]] = {}
        if set(self.entries) == {row.number for row in ROWS}:
            whole["rows"] = [self.entries[number].fields() for number in sorted(self.entries)]
        if set(self.in_memory) == {row.number for row in MEMORY_ROWS}:
            whole["in_memory"] = [self.in_memory[number].fields() for number in sorted(self.in_memory)]
        if not whole:
            return
        before = read_json(RESULTS / "faults.json") or {}
        rows, in_memory = (whole.get(name, before.get(name, [])) for name in ("rows", "in_memory"))
        write_result(
            "faults",
            {
                "command": "make faults",
                "wrong_exclusions": sum(row["wrong_exclusions"] for row in [*rows, *in_memory]),
                "rows": rows,
                "in_memory": in_memory,
            },
        )
        text = f"{_RESTART}\n{markdown(rows)}\n{_MEMORY}\n{memory_markdown(in_memory)}"
        (RESULTS / "faults.md").write_text(text)


_RESTART = """# Every fault of the matrix

Seconds, on the machine of faults.json. With `aegis.recovery: restart`:
"""
_MEMORY = """With `aegis.recovery: memory`. Rungs are those of the ladder that were taken: `memory` for each
recovery in memory, then what was decided. Ranks are given 60 s to regroup here, the default is 10 s.
"""


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


def memory_markdown(rows: list[dict[str, Any]]) -> str:
    """The table of runs that recover in memory."""
    head = ["", "fault", "named", "noticed after", "rungs", "ranks replaced", "why not in memory", "end",
            "lost steps", "regroup", "to first new step"]  # fmt: skip
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
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 2)


def _shown(seconds: float | None, digits: int = 1) -> str:
    return "" if seconds is None else f"{seconds:.{digits}f}"
