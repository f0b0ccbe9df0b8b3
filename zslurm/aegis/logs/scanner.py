"""Faults that a log reports, found while it is read or after the fact.

A block of a log is first stripped of its digits: the lines of healthy training then fall together into a few, and
those that were seen before need no second look. What is new is searched for the literals of the prefilter
(signatures.py), and only lines that have some are read as text.

Some faults take several lines. Of a Python traceback only the last line counts, not the source that it quotes;
an exception that was raised while another was handled is a cascade of that; a driver's page-fault report is one
fault, whatever its number of lines; when several GPUs of a node report after one of them, that one is the root. A
connection that timed out after its name could not be resolved is a fault of the network, not of a lost peer.
"""

from __future__ import annotations

import re
import time as clock
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

from zslurm.aegis.fault_kinds import BENIGN, GPU_RAS_UNCORRECTABLE, NET_CONFIG, PEER_LOST, rule_of
from zslurm.aegis.logs.lines import (
    MAX_LINE,
    OVERLAP,
    Block,
    Blocks,
    as_chunks,
    body_of,
    chunks_of,
    clean,
    time_of,
    without_labels,
)
from zslurm.aegis.logs.location import location_in_summary
from zslurm.aegis.logs.name_lookups import is_unresolved
from zslurm.aegis.logs.signatures import Match, Signatures
from zslurm.aegis.types import Fault

_DIGITS = b"0123456789"
_KNOWN_LINES = 10_000
_KNOWN_LENGTH = 1024
_CONTEXT = 1 << 16
"""Bytes before a line that are kept to understand it."""
_LINES_BACK = 400
_LINES_BACK_FOR_TIME = 50
_LINES_OF_ONE_FAULT = 11
_LINES_OF_ONE_EVENT = 200
_MAX_WORDS = 500

_FRAME = re.compile(r'^\s*(?:\|\s*)?File ".*", line \d+')
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Za-z]\w*(?:Error|Exception|Interrupt|Exit)\b")
_RETRIED = re.compile(
    r"\b(?:will retry|re-?trying|retry(?:ing)? (?:in|after)|attempt \d+ ?(?:/|of) ?\d+)\b", re.IGNORECASE
)
_OF_LAUNCHER = re.compile(
    r"\b(?:srun|slurmstepd|salloc|sbatch): |\b(?:mpirun|mpiexec|prterun)\b|\bpdsh@|has been marked dead because"
    r"|^error: +(?:\*\*\* (?:JOB|STEP) |mpi/\w+: |Prolog )"  # slurmstepd since Slurm 26.05
)
_TRACEBACK = "Traceback (most recent call last)"
_CHAINED = ("During handling of the above exception", "was the direct cause of the following exception")


@dataclass(frozen=True)
class Finding:
    """A line that reports a fault.

    Attributes:
        number: of the line in its file, from 1.
        text: its message, without labels and stamps in front.
        time: UNIX seconds, by its own stamp or an earlier line's; None if there is none.
        match: what it means.
        continues: it adds to the fault of a finding shortly before.
    """

    number: int
    text: str
    time: float | None
    match: Match
    continues: bool = False


