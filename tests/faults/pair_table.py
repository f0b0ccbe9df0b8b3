"""The table that a run of all pairs writes: how they met, what was decided, what it cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.common import RESULTS, write_result
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
        trains_again_s: seconds from the first fault to the first step of the last attempt; None where training
            never stopped.
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

    def fields(self) -> dict[str, Any]:
        """As JSON."""
        seconds = None if self.trains_again_s is None else round(self.trains_again_s, 1)
        return asdict(self) | {"trains_again_s": seconds}


class PairTable:
    """Entries of one run of the tests."""

    def __init__(self) -> None:
        self.entries: dict[str, PairEntry] = {}

    def add(self, entry: PairEntry) -> None:
        self.entries[entry.id] = entry

    def write_if_whole(self) -> None:
        """Write benchmarks/results/fault_pairs.json and fault_pairs.md, where every pair was run."""
        if set(self.entries) != {pair.id for pair in PAIRS}:
            return
        rows = [self.entries[pair.id].fields() for pair in PAIRS]
        body = {
            "command": "make soak PYTEST_ARGS=tests/faults/test_pairs.py",
            "wrong_exclusions": sum(row["wrongly_excluded"] for row in rows),
            "rows": rows,
        }
        write_result("fault_pairs", body)
        (RESULTS / "fault_pairs.md").write_text(markdown(rows))


_HEAD = ("first", "second", "when the run was", "last event", "decisions", "end", "attempts", "requeues",
         "excluded", "lost steps", "trains again after, s")  # fmt: skip


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
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"
