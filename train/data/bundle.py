"""Reading token bundles: a corpus of any size as one memory-mapped stream of tokens.

`train/data/schema.py` says what lies in a bundle. Opening reads the headers only; tokens are paged in as
windows ask for them, and no index of the corpus is held in memory. One mapping (and file descriptor) per
bundle is made at its first use and kept.

Not covered: a bundle that is truncated while it is mapped kills the reader (SIGBUS), as with any mapping.
Bundles are never changed in place; write a new directory instead.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from train.data.hdf5 import Extent, locate, open_hdf5, read_text
from train.data.schema import (
    AGAIN,
    BUILD_HINT,
    FORMAT,
    TOKENIZER_FILE,
    VERSION,
    BundleHeader,
    bundle_paths,
)
from train.data.writer import BundleWriter
from train.errors import DataError

__all__ = ["Bundle", "BundleHeader", "BundleWriter", "Corpus"]


@dataclass(frozen=True, eq=False)
class Bundle:
    """One open bundle."""

    path: Path
    header: BundleHeader
    token_count: int
    document_count: int
    block_tokens: int
    documents_crc32: int
    extents: dict[str, Extent]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Bundle:
        """Read a bundle's header.

        Raises:
            DataError: the file is missing, unreadable, not a bundle, truncated, damaged, or too new.
        """
        path = Path(path)
        with open_hdf5(path) as file:
            _check_version(path, file)
            attributes = file.attrs
            bundle = cls(
                path=path,
                header=BundleHeader(
                    vocab_size=int(attributes["vocab_size"]),
                    tokenizer_sha256=read_text(file, "tokenizer_sha256"),
                    end_token=int(attributes["end_token"]),
                    source=read_text(file, "source"),
                ),
                token_count=int(attributes["tokens"]),
                document_count=int(attributes["documents"]),
                block_tokens=int(file["checksums"].attrs["block_tokens"]),
                documents_crc32=int(file["documents"].attrs["crc32"]),
                extents={name: locate(path, file, name) for name in ("tokens", "documents", "checksums")},
            )
        bundle._check_extents()
        return bundle

    @cached_property
    def tokens(self) -> np.memmap:
        """Token ids, uint16 or uint32 [token_count], mapped and not checked."""
        return self.extents["tokens"].map(self.path)

    @cached_property
    def documents(self) -> np.memmap:
        """Offsets of the documents in `tokens`, uint64 [document_count + 1], mapped."""
        return self.extents["documents"].map(self.path)

    @cached_property
    def checksums(self) -> NDArray[np.uint32]:
        """CRC32 of each block of `tokens`, uint32 [blocks]."""
        return np.array(self.extents["checksums"].map(self.path))

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        """Tokens [start, start + count) of this bundle, int64 [count].

        Raises:
            DataError: an id is not below the vocabulary's size.
        """
        tokens = self.tokens[start : start + count].astype(np.int64)
        if tokens.size and tokens.max() >= self.header.vocab_size:
            where = start + int(tokens.argmax())
            raise DataError(
                f"{self.path}: token {where} has id {tokens.max()}, but the vocabulary has "
                f"{self.header.vocab_size} entries: the file is damaged; {AGAIN}"
            )
        return tokens

    def verify(self, report: Callable[[int], None] = lambda tokens: None) -> None:
        """Read everything and compare it with its checksums; `report` gets the tokens read so far.

        Raises:
            DataError: names the first damaged block.
        """
        if zlib.crc32(self.documents.tobytes()) != self.documents_crc32:
            raise DataError(f"{self.path}: the document index is damaged (its CRC32 differs); {AGAIN}")
        for block, expected in enumerate(self.checksums):
            start = block * self.block_tokens
            end = min(start + self.block_tokens, self.token_count)
            if zlib.crc32(self.tokens[start:end].tobytes()) != expected:
                raise DataError(
                    f"{self.path}: block {block} (tokens {start} to {end - 1}) is damaged: "
                    f"its CRC32 differs; {AGAIN}"
                )
            self.read(start, end - start)
            report(end)

    def _check_extents(self) -> None:
        """The datasets' formats and lengths are those that the header promises."""
        expected = {
            "tokens": (self.header.token_dtype, self.token_count),
            "documents": (np.dtype("<u8"), self.document_count + 1),
            "checksums": (np.dtype("<u4"), -(-self.token_count // max(1, self.block_tokens))),
        }
        for name, (dtype, length) in expected.items():
            extent = self.extents[name]
            if (extent.dtype, extent.length) != (dtype, length):
                raise DataError(
                    f"{self.path}: {name} is {extent.dtype.str} [{extent.length}] where the header "
                    f"promises {dtype.str} [{length}]: the file is damaged; {AGAIN}"
                )


@dataclass(frozen=True, eq=False)
class Corpus:
    """One or more bundles as one stream of tokens, cut into sequences.

    Sequence i of context c is tokens i c to i c + c, one more than c, so that each of its c inputs has the
    next token as its target. Neighbours share that one token; a target is trained on once per epoch.
    Documents and bundles may end inside a sequence; the last incomplete sequence is left out.
    """

    path: Path
    bundles: tuple[Bundle, ...]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Corpus:
        """Open a bundle, or a directory with all bundles of a corpus.

        Raises:
            DataError: as Bundle.open; or the directory has no bundles, lacks one, or mixes tokenizers.
        """
        path = Path(path)
        try:
            paths = bundle_paths(path) if path.is_dir() else [path]
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
        bundles = tuple(map(Bundle.open, paths))
        first = bundles[0]
        for bundle in bundles[1:]:
            for field in ("tokenizer_sha256", "vocab_size", "end_token"):
                ours, theirs = getattr(first.header, field), getattr(bundle.header, field)
                if ours != theirs:
                    raise DataError(
                        f"{bundle.path}: made with another tokenizer than {first.path.name} "
                        f"({field} {theirs}, not {ours}); build the data again with one tokenizer"
                    )
        return cls(path, bundles)

    @property
    def header(self) -> BundleHeader:
        """What all bundles say alike: vocabulary size, tokenizer, end-of-document token."""
        return self.bundles[0].header

    @property
    def token_count(self) -> int:
        """Tokens in the corpus."""
        return int(self._starts[-1])

    @property
    def document_count(self) -> int:
        """Documents in the corpus."""
        return sum(bundle.document_count for bundle in self.bundles)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the tokenizer's hash and of every bundle's counts and checksums, in hex.

        Goes into checkpoints: a resumed run finds out that its data changed, without reading them.
        """
        digest = hashlib.sha256(f"{FORMAT} {self.header.tokenizer_sha256}".encode())
        for bundle in self.bundles:
            counts = (bundle.token_count, bundle.document_count, bundle.block_tokens, bundle.documents_crc32)
            digest.update(np.array(counts, dtype="<u8").tobytes())
            digest.update(bundle.checksums.astype("<u4").tobytes())
        return digest.hexdigest()

    def sequences(self, context: int) -> int:
        """How many sequences of `context` tokens there are.

        Raises:
            DataError: not a single one.
        """
        count = (self.token_count - 1) // context
        if count < 1:
            raise DataError(
                f"{self.path}: holds {self.token_count} tokens, but one sequence of context {context} needs "
                f"{context + 1}; add text or set a shorter context"
            )
        return count

    def window(self, index: int, context: int) -> NDArray[np.int64]:
        """Sequence `index` with the target of its last token, int64 [context + 1].

        Raises:
            IndexError: there is no such sequence.
            DataError: a token id is beyond the vocabulary.
        """
        start = index * context
        if index < 0 or start + context + 1 > self.token_count:
            raise IndexError(f"{self.path}: no sequence {index} of context {context}")
        return self._read(start, context + 1)

    def windows(self, indices: ArrayLike, context: int) -> NDArray[np.int64]:
        """Several sequences, int64 [len(indices), context + 1]; inputs are [:, :-1], targets [:, 1:]."""
        return np.stack([self.window(int(index), context) for index in np.asarray(indices)])

    def check_fits(self, vocab_size: int) -> None:
        """Raise a DataError unless a model with `vocab_size` embedding rows can read every token id."""
        if self.header.vocab_size > vocab_size:
            raise DataError(
                f"{self.path}: has a vocabulary of {self.header.vocab_size} tokens, more than the model's "
                f"{vocab_size}; set model.vocab_size to at least {self.header.vocab_size} or build the data "
                "with a smaller vocabulary"
            )

    def tokenizer_path(self) -> Path:
        """The corpus's tokenizer.json, checked by its hash.

        Raises:
            DataError: it is missing, or not the one that made the bundles.
        """
        path = self.bundles[0].path.with_name(TOKENIZER_FILE)
        try:
            found = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise DataError(
                f"{path}: cannot be read: {error.strerror}; it belongs beside its bundles: copy it again"
            ) from error
        if found != self.header.tokenizer_sha256:
            raise DataError(
                f"{path}: is not the tokenizer that made the bundles (sha256 {found[:12]}, "
                f"not {self.header.tokenizer_sha256[:12]}); put the right one there or build the data again"
            )
        return path

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """Where each bundle begins in the stream, and its end, int64 [bundles + 1]."""
        return np.cumsum([0, *(bundle.token_count for bundle in self.bundles)], dtype=np.int64)

    def _read(self, start: int, count: int) -> NDArray[np.int64]:
        """Tokens [start, start + count) of the stream, across borders of bundles."""
        which = int(np.searchsorted(self._starts, start, side="right")) - 1
        pieces = [self.bundles[which].read(start - int(self._starts[which]), count)]
        while (missing := count - sum(map(len, pieces))) > 0:
            which += 1
            pieces.append(self.bundles[which].read(0, missing))
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _check_version(path: Path, file: Any) -> None:
    """Raise a DataError unless the file is a token bundle that this reader understands."""
    if "format" not in file.attrs or read_text(file, "format") != FORMAT:
        raise DataError(f"{path}: is an HDF5 file but not a token bundle; {BUILD_HINT}")
    version = int(file.attrs["version"])
    if version > VERSION:
        raise DataError(
            f"{path}: has bundle version {version}, newer than the {VERSION} that this zslurm reads; "
            "upgrade zslurm or build the data with this one"
        )
    if version < 1:
        raise DataError(f"{path}: has bundle version {version}, which never existed; {AGAIN}")
