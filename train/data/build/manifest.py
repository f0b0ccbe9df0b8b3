"""What a build read and made: kept in build.json, for people and for recognising the same build."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zslurm.checkpoint_tools.durable import sync
from zslurm.checkpoint_tools.plain import load_json
from zslurm.train.data.build.encode import Encoded
from zslurm.train.data.schema import BUILD_FILE
from zslurm.train.errors import DataError


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
    empty_documents: int
    skipped_files: tuple[str, ...]  # not UTF-8: which, and where they are not
    targets: int  # tokens that count as targets
    seconds: float = 0.0
    reused: bool = False  # OUT already held this build
    continued: int = 0  # bundles that an earlier attempt had finished


@dataclass(frozen=True)
class BuildManifest:
    """The content of build.json."""

    source: str
    settings: dict[str, Any]
    source_sha256: str  # of every document's bytes, in order
    bundles: int
    documents: int
    tokens: int
    vocab_size: int
    tokenizer_sha256: str
    fingerprint: str
    text_bytes: int
    empty_documents: int
    skipped_files: list[str]
    targets: int

    def write(self, directory: Path) -> None:
        """Write build.json, durably."""
        path = directory / BUILD_FILE
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")
        sync(path)

    @classmethod
    def read(cls, directory: Path) -> BuildManifest:
        """Read build.json.

        Raises:
            DataError: there is none, so that the directory is not a finished corpus.
        """
        try:
            return cls(**load_json((directory / BUILD_FILE).read_bytes()))
        except (OSError, ValueError, TypeError):
            raise DataError(
                f"{directory}: exists and is not a finished corpus; name another directory or remove this one"
            ) from None

    def summary(self, path: Path, *, reused: bool, continued: int = 0) -> BuildSummary:
        """Return the part that a caller wants to know."""
        return BuildSummary(
            path=path,
            bundles=self.bundles,
            documents=self.documents,
            tokens=self.tokens,
            vocab_size=self.vocab_size,
            tokenizer_sha256=self.tokenizer_sha256,
            fingerprint=self.fingerprint,
            text_bytes=self.text_bytes,
            empty_documents=self.empty_documents,
            skipped_files=tuple(self.skipped_files),
            targets=self.targets,
            reused=reused,
            continued=continued,
        )


@dataclass
class Tally:
    """What was read so far; as JSON in the log of a build."""

    text_bytes: int = 0
    empty_documents: int = 0
    targets: int = 0
    skipped_files: list[str] = field(default_factory=list)
    sha256: str = ""  # of the hash before and the document's, in hex: it can be gone on with, unlike hashlib's

    def add(self, document: Encoded) -> None:
        """Count one document."""
        self.sha256 = hashlib.sha256(bytes.fromhex(self.sha256) + document.sha256).hexdigest()
        if document.skipped is not None:
            self.skipped_files.append(document.skipped)
        elif document.empty:
            self.empty_documents += 1
        else:
            self.text_bytes += document.text_bytes
            self.targets += len(document.tokens) - document.prompt_tokens
