"""What of a build is finished: journal.jsonl, so that a killed build can be gone on with.

The first line says what is being built: settings, libraries, and, where a tokenizer is trained, the files it is
trained on. Each further line is one finished bundle: where reading goes on, what was counted up to there, and a
hash of the names, sizes and times of the files that were read up to there. A line is written, durably, when its
bundle is; a last line that is torn is as good as none.

Going on keeps the longest run of bundles whose files are unchanged, so that a file can be mended (a line that was
no JSON) without losing the bundles before it. If not a single one can be kept, nothing is thrown away unasked.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zslurm.checkpoint_tools.durable import sync
from zslurm.checkpoint_tools.plain import load_json
from zslurm.train.data.build.manifest import Tally
from zslurm.train.data.build.source_reader import Cursor
from zslurm.train.data.build.sources import SourceFile
from zslurm.train.errors import DataError

BUILD_LOG = "journal.jsonl"


class OtherBuild(DataError):
    """The finished bundles of an unfinished build are not of this one."""


@dataclass(frozen=True)
class Finished:
    """One finished bundle, and where its successor begins."""

    cursor: Cursor
    tally: Tally
    tokens: int
    documents: int


class BuildLog:
    """The log of the build in one staging directory; messages call the directory `shown_as`."""

    def __init__(self, directory: Path, files: Sequence[SourceFile], shown_as: Path) -> None:
        self._path, self._shown_as = directory / BUILD_LOG, shown_as
        self._files = files
        self._hashes = _FileHashes(files)

    def begin(self, what: dict[str, Any]) -> None:
        """Start the log of a build of `what`, JSON values."""
        self._write([what])

    def add(self, finished: Finished) -> None:
        """Note a finished bundle."""
        self._append(asdict(finished) | {"files_sha256": self._hashes.up_to(finished.cursor)})

    def keep(self, bundles: int) -> None:
        """Strike out all but the first so many bundles."""
        self._write(self._rows()[: 1 + bundles])

    def read(self, what: dict[str, Any]) -> list[Finished] | None:
        """Return the bundles of an earlier attempt at `what` that can be kept; None: there was no attempt.

        Raises:
            OtherBuild: there are finished bundles, of something else or of files that have changed.
        """
        rows = self._rows()
        if not rows:
            return None
        begun, bundles = rows[0], rows[1:]
        if begun != what:
            if not bundles:
                return None
            changed = sorted(key for key in what.keys() | begun.keys() if begun.get(key) != what.get(key))
            raise OtherBuild(
                f"{self._shown_as}: holds finished bundles ({len(bundles)}) of an unfinished build with other "
                f"{', '.join(changed)}; give the command that began it to go on, or remove it to begin anew"
            )
        kept, hashes = [], _FileHashes(self._files)
        for row in bundles:
            finished = Finished(
                Cursor(*row["cursor"]), Tally(**row["tally"]), tokens=row["tokens"], documents=row["documents"]
            )
            if row["files_sha256"] != hashes.up_to(finished.cursor):
                break
            kept.append(finished)
        if bundles and not kept:
            raise OtherBuild(
                f"{self._shown_as}: holds finished bundles ({len(bundles)}) of an unfinished build, but their "
                "sources have changed since; remove it to begin anew"
            )
        return kept

    def _rows(self) -> list[dict[str, Any]]:
        try:
            lines = self._path.read_text().splitlines(keepends=True)
        except OSError:
            return []
        rows = []
        for line in lines:
            try:
                rows.append(load_json(line))
            except ValueError:
                break
            if not line.endswith("\n"):
                rows.pop()
        return rows

    def _write(self, rows: Sequence[dict[str, Any]]) -> None:
        """Make these rows the whole log, at one stroke."""
        path = self._path.with_suffix(".new")
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        sync(path)
        path.replace(self._path)
        sync(self._path.parent)

    def _append(self, row: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())


def finished_bundles(directory: Path) -> int:
    """Return how many bundles an unfinished build has finished."""
    try:
        return max(0, (directory / BUILD_LOG).read_text().count("\n") - 1)
    except OSError:
        return 0


def identity(files: Sequence[SourceFile]) -> str:
    """Return a hash of names, sizes and times, in hex."""
    return _FileHashes(files).up_to(Cursor(len(files)))


class _FileHashes:
    """Hashes of the files up to a cursor; cursors come in order."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files
        self._done = 0
        self._digest = hashlib.sha256()

    def up_to(self, cursor: Cursor) -> str:
        """Of the files before the cursor, and of that which it lies in unless it is at its start."""
        end = min(len(self._files), cursor.file + int(cursor.record > 0))
        while self._done < end:
            file = self._files[self._done]
            name = os.fsencode(file.path.absolute())
            self._digest.update(b"%s\0%d %d\n" % (name, file.size, file.mtime_ns))
            self._done += 1
        return self._digest.hexdigest()
