"""The table that runs of the pairs write: how they met, what was decided, what it cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, machine
from tests.faults.kept_results import Rows, merged, update
from tests.faults.pairs import PAIRS


@dataclass(frozen=True)
class PairEntry:
    """One pair.

    Attributes:
        id: of the pair.
        first: the first fault, in words.
        second: the second.
        when: the moment that was asked for.
        met: the run's last event before the second fault.
        actions: decisions, in order.
        ended: how the run ended.
        attempts: how many were started.
        requeues: how often the job went back into the queue.
        excluded: nodes.
        wrongly_excluded: those of them that neither fault is to blame for.
        lost_steps: of every attempt that ended early.
        trains_again_s: seconds from the first fault to the first step of the last attempt; None if training
            never stopped.
        date: day of the run.
        commit: of the code that ran; with "+" if files differed from it.
    """

    id: str
    first: str
    second: str
    when: str
    met: str
    actions: tuple[str, ...]
    ended: str
    attempts: int
    requeues: int
    excluded: int
    wrongly_excluded: int
    lost_steps: tuple[int, ...]
    trains_again_s: float | None
    date: str
    commit: str

    def fields(self) -> dict[str, Any]:
        """As JSON."""
        seconds = None if self.trains_again_s is None else round(self.trains_again_s, 1)
        return asdict(self) | {"trains_again_s": seconds}


class PairTable:
    """What came of the pairs of one run of the tests, which need not be all.

    Args:
        place: directory of the table.
    """

    def __init__(self, place: Path = RESULTS) -> None:
        self._place = place
        self._new: Rows = {}

    def passed(self, entry: PairEntry) -> None:
        """A pair ended as it should."""
        self._new[entry.id] = entry.fields()

    def failed(self, pair: str) -> None:
        """A pair did not: what an earlier run made of it no longer holds."""
        self._new[pair] = None

    def write(self) -> None:
        """Replace these rows in fault_pairs.json and fault_pairs.md, unless it was the sample alone."""
        if set(self._new) <= {pair.id for pair in PAIRS if pair.sample}:
            return
        update(self._place / "fault_pairs.json", self._after)

    def _after(self, body: dict[str, Any]) -> dict[str, Any]:
        rows = merged(body.get("rows", []), self._new, "id", [pair.id for pair in PAIRS])
        (self._place / "fault_pairs.md").write_text(markdown(rows))
        return {
            "benchmark": "fault_pairs",
            "command": "make soak PYTEST_ARGS=tests/faults/test_pairs.py",
            "machine": machine(),
            "pairs": len(PAIRS),
            "passed": len(rows),
            "wrong_exclusions": sum(row["wrongly_excluded"] for row in rows),
            "rows": rows,
        }


_HEAD = ("first", "second", "when the run was", "last event", "decisions", "end", "attempts", "requeues",
         "excluded", "lost steps", "trains again after, s", "run")  # fmt: skip


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table for people."""
    lines = [f"| {' | '.join(_HEAD)} |", "|" + " --- |" * len(_HEAD)]
    for row in rows:
        cells = [
            row["first"],
            row["second"],
            row["when"],
            row["met"],
            ", ".join(row["actions"]),
            row["ended"],
            row["attempts"],
            row["requeues"],
            row["excluded"],
            ", ".join(map(str, row["lost_steps"])),
            "" if row["trains_again_s"] is None else row["trains_again_s"],
            f"{row['date']}, {row['commit']}",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"
