"""Reading a whole corpus and comparing it with its checksums, block by block, on several threads.

What is compared: HDF5's own checksums of all metadata (on opening), CRC32 of each block of tokens and of the mask,
CRC32 of the document index and that it divides the tokens, that ids are in the vocabulary and masks 0 or 1, the
tokenizer's hash, and with build.json that these are the bundles that were built together.

Cost: every byte is read once; memory is one block per thread. Files are read and not mapped, so that one that is
truncated during the read is reported instead of killing the reader. Threads do, since checksums are computed
outside Python's lock. A flipped bit in the table of checksums is reported as damage of the block that it belongs
to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from zslurm.checkpoint_tools.checksum import crc32
from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.data.bundle import Bundle, Corpus
from zslurm.train.data.manifest import BuildManifest
from zslurm.train.data.schema import AGAIN, BUILD_FILE, BUNDLE_NAME, TOKENIZER_FILE, bundle_paths
from zslurm.train.errors import DataError

INDEX_CHUNK = 1 << 20  # offsets read at a time
GROUP = 256  # pieces handed to the threads at a time


@dataclass(frozen=True)
class BundleDamage:
    """What is wrong, in one line, and in which file; in which dataset and block of it, if that is known."""

    path: Path
    reason: str
    dataset: str | None = None
    block: int | None = None


@dataclass(frozen=True)
class BundleVerification:
    """What was read, and all that is wrong with it."""

    bundles: int
    tokens: int
    bytes: int  # of the datasets
    damages: tuple[BundleDamage, ...]


def verify(
    path: Path, workers: int, report: Callable[[int, int], None] = lambda done, total: None
) -> BundleVerification:
    """Read a bundle, or a directory of them, on `workers` threads, and compare everything with its checksums.

    `report` gets the bytes done and in all, in this thread.

    Raises:
        DataError: there is no corpus at all.
    """
    bundles, damages = _open_all(path)
    pieces = [piece for bundle in bundles for piece in _pieces(bundle)]
    done, total = 0, sum(piece.bytes for piece in pieces)
    report(done, total)
    with ThreadPoolExecutor(workers) as threads:
        for start in range(0, len(pieces), GROUP):
            group = pieces[start : start + GROUP]
            for piece, damage in zip(group, threads.map(_Piece.damage, group), strict=True):
                if damage is not None:
                    damages.append(damage)
                done += piece.bytes
                report(done, total)
    return BundleVerification(len(bundles), sum(bundle.token_count for bundle in bundles), total, tuple(damages))


@dataclass(frozen=True)
class _Piece:
    """A block of the tokens or the mask, or (block None) the whole document index, of a bundle."""

    bundle: Bundle
    dataset: str
    block: int | None
    start: int  # elements
    count: int

    @property
    def bytes(self) -> int:
        return self.count * self.bundle.ranges[self.dataset].dtype.itemsize

    def damage(self) -> BundleDamage | None:
        """Read it; what is wrong with it."""
        try:
            with self.bundle.path.open("rb") as file:
                fault = (
                    self._fault_of_index(file) if self.block is None else self._fault_of_block(file, self.block)
                )
        except OSError as error:
            fault = f"cannot be read: {error.strerror}"
        if fault is None:
            return None
        name = "the document index"
        if self.block is not None:
            of = "the mask of " if self.dataset == "targets" else ""
            name = f"block {self.block} ({of}tokens {self.start} to {self.start + self.count - 1})"
        return BundleDamage(
            self.bundle.path, f"{self.bundle.path}: {name} {fault}; {AGAIN}", self.dataset, self.block
        )

    def _fault_of_block(self, file: BinaryIO, block: int) -> str | None:
        extent = self.bundle.ranges[self.dataset]
        content = extent.read(file, self.start, self.count)
        if len(content) < self.bytes:
            return "is damaged: the file ends before its end"
        masks = self.dataset == "targets"
        checksums = self.bundle.target_checksums if masks else self.bundle.checksums
        if crc32(content) != checksums[block]:
            return "is damaged: its CRC32 differs"
        largest = int(np.frombuffer(content, extent.dtype).max())
        limit = 2 if masks else self.bundle.header.vocab_size
        return f"holds {largest}, where all are below {limit}" if largest >= limit else None

    def _fault_of_index(self, file: BinaryIO) -> str | None:
        extent = self.bundle.ranges["documents"]
        checksum, before, ordered = 0, -1, True
        for start in range(0, self.count, INDEX_CHUNK):
            content = extent.read(file, start, min(INDEX_CHUNK, self.count - start))
            checksum = crc32(content, checksum)
            offsets = [before, *np.frombuffer(content[: len(content) // 8 * 8], extent.dtype).astype(np.int64)]
            ordered = ordered and bool((np.diff(offsets) > 0).all()) and (start > 0 or offsets[1:2] == [0])
            before = int(offsets[-1])
        if checksum != self.bundle.documents_crc32:
            return "is damaged: its CRC32 differs"
        if not ordered or before != self.bundle.token_count:
            return f"does not divide the {counted(self.bundle.token_count, 'token')} into documents"
        return None


def _pieces(bundle: Bundle) -> Iterator[_Piece]:
    """Everything of a bundle that has a checksum."""
    yield _Piece(bundle, "documents", None, 0, bundle.document_count + 1)
    for dataset in ("tokens", *(["targets"] if bundle.masked else [])):
        for block, start in enumerate(range(0, bundle.token_count, bundle.block_tokens)):
            yield _Piece(bundle, dataset, block, start, min(bundle.block_tokens, bundle.token_count - start))


def _open_all(path: Path) -> tuple[list[Bundle], list[BundleDamage]]:
    """Return the bundles that can be opened, and what is wrong with the others and between them.

    Raises:
        DataError: there is no corpus at all.
    """
    paths = [path]
    if path.is_dir():
        named = sorted(file for file in path.iterdir() if BUNDLE_NAME.fullmatch(file.name))
        paths = named or bundle_paths(path)  # raises: there are none
    elif not path.exists():
        Bundle.open(path)  # raises: it is missing
    bundles, damages = [], []
    for file in paths:
        try:
            bundles.append(Bundle.open(file))
        except DataError as error:
            damages.append(BundleDamage(file, str(error)))
    if not damages:
        damages.extend(_faults_of_the_whole(path))
    return bundles, damages


def _faults_of_the_whole(path: Path) -> Iterator[BundleDamage]:
    """Yield what is wrong between files that are each well."""
    try:
        corpus = Corpus.open(path)
        if (corpus.bundles[0].path.with_name(TOKENIZER_FILE)).exists() or path.is_dir():
            corpus.tokenizer_path()
        if not (path / BUILD_FILE).exists():
            return
        record = BuildManifest.read(path)
    except DataError as error:
        yield BundleDamage(path, str(error))
        return
    built = (record.fingerprint, record.bundles, record.tokens, record.documents)
    if built != (corpus.fingerprint, len(corpus.bundles), corpus.token_count, corpus.document_count):
        reason = f"{path}: {BUILD_FILE} does not belong to these bundles, or is damaged; {AGAIN}"
        yield BundleDamage(path / BUILD_FILE, reason)
