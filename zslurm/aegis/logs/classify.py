"""What went wrong in a job, found only in its logs: the root, what followed from it, who is suspect.

The earliest root wins: by time if the lines have stamps, else by their order. Lines that report consequences
(cascades, teardown) are the root only if there is nothing else, and advisories never do. Two exceptions:
Slurm logs only afterwards that memory ran out or that a node died, so this goes before a program's own error; and
a link that came back before anything failed is passed over.

A rank's node is known only if a line names both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from zslurm.aegis.fault_kinds import FaultKind, rule_of
from zslurm.aegis.logs.root_of_log import root_of_log
from zslurm.aegis.logs.scanner import Finding, as_fault, findings_in
from zslurm.aegis.logs.signatures import Match
from zslurm.slurm.on_nodes.srun_output import task_failures

_KEPT = 10_000
"""Lines of one kind and file that are kept; more of them show nothing new."""


@dataclass(frozen=True)
class Line:
    """A line that reports a fault, and the place of the fault.

    Attributes:
        file: as it was named.
        finding: what it means.
        when: UNIX seconds, by its own stamp or else by its place in the file; None if neither is known.
    """

    file: str
    finding: Finding
    when: float | None = None

    @property
    def match(self) -> Match:
        """What it means."""
        return self.finding.match


@dataclass(frozen=True)
class Suspect:
    """Whom the root points at, as far as the logs say so."""

    node: str | None = None
    gpu: str | None = None
    nic: str | None = None
    rank: int | None = None


@dataclass(frozen=True)
class Diagnosis:
    """What the logs show.

    Attributes:
        lines: all that report a fault, in the order of time.
        root: what it began with; None if nothing is known to be wrong.
        certain: the root is a cause by itself; false if only consequences were found.
        suspect: whom it points at.
        advice: what to do.
        left_out: further lines like those, which were only counted.
    """

    lines: tuple[Line, ...]
    root: Line | None
    certain: bool
    suspect: Suspect
    advice: str
    left_out: int = 0


def classify(logs: Iterable[tuple[str, Iterable[bytes]]]) -> Diagnosis:
    """Read the logs of one job and return what went wrong.

    Args:
        logs: name and bytes of each, the batch script's first if there is no other order.

    Raises:
        OSError: a log cannot be read.
    """
    read: list[Line] = []
    left_out = 0
    for name, chunks in logs:
        kept, more = _read(name, chunks)
        read += kept
        left_out += more
    lines = sorted(_without_idle_ends(read), key=lambda line: (line.when is None, line.when or 0.0))
    faults = [as_fault(line.finding, "log", time=float) for line in lines]
    root_fault, certain = root_of_log(faults)
    root = next((line for line, fault in zip(lines, faults, strict=True) if fault is root_fault), None)
    if root is None:
        return Diagnosis(tuple(lines), None, False, Suspect(), "", left_out)
    suspect = _suspect(root, lines)
    return Diagnosis(tuple(lines), root, certain, suspect, root.match.advice, left_out)


def _read(name: str, chunks: Iterable[bytes]) -> tuple[list[Line], int]:
    """Return the lines that report faults, each with a time if any has one, and how many were left out."""
    kept: list[Line] = []
    numbers: Counter[str] = Counter()
    latest: float | None = None
    for finding in findings_in(chunks):
        numbers[finding.match.kind] += 1
        if numbers[finding.match.kind] > _KEPT:
            continue
        if finding.time is not None:
            latest = max(latest or finding.time, finding.time)
        kept.append(Line(name, finding, finding.time if finding.time is not None else latest))
    first = next((line.when for line in kept if line.when is not None), None)
    timed = [line if line.when is not None else replace(line, when=first) for line in kept]
    return timed, sum(numbers.values()) - len(kept)


def _without_idle_ends(lines: Sequence[Line]) -> list[Line]:
    """Leave out ends of faults whose begin was not seen: every link comes up once when a node boots."""
    seen = {line.match.kind for line in lines}

    def is_kept(ended: FaultKind | None) -> bool:
        return ended is None or ended in seen or not rule_of(ended).may_pass

    return [line for line in lines if is_kept(line.match.clears)]


def _suspect(root: Line, lines: Sequence[Line]) -> Suspect:
    match = root.match
    node = match.node or (nodes_of_ranks(lines).get(match.rank) if match.rank is not None else None)
    return Suspect(node, match.gpu, match.nic, match.rank)


def nodes_of_ranks(lines: Sequence[Line]) -> dict[int, str]:
    """Return the nodes of ranks, if lines name both."""
    nodes: dict[int, str] = {}
    for line in lines:
        for failure in task_failures(line.finding.text):
            if "[" in failure.node:
                continue  # several nodes, and which of the ranks ran on which is not said
            for rank in failure.ranks:
                nodes.setdefault(rank, failure.node)
        if line.match.rank is not None and line.match.node is not None:
            nodes.setdefault(line.match.rank, line.match.node)
    return nodes
