"""What a build read and made: kept in build.json, for people and for recognising the same build."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from train.data.schema import BUILD_FILE
from train.data.sources import Document
from train.data.writer import fsync
from train.errors import DataError


@dataclass(frozen=True)
class BuildSummary:
    """What a build made, or found already made."""

    path: Path
    bundles: int
    documents: int
    tokens: int
    vocab_size: int
    tokenizer_sha256: str
    fingerprint: str
    text_bytes: int  # of the documents, in UTF-8
    empty_files: int
    skipped_files: tuple[str, ...]  # not UTF-8
    seconds: float = 0.0
    reused: bool = False  # OUT already held this build


@dataclass(frozen=True)
class BuildRecord:
    """The content of build.json."""

    source: str
    settings: dict[str, Any]
    source_sha256: str  # of every file's length and bytes, in order
    bundles: int
    documents: int
    tokens: int
    vocab_size: int
    tokenizer_sha256: str
    fingerprint: str
    text_bytes: int
    empty_files: int
    skipped_files: list[str]

    def write(self, directory: Path) -> None:
        """Write build.json, durably."""
        path = directory / BUILD_FILE
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")
        fsync(path)

    @classmethod
    def read(cls, directory: Path) -> BuildRecord:
        """Read build.json.

        Raises:
            DataError: there is none, so that the directory is not a finished corpus.
        """
        try:
            return cls(**json.loads((directory / BUILD_FILE).read_text()))
        except (OSError, ValueError, TypeError):
            raise DataError(
                f"{directory}: exists and is not a finished corpus; name another directory or remove this one"
            ) from None

    def summary(self, path: Path, *, reused: bool) -> BuildSummary:
        """The part that a caller wants to know."""
        return BuildSummary(
            path=path,
            bundles=self.bundles,
            documents=self.documents,
            tokens=self.tokens,
            vocab_size=self.vocab_size,
            tokenizer_sha256=self.tokenizer_sha256,
            fingerprint=self.fingerprint,
            text_bytes=self.text_bytes,
            empty_files=self.empty_files,
            skipped_files=tuple(self.skipped_files),
            reused=reused,
        )


@dataclass
class Tally:
    """What was read so far."""

    text_bytes: int = 0
    empty_files: int = 0
    skipped_files: list[str] = field(default_factory=list)
    _digest: Any = field(default_factory=hashlib.sha256)

    def add(self, document: Document) -> None:
        """Count one document."""
        self._digest.update(f"{len(document.content)}\n".encode())
        self._digest.update(document.content)
        if document.text is None:
            self.skipped_files.append(str(document.path))
        elif not document.text:
            self.empty_files += 1
        else:
            self.text_bytes += len(document.content)

    @property
    def sha256(self) -> str:
        """Of every document's length and bytes, in order, in hex."""
        return str(self._digest.hexdigest())
