"""The packs of a corpus: whole documents, side by side in sequences of one context, none of them cut.

A pack has room for context + 1 tokens, as a window has: its inputs are all but the last, its targets all but the
first. Each document takes as many places as it has tokens, its end-of-document token included, and is trained on
as if nothing else were in the pack: the first token of a document is no target, and what no document fills is
padding.

    windows     WINDOW consecutive documents at a time are packed by best-fit decreasing (`bins.py`), whatever the
                corpus's size; a pack holds documents of one window, in their order
    empty       a document of one token (its end) has nothing to learn and is left out
    long        one with more tokens than a pack is split as windows are (every target once: consecutive parts
                share a token), trimmed to its beginning, or refused, by data.long_documents

What is packed together follows only from the lengths and the context: the seed of a run only shuffles the packs
(train/data/sampler.py). Time: see benchmarks/data/packing.py; memory: 12 bytes a document and 8 a pack.

What it does not do: it does not move a document to another window, so the last pack of each may be half empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zslurm.checkpoint_tools.checksum import crc32
from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.data.bundle import Corpus
from zslurm.train.data.packs.bins import best_fit_decreasing, stable_order
from zslurm.train.errors import DataError

WINDOW = 1 << 16
"""Documents that are packed together."""

LongDocuments = Literal["split", "trim", "refuse"]


class PackWindow(NamedTuple):
    """The packs of one window.

    Attributes:
        starts: of each piece in the corpus's stream of tokens, int64 [pieces], pack after pack.
        tokens: how many it has, int32 [pieces].
        sizes: pieces of each pack, int64 [packs].
    """

    starts: NDArray[np.int64]
    tokens: NDArray[np.int32]
    sizes: NDArray[np.int64]

    def checksum(self, before: int) -> int:
        """Return the CRC32 of all windows up to this one."""
        for array, dtype in ((self.sizes, "<i8"), (self.starts, "<i8"), (self.tokens, "<i4")):
            before = crc32(np.ascontiguousarray(array, dtype).tobytes(), before)
        return before


@dataclass(frozen=True, eq=False)
class Packs:
    """All packs of a corpus at one context.

    Attributes:
        context: tokens of a sequence.
        ends: the start of the pieces of each pack and, last, the number of pieces; int64 [packs + 1].
        starts: of each piece in the stream, int64 [pieces].
        tokens: how many it has, int32 [pieces].
        crc32: of the packs of each window in turn: another one if anything is packed differently.
    """

    context: int
    ends: NDArray[np.int64]
    starts: NDArray[np.int64]
    tokens: NDArray[np.int32]
    crc32: int

    def __len__(self) -> int:
        return len(self.ends) - 1

    def pieces(self, packs: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the pieces of packs, int64 [k], one after another.

        Returns:
            The start of each in the stream, its tokens (int64 [pieces] each), and the pieces of each pack, int64
            [k].
        """
        first = np.asarray(self.ends[packs], np.int64)
        sizes = np.asarray(self.ends[packs + 1], np.int64) - first
        chosen = ranges(first, sizes)
        return np.asarray(self.starts[chosen], np.int64), np.asarray(self.tokens[chosen], np.int64), sizes


def ranges(starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return start, start + 1, ... of each of `sizes` numbers, one after another."""
    before = np.cumsum(sizes) - sizes
    return np.repeat(starts - before, sizes) + np.arange(int(sizes.sum()))


def pack(corpus: Corpus, context: int, long_documents: LongDocuments) -> Packs:
    """Pack a corpus, in memory.

    Raises:
        DataError: a document is longer than a pack and refused; or none has anything to learn.
    """
    parts, checksum = [], 0
    for window in _pack_windows(corpus, context, long_documents):
        parts.append(window)
        checksum = window.checksum(checksum)
    sizes = np.concatenate([window.sizes for window in parts])
    return Packs(
        context,
        np.append(0, np.cumsum(sizes)),
        np.concatenate([window.starts for window in parts]),
        np.concatenate([window.tokens for window in parts]),
        checksum,
    )


def _pack_windows(corpus: Corpus, context: int, long_documents: LongDocuments) -> Iterator[PackWindow]:
    """Yield the packs of each window of documents, as `pack`."""
    done, packs = 0, 0
    for starts, lengths in _windows(corpus):
        if long_documents == "refuse" and (lengths > context + 1).any():
            raise DataError(_refusal(corpus, context, done, lengths))
        window = _pack_window(starts, lengths, context, long_documents)
        done, packs = done + len(lengths), packs + len(window.sizes)
        yield window
    if not packs:
        raise DataError(f"{corpus.path}: none of its {counted(done, 'document')} has a token to learn; add text")


def _windows(corpus: Corpus) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield WINDOW documents at a time: the start of each in the stream, and its tokens; int64 [documents]."""
    starts: list[NDArray[np.int64]] = []
    lengths: list[NDArray[np.int64]] = []
    held, before = 0, 0
    for bundle in corpus.bundles:
        first = 0
        while first < bundle.document_count:
            last = min(bundle.document_count, first + WINDOW - held)
            offsets = bundle.documents[first : last + 1].astype(np.int64)
            starts.append(offsets[:-1] + before)
            lengths.append(np.diff(offsets))
            held, first = held + last - first, last
            if held == WINDOW:
                yield np.concatenate(starts), np.concatenate(lengths)
                starts, lengths, held = [], [], 0
        before += bundle.token_count
    if held:
        yield np.concatenate(starts), np.concatenate(lengths)


def _pack_window(
    starts: NDArray[np.int64], lengths: NDArray[np.int64], context: int, long_documents: LongDocuments
) -> PackWindow:
    room = context + 1
    if long_documents == "trim":
        lengths = np.minimum(lengths, room)
    pieces = np.maximum(0, -(-(lengths - 1) // context))  # of each document; parts share a token
    inside = ranges(np.zeros_like(pieces), pieces) * context
    piece_starts = np.repeat(starts, pieces) + inside
    tokens = np.minimum(room, np.repeat(lengths, pieces) - inside)
    bins, packs = best_fit_decreasing(tokens, room)
    order = stable_order(bins, packs)
    sizes = np.bincount(bins, minlength=packs)
    return PackWindow(piece_starts[order], tokens[order].astype(np.int32), sizes)


def _refusal(corpus: Corpus, context: int, before: int, lengths: NDArray[np.int64]) -> str:
    which = int(np.argmax(lengths > context + 1))
    length = counted(int(lengths[which]), "token")
    return (
        f"data.long_documents: document {before + which} of {corpus.path} has {length}, and a sequence of context "
        f"{context} takes {context + 1}; set data.long_documents to split or trim, lengthen the context, or trim "
        "answers when building (zslurm data build --trim-answers)"
    )