class LogScanner:
    """Finds faults in one log that arrives in pieces."""

    def __init__(self, *, kernel: bool = False) -> None:
        """Begin at the start of a log; `kernel`: it is the kernel's."""
        self._signatures = Signatures.load()
        self._kernel = kernel
        self._blocks = Blocks()
        self._harmless: set[bytes] = set()
        self._before = b""
        self._seen: dict[tuple[object, ...], int] = {}
        self._first_gpu: tuple[str | None, str, int] | None = None
        self._last: tuple[int, float | None] = (0, None)

    def feed(self, data: bytes) -> list[Finding]:
        """Return the findings of what has become complete."""
        return [finding for block in self._blocks.feed(data) for finding in self._scan(block)]

    def close(self) -> list[Finding]:
        """Return the findings of an unfinished last line."""
        return [finding for block in self._blocks.close() for finding in self._scan(block)]

    def _scan(self, block: Block) -> Iterator[Finding]:
        lowered = self._signatures.without_ignored(block.data.lower().replace(b"\r", b"\n"))
        stripped = lowered.translate(None, _DIGITS).split(b"\n")
        suspicious = self._suspicious(stripped)
        if suspicious:
            yield from self._look_at(block, lowered, stripped, suspicious)
        self._before = (self._before + block.data)[-_CONTEXT:]

    def _suspicious(self, stripped: list[bytes]) -> set[bytes]:
        """Return the lines without digits that have a literal in them."""
        new = set(stripped) - self._harmless
        if not new:
            return new
        text = b"\n".join(new)
        literals_found = [literal for literal in self._signatures.prefilter if literal in text]
        suspicious = (
            {line for line in new if any(literal in line for literal in literals_found)}
            if literals_found
            else set()
        )
        if len(self._harmless) > _KNOWN_LINES:
            self._harmless.clear()
        self._harmless.update(line for line in new - suspicious if len(line) < _KNOWN_LENGTH)
        return suspicious

    def _look_at(
        self, block: Block, lowered: bytes, stripped: list[bytes], suspicious: set[bytes]
    ) -> Iterator[Finding]:
        start, number, counted = 0, block.number, 0
        for line, without_digits in zip(lowered.split(b"\n"), stripped, strict=True):
            if without_digits in suspicious:
                number += block.data.count(b"\n", counted, start)
                counted = start
                yield from self._findings(block, start, start + len(line), number)
            start += len(line) + 1

    def _findings(self, block: Block, start: int, end: int, number: int) -> Iterator[Finding]:
        """Yield the findings of a line.

        Of each kind the first, if the line is so long that it is read in pieces.
        """
        kinds: set[str] = set()
        for at in range(start, max(end - OVERLAP, start + 1), MAX_LINE - OVERLAP):
            text = clean(block.data[at : min(at + MAX_LINE, end)])
            match = self._signatures.match(text, kernel=self._kernel)
            if match is None or match.kind == BENIGN or match.kind in kinds:
                continue
            context = self._context(block.data, start)
            if context.is_source(text):
                continue
            kinds.add(match.kind)
            yield self._finding(text, number, match, context)

    def _context(self, data: bytes, start: int) -> _Context:
        before = data[max(0, start - _CONTEXT) : start]
        return _Context(before if len(before) == _CONTEXT else self._before + before)

    def _finding(self, text: str, number: int, match: Match, context: _Context) -> Finding:
        body = body_of(text)
        if match.role == "root" and _RETRIED.search(body):
            match = replace(match, role="advisory")
        elif match.role == "root" and _EXCEPTION.match(body) and context.is_chained(text):
            match = replace(match, role="cascade")
        if match.kind == PEER_LOST and is_unresolved(body, context.above(text)):
            meaning = rule_of(NET_CONFIG)
            match = replace(match, kind=NET_CONFIG, role="root", scope=meaning.scope, advice=meaning.advice)
        if (summary_location := location_in_summary(body, context.above(text))) is not None:
            match = replace(
                match,
                node=match.node or summary_location.node,
                rank=match.rank if match.rank is not None else summary_location.rank,
            )
        match = self._after_another_gpu(match, number)
        key = (match.kind, match.node, match.gpu, match.nic, match.rank)
        continues = number - self._seen.get(key, -_LINES_OF_ONE_FAULT - 1) <= _LINES_OF_ONE_FAULT
        self._seen[key] = number
        return Finding(number, body[:_MAX_WORDS], self._time_of(text, number, context), match, continues)

    def _time_of(self, text: str, number: int, context: _Context) -> float | None:
        """Return the stamp of the line, or else of the last one shortly before that has some."""
        last, when = self._last
        stamp = context.time_of(text, min(number - last, _LINES_BACK_FOR_TIME))
        if stamp is None and number - last <= _LINES_BACK_FOR_TIME:
            stamp = when
        self._last = number, stamp
        return stamp

    def _after_another_gpu(self, match: Match, number: int) -> Match:
        """Errors of several GPUs of a node within a few lines are one event: the first is its root."""
        if match.kind != GPU_RAS_UNCORRECTABLE or match.gpu is None:
            return match
        if self._first_gpu is not None:
            node, gpu, line = self._first_gpu
            if node == match.node and number - line <= _LINES_OF_ONE_EVENT:
                self._first_gpu = (node, gpu, number)
                return match if gpu == match.gpu else replace(match, role="cascade")
        self._first_gpu = (match.node, match.gpu, number)
        return match


