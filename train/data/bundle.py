"""Reading token bundles: a corpus of any size as one memory-mapped stream of tokens.

`train/data/schema.py` defines what is in a bundle. Opening reads the headers only; tokens are paged in as
windows ask for them, and no index of the corpus is held in memory. One mapping (and file descriptor) per
bundle is made at its first use and kept.

Not covered: a bundle that is truncated while it is mapped kills the reader (SIGBUS), as with any mapping.
Bundles are never changed in place; write a new directory instead.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.data.hdf5 import DatasetRange, locate, open_hdf5, read_text
from zslurm.train.data.schema import (
    AGAIN,
    BUILD_HINT,
    FORMAT,
    TOKENIZER_FILE,
    VERSION,
    BundleHeader,
    bundle_paths,
)
from zslurm.train.errors import DataError

__all__ = ["Bundle", "BundleHeader", "Corpus"]

MASK_DATASETS = ("targets", "target_checksums")
_T = TypeVar("_T", bound=np.generic)


@dataclass(frozen=True, eq=False)
class Bundle:
    """One open bundle."""

    path: Path
    header: BundleHeader
    token_count: int
    document_count: int
    block_tokens: int
    documents_crc32: int
    ranges: dict[str, DatasetRange]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Bundle:
        """Read a bundle's header.

        Raises:
            DataError: the file is missing, unreadable, not a bundle, truncated, damaged, or too new.
        """
        path = Path(path)
        with open_hdf5(path) as file:
            masked = _check_version(path, file) >= 2
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
                ranges={
                    name: locate(path, file, name)
                    for name in ("tokens", "documents", "checksums", *(MASK_DATASETS if masked else ()))
                },
            )
        bundle._check_ranges()
        return bundle

    @cached_property
    def tokens(self) -> np.memmap:
        """Token ids, uint16 or uint32 [token_count], mapped and not checked."""
        return self.ranges["tokens"].map(self.path)

    @cached_property
    def documents(self) -> np.memmap:
        """Offsets of the documents in `tokens`, uint64 [document_count + 1], mapped."""
        return self.ranges["documents"].map(self.path)

    @cached_property
    def checksums(self) -> NDArray[np.uint32]:
        """CRC32 of each block of `tokens`, uint32 [blocks]."""
        return np.array(self.ranges["checksums"].map(self.path))

    @property
    def masked(self) -> bool:
        """Return whether some tokens may not count as targets."""
        return "targets" in self.ranges

    @cached_property
    def targets(self) -> np.memmap | None:
        """1 if a token counts as a target, uint8 [token_count], mapped and not checked; None: all count."""
        return self.ranges["targets"].map(self.path) if self.masked else None

    @cached_property
    def target_checksums(self) -> NDArray[np.uint32]:
        """CRC32 of each block of `targets`, uint32 [blocks]; empty if there is no mask."""
        if not self.masked:
            return np.zeros(0, np.uint32)
        return np.array(self.ranges["target_checksums"].map(self.path))

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        """Return the tokens [start, start + count) of this bundle, int64 [count].

        Raises:
            DataError: an id is not below the vocabulary's size.
        """
        tokens = self.tokens[start : start + count].astype(np.int64)
        if tokens.size and tokens.max() >= self.header.vocab_size:
            where = start + int(tokens.argmax())
            raise DataError(
                f"{self.path}: token {where} has id {tokens.max()}, but the vocabulary has "
                f"{counted(self.header.vocab_size, 'entry')}: the file is damaged; {AGAIN}"
            )
        return tokens

    @property
    def scattered(self) -> NDArray[np.unsignedinteger]:
        """As `tokens`, through a separate mapping that the kernel is advised is read in no order.

        Otherwise each page that is not in memory brings its device's read-ahead with it: on a disk with 8 MiB of
        it, hundreds of times the bytes that were asked for at a context of 4,096 (benchmarks/data/data_loader.py).
        """
        return self._scattered[0]

    def will_need(self, start: int, count: int) -> None:
        """Have the kernel fetch tokens [start, start + count) of `scattered` while this process continues.

        It takes a microsecond. Reading many such pieces then waits for the disk once, not at every page.
        """
        stored = self.ranges["tokens"]
        size = stored.dtype.itemsize
        first = stored.offset % mmap.ALLOCATIONGRANULARITY + start * size  # the mapping begins on a page
        aligned = first - first % mmap.PAGESIZE
        self._scattered[1].madvise(mmap.MADV_WILLNEED, aligned, first + count * size - aligned)

    @cached_property
    def _scattered(self) -> tuple[NDArray[np.unsignedinteger], mmap.mmap]:
        mapped = self.ranges["tokens"].map(self.path)
        pages = mapped.base
        assert isinstance(pages, mmap.mmap)
        pages.madvise(mmap.MADV_RANDOM)
        return np.asarray(mapped), pages  # a memmap's own slices take a microsecond more

    def read_targets(self, start: int, count: int) -> NDArray[np.uint8]:
        """Return which of tokens [start, start + count) count as targets, uint8 [count] of 0 and 1.

        Raises:
            DataError: there is another value.
        """
        if self.targets is None:
            return np.ones(min(count, self.token_count - start), np.uint8)
        targets = np.array(self.targets[start : start + count])
        if targets.size and targets.max() > 1:
            where = start + int(targets.argmax())
            raise DataError(
                f"{self.path}: the mask of token {where} is {targets.max()}, not 0 or 1: "
                f"the file is damaged; {AGAIN}"
            )
        return targets

    def _check_ranges(self) -> None:
        """Check that the datasets have the formats and lengths that the header promises."""
        blocks = (np.dtype("<u4"), -(-self.token_count // max(1, self.block_tokens)))
        expected = {
            "tokens": (self.header.token_dtype, self.token_count),
            "documents": (np.dtype("<u8"), self.document_count + 1),
            "checksums": blocks,
            "targets": (np.dtype("u1"), self.token_count),
            "target_checksums": blocks,
        }
        for name, dataset in self.ranges.items():
            dtype, length = expected[name]
            if (dataset.dtype, dataset.length) != (dtype, length):
                raise DataError(
                    f"{self.path}: {name} is {dataset.dtype.str} [{dataset.length}] where the header "
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
            if difference := first.header.other_tokenizer(bundle.header):
                raise DataError(
                    f"{bundle.path}: made with another tokenizer than {first.path.name} ({difference}); "
                    "build the data again with one tokenizer"
                )
        return cls(path, bundles)

    @property
    def header(self) -> BundleHeader:
        """Return what all bundles have in common: vocabulary size, tokenizer, end-of-document token."""
        return self.bundles[0].header

    @property
    def token_count(self) -> int:
        """Return the tokens in the corpus."""
        return int(self._starts[-1])

    @property
    def document_count(self) -> int:
        """Documents in the corpus."""
        return sum(bundle.document_count for bundle in self.bundles)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the tokenizer's hash and of every bundle's counts and checksums (mask too), in hex.

        Goes into checkpoints: a resumed run finds out that its data changed, without reading them.
        """
        digest = hashlib.sha256(f"{FORMAT} {self.header.tokenizer_sha256}".encode())
        for bundle in self.bundles:
            counts = (bundle.token_count, bundle.document_count, bundle.block_tokens, bundle.documents_crc32)
            digest.update(np.array(counts, dtype="<u8").tobytes())
            digest.update(bundle.checksums.astype("<u4").tobytes())
            digest.update(bundle.target_checksums.astype("<u4").tobytes())
        return digest.hexdigest()

    def sequences(self, context: int) -> int:
        """Return how many sequences of `context` tokens there are.

        Raises:
            DataError: not a single one.
        """
        count = (self.token_count - 1) // context
        if count < 1:
            raise DataError(
                f"{self.path}: holds {counted(self.token_count, 'token')}, but one sequence of context "
                f"{context} needs {context + 1}; add text or set a shorter context"
            )
        return count

    def window(self, index: int, context: int) -> NDArray[np.int64]:
        """Sequence `index` with the target of its last token, int64 [context + 1].

        Raises:
            IndexError: there is no such sequence.
            DataError: a token id is beyond the vocabulary.
        """
        start = self._start_of(index, context)
        return _joined([bundle.read(*at) for bundle, at in self._parts(start, context + 1)])

    def windows(self, indices: ArrayLike, context: int) -> NDArray[np.int64]:
        """Several sequences, int64 [len(indices), context + 1]; inputs are [:, :-1], targets [:, 1:]."""
        return np.stack([self.window(int(index), context) for index in np.asarray(indices)])

    def locate(self, indices: NDArray[np.int64], context: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return which of `bundles` each sequence begins in, and at which of its tokens.

        Int64 [len(indices)] each.
        """
        starts = indices * context
        which = np.searchsorted(self._starts, starts, side="right") - 1
        return which, starts - self._starts[which]

    def target_mask(self, indices: ArrayLike, context: int) -> NDArray[np.uint8] | None:
        """Return which targets of sequences count: uint8 [len(indices), context] of 0 and 1, or None: all do.

        Position t is whether the target of input t, which is token t + 1 of the sequence, counts: it belongs
        to `windows(indices, context)[:, 1:]`. Tokens of bundles without a mask count.

        Raises:
            IndexError: there is no such sequence.
            DataError: a mask is neither 0 nor 1.
        """
        if not any(bundle.masked for bundle in self.bundles):
            return None
        rows = [self._start_of(int(index), context) + 1 for index in np.asarray(indices)]
        return np.stack([_joined([b.read_targets(*at) for b, at in self._parts(row, context)]) for row in rows])

    def check_fits(self, vocab_size: int) -> None:
        """Raise a DataError unless a model with `vocab_size` embedding rows can read every token id."""
        if self.header.vocab_size > vocab_size:
            raise DataError(
                f"{self.path}: has a vocabulary of {counted(self.header.vocab_size, 'token')}, more than the "
                "model's "
                f"{vocab_size}; set model.vocab_size to at least {self.header.vocab_size} or build the data "
                "with a smaller vocabulary"
            )

    def tokenizer_path(self) -> Path:
        """Return the corpus's tokenizer.json, checked by its hash.

        Raises:
            DataError: it is missing, or not the one that made the bundles.
        """
        path = self.bundles[0].path.with_name(TOKENIZER_FILE)
        try:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise DataError(
                f"{path}: cannot be read: {error.strerror}; it belongs next to its bundles: copy it again"
            ) from error
        if digest != self.header.tokenizer_sha256:
            raise DataError(
                f"{path}: is not the tokenizer that made the bundles (sha256 {digest[:12]}, "
                f"not {self.header.tokenizer_sha256[:12]}); put the right one there or build the data again"
            )
        return path

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """Return the start of each bundle in the stream, and the stream's end, int64 [bundles + 1]."""
        return np.cumsum([0, *(bundle.token_count for bundle in self.bundles)], dtype=np.int64)

    def _start_of(self, index: int, context: int) -> int:
        """Return the start of a sequence in the stream."""
        start = index * context
        if index < 0 or start + context + 1 > self.token_count:
            raise IndexError(f"{self.path}: no sequence {index} of context {context}")
        return start

    def _parts(self, start: int, count: int) -> Iterator[tuple[Bundle, tuple[int, int]]]:
        """Yield the bundles that hold tokens [start, start + count) of the stream, and (start, count) there."""
        which = int(np.searchsorted(self._starts, start, side="right")) - 1
        while count > 0:
            bundle, first = self.bundles[which], start - int(self._starts[which])
            taken = min(count, bundle.token_count - first)
            yield bundle, (first, taken)
            start, count, which = start + taken, count - taken, which + 1


def _joined(pieces: list[NDArray[_T]]) -> NDArray[_T]:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _check_version(path: Path, file: Any) -> int:
    """Return the version of a token bundle; raises a DataError unless this reader understands it."""
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
    return version
