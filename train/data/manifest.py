"""What a build read and made: kept in build.json, for people and for recognising the same build."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from zslurm.checkpoint_tools.durable import sync
from zslurm.checkpoint_tools.plain import load_json
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
    trimmed_documents: int = 0  # that lost a part of their reasoning
    removed_tokens: int = 0  # of their reasoning
    too_long_documents: int = 0  # for the context that answers were trimmed for, and left whole
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
    skipped_files: tuple[str, ...]
    targets: int
    trimmed_documents: int = 0
    removed_tokens: int = 0
    too_long_documents: int = 0

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
            row = load_json((directory / BUILD_FILE).read_bytes())
            return cls(**row | {"skipped_files": tuple(row["skipped_files"])})
        except (OSError, ValueError, KeyError, TypeError):
            raise DataError(
                f"{directory}: exists and is not a finished corpus; name another directory or remove this one"
            ) from None

    def summary(self, path: Path, *, reused: bool, continued: int = 0) -> BuildSummary:
        """Return the part that a caller wants to know."""
        names = {field.name for field in fields(BuildSummary)}
        counts = {name: value for name, value in vars(self).items() if name in names}
        return BuildSummary(path=path, reused=reused, continued=continued, **counts)