class _Context:
    """The lines before one, read backwards and only when needed."""

    def __init__(self, data: bytes) -> None:
        self._lines = data.split(b"\n")[:-1]

    def above(self, text: str) -> Iterator[str]:
        """Yield the lines of the same writer before a line, the nearest first."""
        label = text[: len(text) - len(without_labels(text))]
        for line in reversed(self._lines[-_LINES_BACK:]):
            before = clean(line[:MAX_LINE])
            if before.startswith(label) and (label or before == without_labels(before)):
                yield before[len(label) :]

    def is_source(self, text: str) -> bool:
        """Return whether a line of a traceback quotes source, or names the place of it."""
        words = without_labels(text)
        if _FRAME.match(words):
            return True
        if not words.startswith("    "):
            return False
        for before in self.above(text):
            if _FRAME.match(before):
                return True
            if not before.startswith("    "):
                return False
        return False

    def is_chained(self, text: str) -> bool:
        """Return whether an exception was raised while another one was handled."""
        above = self.above(text)
        for before in above:
            if _TRACEBACK in before:
                return any(sign in line for line in islice(above, 2) for sign in _CHAINED)
            if before.strip() and not before.startswith("  "):
                return False
        return False

    def time_of(self, text: str, lines: int) -> float | None:
        """Return the stamp of the line, or else of the last of the lines before it."""
        before = reversed(self._lines[-lines:]) if lines else ()
        for line in chain([text.encode()], before):
            when = time_of(clean(line[:MAX_LINE]))
            if when is not None:
                return when
        return None


def findings_in(chunks: Iterable[bytes], *, kernel: bool = False) -> Iterator[Finding]:
    """Yield the findings of a whole log, in the order of its lines."""
    scanner = LogScanner(kernel=kernel)
    for chunk in chunks:
        yield from scanner.feed(chunk)
    yield from scanner.close()


def faults_in(
    lines: Iterable[bytes] | Path,
    source: str,
    *,
    node: str | None = None,
    rank: int | None = None,
    time: Callable[[], float] = clock.time,
    kernel: bool = False,
) -> Iterator[Fault]:
    """Yield the faults of a log, one for each and not for each line.

    Args:
        lines: lines with or without their line break, as they come; or a file.
        source: who noticed: `log`, `rank`, `kernel_log`, ...
        node: the one of the log; None if it is of several nodes.
        rank: whose log it is; None if it is of several.
        time: when a line without a stamp was written; default: now.
        kernel: the log is the kernel's.

    Raises:
        OSError: the file cannot be read.
    """
    chunks = chunks_of(lines) if isinstance(lines, Path) else as_chunks(lines)
    for finding in findings_in(chunks, kernel=kernel):
        if not finding.continues:
            yield as_fault(finding, source, node=node, rank=rank, time=time)


def as_fault(
    finding: Finding, source: str, *, node: str | None = None, rank: int | None = None, time: Callable[[], float]
) -> Fault:
    """Return a finding as Aegis reasons about it; arguments as for `faults_in`."""
    match = finding.match
    elsewhere = _OF_LAUNCHER.search(finding.text) is not None  # its writer runs elsewhere than what it reports
    return Fault(
        kind=match.clears or match.kind,
        role=match.role,
        scope=match.scope,
        time=finding.time if finding.time is not None else time(),
        source=source,
        line=finding.text,
        node=(match.node or node) if elsewhere else (node or match.node),
        gpu=match.gpu,
        nic=match.nic,
        rank=match.rank if match.rank is not None else rank,
        cleared=match.clears is not None,
    )
