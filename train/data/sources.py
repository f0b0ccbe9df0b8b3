"""Text files as documents: which files, in which order, and what they say.

One file is one document. The order is that of the sources as given, and within a directory that of the sorted
relative paths, so that it is the same on every machine. A file that several sources lead to is read once.
A file that is not UTF-8 is left out and named, never half-decoded: replacement characters would be learned.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from train.errors import DataError

# Directories that hold copies, installed packages or caches rather than the text one means.
EXCLUDED_DIRECTORIES = frozenset({"__pycache__", "site-packages", "dist-packages", ".git", ".venv"})


@dataclass(frozen=True)
class SourceFile:
    """A file and its size in bytes when it was found."""

    path: Path
    size: int


@dataclass(frozen=True)
class Document:
    """A file's content; `text` is None where the bytes are not UTF-8."""

    path: Path
    content: bytes
    text: str | None


def find_files(
    sources: Sequence[Path], glob: str, excluded: frozenset[str] = EXCLUDED_DIRECTORIES
) -> list[SourceFile]:
    """The files that the sources lead to, in document order.

    Args:
        sources: files, taken as they are, and directories, searched recursively.
        glob: what a file in a directory must match, as `PurePath.match` does: "*.py", "docs/*.md".
        excluded: names of directories below a source that are not entered.

    Raises:
        DataError: a source is missing or unreadable, or nothing is found.
    """
    found: dict[str, SourceFile] = {}
    try:
        for source in sources:
            for path in _walk(source, glob, excluded) if source.is_dir() else [source]:
                found.setdefault(os.path.realpath(path), SourceFile(path, path.stat().st_size))
    except FileNotFoundError as error:
        raise DataError(f"{error.filename}: no such file or directory") from error
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error
    if not found:
        searched = ", ".join(map(str, sources)) or "the (empty) list of sources"
        raise DataError(f"{searched}: no file matches {glob!r}; name other sources or another pattern")
    return list(found.values())


def read_documents(files: Iterable[SourceFile]) -> Iterator[Document]:
    """Read files one at a time.

    Raises:
        DataError: a file cannot be read.
    """
    for file in files:
        try:
            content = file.path.read_bytes()
        except OSError as error:
            raise DataError(f"{file.path}: cannot be read: {error.strerror}") from error
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            text = None
        yield Document(file.path, content, text)


def sample_files(files: Sequence[SourceFile], limit: int) -> list[SourceFile]:
    """Every k-th file, so that they come to about `limit` bytes; all of them where they fit."""
    total = sum(file.size for file in files)
    return list(files[:: max(1, -(-total // limit))])


def _walk(top: Path, glob: str, excluded: frozenset[str]) -> Iterator[Path]:
    """Matching files below `top`, sorted by relative path."""

    def fail(error: OSError) -> None:
        raise error

    matches = []
    for directory, directories, names in os.walk(top, onerror=fail):
        directories[:] = [name for name in directories if name not in excluded]
        for path in (Path(directory, name) for name in names):
            if path.relative_to(top).match(glob) and path.is_file():
                matches.append(path)
    return iter(sorted(matches, key=lambda path: path.relative_to(top).parts))
