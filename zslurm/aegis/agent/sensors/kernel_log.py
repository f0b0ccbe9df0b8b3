"""The kernel log: new lines, classified by the signatures.

New are those since the attempt began, for an agent that replaces another one, and since the last look for every
other: if the log could not be read for a while, reading continues at the last position.

A storm of lines shows no more than its beginning: of each kind and device a few are reported a minute, the rest is
counted.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from zslurm.aegis.agent.kernel_source.journal import Journal
from zslurm.aegis.agent.kernel_source.kmsg import Kmsg
from zslurm.aegis.agent.kernel_source.log_file import LogFile
from zslurm.aegis.agent.kernel_source.source import NoMoreLines, Position, Source, Unavailable
from zslurm.aegis.agent.sensor import NodeContext, Reading, Sensor
from zslurm.aegis.logs.signatures import Match, Signatures
from zslurm.aegis.types import Fault

_MOST_ALIKE = 5
"""Faults of one kind and device that are reported within _ALIKE_S seconds."""

_ALIKE_S = 60.0
_REOPEN_S = 60.0
_LONGEST_LINE = 400
_MOST_ROUNDS = 100
"""Calls of a source in one look: more than one only if there is much to read again."""

_MEMORY = TypeAdapter(dict[str, int | float | str])


Matcher = Callable[[str], Match | None]


class KernelLog(Sensor):
    """Follows the kernel log."""

    def __init__(
        self, context: NodeContext, match: Matcher, open_log: Callable[[Position | None], Source]
    ) -> None:
        """Open the log here, so that nothing is missed between the agent's start and the first look.

        Args:
            context: where.
            match: classifies a line.
            open_log: opens the log at a position, or at its present end; called again if reading failed.
        """
        super().__init__(context)
        self._match, self._open = match, open_log
        # Read often: faults bear the time at which they were read, and the earliest root is the one that counts.
        self.period_s = min(context.settings.period_s, context.settings.progress_s)
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
        """Count what was not read yet as the new attempt's."""
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
        except NoMoreLines as error:
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
            Unavailable, NoMoreLines: see Source.
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
        match = self._match(line)
        if match is None or (match.role == "benign" and match.clears is None):
            return None
        kind = match.clears or match.kind
        if self._is_one_too_many((kind, str(match.clears), match.gpu or "", match.nic or "")):
            self._left_out += 1
            return None
        return self.context.fault(
            kind, "kernel_log", line.strip()[:_LONGEST_LINE], role=match.role, scope=match.scope,
            gpu=match.gpu, nic=match.nic, cleared=match.clears is not None,
        )  # fmt: skip

    def _is_one_too_many(self, key: tuple[str, ...]) -> bool:
        now = time.monotonic()
        recent = [at for at in self._reported.get(key, []) if at > now - _ALIKE_S]
        self._reported[key] = [*recent, now] if len(recent) < _MOST_ALIKE else recent
        return len(recent) >= _MOST_ALIKE


def open_source(context: NodeContext, at: Position | None = None) -> Source:
    """Open the log that `aegis.sensors.kernel_log` names (`%n`: the node); `auto`: what this user may read.

    Args:
        context: the node.
        at: a position of before, of the same setting; None: the end.

    Raises:
        Unavailable: nothing can be read, with the reason for each way that was tried.
    """
    setting, environ = context.settings.kernel_log, context.environ
    if setting != "auto":
        return LogFile(Path(setting.replace("%n", context.node)), at)
    try:
        return Kmsg(context.root / "dev/kmsg", at)
    except Unavailable as error:
        why = str(error)
    path = environ.get("PATH", os.defpath)
    program = shutil.which("journalctl", path=path) if context.root == Path("/") else None
    if program is None:
        raise Unavailable(f"{why}; no journalctl")
    try:
        return Journal(program, environ, context.settings.amd_smi_timeout_s, at)
    except Unavailable as error:
        raise Unavailable(f"{why}; {error}") from error


def make(context: NodeContext) -> KernelLog | None:
    """Return a sensor that follows the log which the settings name; None if they are `off`."""
    if context.settings.kernel_log == "off":
        return None
    match = partial(Signatures.load().match, kernel=True)
    return KernelLog(context, match, partial(open_source, context))
