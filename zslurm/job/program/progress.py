"""What a program shows of its progress, as the records and metrics that zslurm's own trainer would write.

Read are, in this order: the file of `zslurm.progress.step` (ZSLURM_PROGRESS_FILE), lines of a log that match
`trainer.progress.pattern`, and the growth of a file (`trainer.progress.grows`). Most programs print on one rank:
the last two are read only on that one (`trainer.progress.rank`). It also writes metrics.jsonl, so that `zslurm
status`, `watch` and `report` have steps, their time and the figures that the program gives; and a line for each
new checkpoint that `trainer.checkpoints` matches.
"""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path
from typing import Any

from zslurm.config.trainer import TrainerSection
from zslurm.core.files import read_json
from zslurm.run.program_checkpoints import in_run, newest_step
from zslurm.run.run_dir import AttemptDir, RunDir
from zslurm.train.jsonl import JsonLinesWriter
from zslurm.train.progress import Phase, ProgressWriter

_CHECKPOINTS_EVERY_S = 5.0
_LONGEST_LINE = 1 << 16
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class LogPattern:
    """Reads new whole lines of a log, and what a pattern finds in them."""

    def __init__(self, log: Path, pattern: str) -> None:
        """Begin at the start of the log."""
        self._log, self._pattern, self._read, self._rest = log, re.compile(pattern), 0, b""

    def newest(self) -> dict[str, Any] | None:
        """Return the figures of the last new line that matches; None if no new one does."""
        newest_figures = None
        for line in self._lines():
            if (match := self._pattern.search(line)) is not None:
                newest_figures = _figures(match.groupdict()) or newest_figures
        return newest_figures

    def _lines(self) -> list[str]:
        try:
            with self._log.open("rb") as file:
                file.seek(self._read)
                text = file.read()
        except OSError:
            return []
        self._read += len(text)
        *lines, self._rest = re.split(rb"[\r\n]", self._rest + text)  # progress bars rewrite their line
        self._rest = self._rest[-_LONGEST_LINE:]
        return [_COLOURS.sub("", line.decode("utf-8", "replace")) for line in lines]


def _figures(groups: dict[str, str | None]) -> dict[str, Any] | None:
    """Return the groups of a match as numbers; None without a whole number as step."""
    row: dict[str, Any] = {}
    for name, text in groups.items():
        with contextlib.suppress(ValueError, TypeError):
            row[name] = int(str(text).replace(",", "")) if name == "step" else float(str(text).replace(",", ""))
    return row if "step" in row else None


class ProgramProgress:
    """Follows one rank's program."""

    def __init__(
        self, trainer: TrainerSection, run: RunDir, attempt: AttemptDir, rank: int, world_size: int, file: Path
    ) -> None:
        """Prepare.

        Args:
            trainer: how the program is watched.
            run: its run.
            attempt: its attempt.
            rank: its rank.
            world_size: how many ranks there are.
            file: what ZSLURM_PROGRESS_FILE names.
        """
        self._trainer, self._run, self._attempt, self._rank, self._file = trainer, run, attempt, rank, file
        source, log = trainer.progress, attempt.rank_log(rank)
        self._shows = rank == source.rank % world_size
        """This rank is the one whose log is read, and that writes the metrics."""
        self._pattern = LogPattern(log, source.pattern) if source.pattern is not None and self._shows else None
        self._grows = None
        if source.grows is not None and self._shows:
            grows_path = Path(in_run(source.grows, run))
            self._grows = log if source.grows == "log" else Path(trainer.directory) / grows_path
        self._size, self._step, self._step_at = -1, -1, 0.0
        self._saved, self._look_at = newest_step(trainer, run), 0.0
        self._record: ProgressWriter | None = None

    @property
    def step(self) -> int:
        """The last step that the program has shown; -1 before the first."""
        return self._step

    def begin(self, directory: Path, pid: int) -> None:
        """Open the rank's record for the process of the program."""
        if self._record is not None:
            self._record.close()
        self._record = ProgressWriter(self._rank, self._attempt.number, str(directory), pid)
        watched = self._pattern is not None or self._grows is not None
        self._record.update(phase=Phase.SETUP if watched else Phase.UNOBSERVED)

    def set_up_again(self) -> None:
        """Show that the program meets the other ranks again, which may take as long as a start."""
        if self._record is not None:
            self._record.update(phase=Phase.SETUP)

    def look(self) -> None:
        """Take what is new."""
        row = read_json(self._file)
        if row is None or not isinstance(row.get("step"), int):
            row = self._pattern.newest() if self._pattern is not None else None
        if row is not None and row["step"] != self._step:
            self._take(row)
        elif self._grown() and self._record is not None:
            self._record.update(phase=Phase.STEP if self._step >= 0 else Phase.ALIVE)
        if self._shows and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _CHECKPOINTS_EVERY_S
            self._look_for_checkpoint()

    def _take(self, row: dict[str, Any]) -> None:
        """Note a step; one that is lower than the last comes from a program which started over."""
        shown, step = row.get("time"), int(row["step"])
        now = float(shown) if isinstance(shown, int | float) else time.time()
        steps, seconds = step - self._step, now - self._step_at
        if self._shows:
            figures = {name: value for name, value in row.items() if name not in ("step", "time")}
            took = {"step_time_s": seconds / steps} if self._step >= 0 and steps > 0 else {}
            self._append({"kind": "step", "step": step, **took, **figures})
        self._step, self._step_at = step, now
        # After its last step a program saves, evaluates and tidies up: that is no hang of a step.
        last = self._trainer.steps is not None and step >= self._trainer.steps
        if self._record is not None:
            self._record.update(phase=Phase.SAVE if last else Phase.STEP, step=step)

    def _grown(self) -> bool:
        if self._grows is None:
            return False
        try:
            size = self._grows.stat().st_size
        except OSError:
            return False
        grown, self._size = size != self._size, size
        return grown

    def _look_for_checkpoint(self) -> None:
        newest = newest_step(self._trainer, self._run)
        if newest > self._saved:
            self._saved = newest
            self._append({"kind": "checkpoint", "state": "COMMITTED", "step": newest})
            if self._record is not None:
                self._record.update(committed_step=newest)

    def _append(self, row: dict[str, Any]) -> None:
        with contextlib.suppress(OSError), contextlib.closing(JsonLinesWriter(self._run.metrics)) as metrics:
            metrics.append({"time": time.time(), "attempt": self._attempt.number} | row)

    def close(self) -> None:
        """Take what came last, and close the record."""
        self._look_at = 0.0
        self.look()
        if self._record is not None:
            self._record.close()
