"""The kernel log: new lines, classified by the signatures.

New are those since the attempt began, for an agent that replaces another one, and since the last look for every
other: where the log could not be read for a while, it is read on from where it was.

A storm of lines shows no more than its beginning: of each kind and device a few are reported a minute, the rest is
counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from pydantic import TypeAdapter

from zslurm.aegis.agent.kernel_source.choose import open_source
from zslurm.aegis.agent.kernel_source.source import Ended, Position, Source, Unavailable
from zslurm.aegis.agent.sensor import Place, Reading, Sensor
from zslurm.aegis.fault_kinds import FaultKind
from zslurm.aegis.types import Fault, Role, Scope

_MOST_ALIKE = 5
"""Faults of one kind and device that are reported within _ALIKE_S seconds."""

_ALIKE_S = 60.0
_REOPEN_S = 60.0
_LONGEST_LINE = 400
_MOST_ROUNDS = 100
"""Calls of a source in one look: more than one only where there is much to read again."""

_MEMORY = TypeAdapter(dict[str, int | float | str])


class Match(Protocol):
    """What the signatures make of a line; see zslurm.aegis.logs.signatures."""

    @property
    def kind(self) -> FaultKind:
        """What the line means."""
        ...

    @property
    def role(self) -> Role:
        """The part that it has in a failure."""
        ...

    @property
    def scope(self) -> Scope:
        """What is broken."""
        ...

    @property
    def gpu(self) -> str | None:
        """The GPU that it names."""
        ...

    @property
    def nic(self) -> str | None:
        """The NIC that it names."""
        ...

    @property
    def clears(self) -> FaultKind | None:
        """The kind that it ends."""
        ...


Matcher = Callable[[str], Match | None]


class KernelLog(Sensor):
    """Follows the kernel log."""

    def __init__(self, place: Place, match: Matcher, open_log: Callable[[Position | None], Source]) -> None:
        """Open the log here, so that nothing is missed between the agent's start and the first look.

        Args:
            place: where.
            match: classifies a line.
            open_log: opens the log at a position, or at its present end; called again where reading failed.
        """
        self._place, self._match, self._open = place, match, open_log
        # Read often: faults bear the time at which they were read, and the earliest root is the one that counts.
        self.period_s = min(place.settings.period_s, place.settings.progress_s)
        self._source: Source | None = None
        self._why = ""
        self._open_at = 0.0
        self._reported: dict[tuple[str, ...], list[float]] = {}
        self._lines = self._left_out = 0
        self._at: Position | None = None
        self._began: Position | None = None
        self._again = False
        self._reopen()
        self._began = self._at

    def begin_attempt(self) -> None:
        """What was not read yet is of the new attempt."""
        self._began = self._at

    def memory(self) -> Any:
        """Return the position at which the attempt began."""
        return None if self._began is None else dict(self._began)

    def recall(self, memory: Any) -> None:
        """See Sensor."""
        self._began = self._at = _MEMORY.validate_python(memory)
        self._again = True
        self.close()
        self._open_at = 0.0
        self._reopen()

    def read(self) -> Reading:
        """Return faults in the lines that came since the last look."""
        if self._source is None:
            self._reopen()
        if self._source is None:
            return Reading(ok=False, why=self._why)
        try:
            lines = self._new_lines(self._source)
        except Ended as error:
            self._fail(str(error))
            return Reading(ok=False, why=self._why)
        except Unavailable as error:
            return Reading(ok=False, why=str(error))
        self._lines += len(lines)
        faults = [fault for line in lines if (fault := self._fault(line)) is not None]
        return Reading(faults=tuple(faults), values={"lines": self._lines, "left_out": self._left_out})

    def _new_lines(self, source: Source) -> list[str]:
        """Return what came since the last look; all that is read again, in one look: it is reported together.

        Raises:
            Unavailable, Ended: see Source.
        """
        lines = source.lines()
        for _ in range(_MOST_ROUNDS if self._again else 0):
            if not (more := source.lines()):
                break
            lines += more
        self._again = False
        self._at = source.position()
        self._began = self._began or self._at
        return lines

    def close(self) -> None:
        """See Sensor."""
        if self._source is not None:
            self._source.close()
            self._source = None

    def _reopen(self) -> None:
        if time.monotonic() < self._open_at:
            return
        try:
            self._source = self._open(self._at)
        except Unavailable as error:
            self._fail(str(error))
            return
        if self._at is None:
            self._at = self._source.position()

    def _fail(self, why: str) -> None:
        self._why = why
        self._open_at = time.monotonic() + _REOPEN_S
        self.close()

    def _fault(self, line: str) -> Fault | None:
        found = self._match(line)
        if found is None or (found.role == "benign" and found.clears is None):
            return None
        kind = found.clears or found.kind
        if self._is_one_too_many((kind, str(found.clears), found.gpu or "", found.nic or "")):
            self._left_out += 1
            return None
        words = line.strip()[:_LONGEST_LINE]
        return self._place.fault(
            kind, found.role, found.scope, "kernel_log", words,
            gpu=found.gpu, nic=found.nic, cleared=found.clears is not None,
        )  # fmt: skip

    def _is_one_too_many(self, key: tuple[str, ...]) -> bool:
        now = time.monotonic()
        recent = [at for at in self._reported.get(key, []) if at > now - _ALIKE_S]
        self._reported[key] = [*recent, now] if len(recent) < _MOST_ALIKE else recent
        return len(recent) >= _MOST_ALIKE


def make(place: Place) -> KernelLog | None:
    """Follows the log that the settings name; None where they are `off`."""
    settings = place.settings
    if settings.kernel_log == "off":
        return None
    from zslurm.aegis.logs.signatures import Signatures

    signatures = Signatures.load()

    def open_log(at: Position | None) -> Source:
        return open_source(
            settings.kernel_log, place.node, place.root, place.environ, settings.amd_smi_timeout_s, at
        )

    return KernelLog(place, lambda line: signatures.match(line, kernel=True), open_log)
