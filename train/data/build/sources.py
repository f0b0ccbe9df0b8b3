"""Source files: which ones, in which order, and of which kind.

Sources come in the order in which they are given, files of a directory in the order of their relative paths, so
that it is the same on every machine. A file that several sources lead to is read once. The name gives the kind:

    .jsonl .ndjson            JSON lines, one document each; also .json.gz and .json.zst, as C4 and Dolma name them
    .parquet                  one document per row
    anything else             text, one document

The first and the last kind may be compressed: .gz, .zst.
"""

from __future__ import annotations

import os
import shlex
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path, PurePath

from zslurm.train.errors import DataError

# Directories that hold copies, installed packages or caches rather than the text one means.
EXCLUDED_DIRECTORIES = frozenset({"__pycache__", "site-packages", "dist-packages", ".git", ".venv"})
DEMO_CORPUS_GLOB = "*.py"
COMPRESSED = (".gz", ".zst")


class SourceKind(StrEnum):
    """What a file holds."""

    TEXT = "text"
    JSON_LINES = "JSON lines"
    PARQUET = "Parquet"


class MissingSource(DataError):
    """A source that was named does not exist."""


@dataclass(frozen=True)
class SourceFile:
    """A file as it was found: its size in bytes and the time of its last change."""

    path: Path
    size: int
    mtime_ns: int = 0
    named: bool = False  # given by name, not found in a directory

    @property
    def compression(self) -> str:
        """`.gz`, `.zst`, or nothing."""
        suffix = self.path.suffix.lower()
        return suffix if suffix in COMPRESSED else ""

    @cached_property
    def kind(self) -> SourceKind:
        """Return what it holds, by its name."""
        name = self.path.name.lower()
        inner = Path(name.removesuffix(self.compression)).suffix
        if inner in (".jsonl", ".ndjson") or (inner == ".json" and self.compression):
            return SourceKind.JSON_LINES
        return SourceKind.PARQUET if name.endswith(".parquet") else SourceKind.TEXT


def find_files(
    sources: Sequence[Path],
    glob: str,
    excluded: frozenset[str] = EXCLUDED_DIRECTORIES,
    ours: Sequence[Path] = (),
    locks: Sequence[Path] = (),
) -> list[SourceFile]:
    """Return the files that the sources lead to, in document order.

    Args:
        sources: files, taken as they are, and directories, searched recursively.
        glob: what a file in a directory must match, as `PurePath.match` does: "*.py", "docs/*.md". Hidden files
            and directories (`.env`, `.cache`) and backups of editors (`notes.md~`) are left out unless a part of
            the pattern begins with a dot: they hold secrets and caches rather than text.
        excluded: names of directories below a source that are not entered.
        ours: directories that are not entered either: what is built is no source.
        locks: files that are left out, with those whose names continue theirs (drafts of locks).

    Raises:
        MissingSource: a source does not exist.
        DataError: a source is unreadable, or nothing is found.
    """
    files_by_path: dict[str, SourceFile] = {}
    if not glob or PurePath(glob).is_absolute():
        what = "is empty" if not glob else "begins with /, and is matched with paths inside the sources"
        raise DataError(f"the pattern of files (--glob {shlex.quote(glob)}) {what}; leave it out for all files")
    prefixes = tuple(os.path.realpath(lock) for lock in locks)
    try:
        for source in sources:
            named = not source.is_dir()
            for path in [source] if named else _walk(source, glob, excluded, set(map(os.path.realpath, ours))):
                if not named and os.path.realpath(path).startswith(prefixes):
                    continue
                status = path.stat()
                if not stat.S_ISREG(status.st_mode):
                    raise DataError(f"{path}: is no regular file; sources are read more than once: save it first")
                file = SourceFile(path, status.st_size, status.st_mtime_ns, named)
                files_by_path.setdefault(os.path.realpath(path), file)
    except FileNotFoundError as error:
        raise MissingSource(f"{error.filename}: no such file or directory") from error
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error
    if not files_by_path:
        searched = ", ".join(map(str, sources)) or "the (empty) list of sources"
        raise DataError(f"{searched}: no file matches {glob!r}; name other sources or another pattern")
    return list(files_by_path.values())


def _walk(top: Path, glob: str, excluded: frozenset[str], ours: set[str]) -> Iterator[Path]:
    """Return matching files below `top`, sorted by relative path; `ours` are real paths."""

    def fail(error: OSError) -> None:
        raise error

    matches = []
    hidden = any(part.startswith(".") for part in PurePath(glob).parts)
    for directory, directories, names in os.walk(top, onerror=fail):
        directories[:] = [
            name
            for name in directories
            if name not in excluded
            and (hidden or not name.startswith("."))
            and os.path.realpath(Path(directory, name)) not in ours
        ]
        for path in (Path(directory, name) for name in names):
            if not hidden and (path.name.startswith(".") or path.name.endswith("~")):
                continue
            if path.relative_to(top).match(glob) and path.is_file():
                matches.append(path)
    return iter(sorted(matches, key=lambda path: path.relative_to(top).parts))


def demo_corpus_sources() -> Path:
    """Return the directory of Python's standard library: real text on every machine, 11 to 31 MB.

    Search it for DEMO_CORPUS_GLOB; EXCLUDED_DIRECTORIES leaves installed packages out.

    Raises:
        DataError: this Python came without its sources.
    """
    directory = Path(sysconfig.get_path("stdlib"))
    if not (directory / "argparse.py").is_file():
        raise DataError(
            f"{directory}: this Python has no sources of its standard library; "
            "install them (on Debian: libpython3-stdlib) or use other text"
        )
    return directory
