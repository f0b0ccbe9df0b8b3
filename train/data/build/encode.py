"""Tokens of documents, in processes that work side by side.

Each process parses, decodes, hashes and tokenizes whole batches on one thread; results come back in the order of
the batches, and no more batches are under way than keep the processes busy. Processes and not the tokenizer's own
threads, because only tokenizing runs outside Python's lock: parsing lines and taking ids out of the library's
objects do not. On two cores both are equally fast.

Memory: the library holds some 500 bytes per token of a batch, about 100 for each byte of text.
"""

from __future__ import annotations

import hashlib
import math
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from zslurm.train.data.build.documents import Document, document_of
from zslurm.train.data.build.source_reader import Cursor, RecordBatch, SourceReader
from zslurm.train.data.build.tokenizer import encode, encode_with_offsets, load_tokenizer
from zslurm.train.data.build.trim import Trimming, removal
from zslurm.train.errors import BuildFailed, DataError
from zslurm.train.slurm_job import own_job_id

FEW = 4


@dataclass(frozen=True)
class Encoded:
    """A document as a build needs it."""

    cursor: Cursor
    tokens: NDArray[np.uint32]  # [tokens], the end-of-document token included; none where there is no text
    targets: NDArray[np.uint8] | None  # [tokens], 1 where the token counts as a target; None: all do
    text_bytes: int
    sha256: bytes
    skipped: str | None
    empty: bool
    removed: int = 0  # tokens of its reasoning that were taken away
    too_long: bool = False  # for the context that answers are trimmed for


@dataclass
class Tally:
    """What was read so far."""

    text_bytes: int = 0
    empty_documents: int = 0
    targets: int = 0
    trimmed_documents: int = 0
    removed_tokens: int = 0
    too_long_documents: int = 0
    skipped_files: list[str] = field(default_factory=list)
    sha256: str = ""  # of the hash before and the document's, in hex: it can be continued, unlike hashlib's

    def add(self, document: Encoded) -> None:
        """Count one document."""
        self.sha256 = hashlib.sha256(bytes.fromhex(self.sha256) + document.sha256).hexdigest()
        if document.skipped is not None:
            self.skipped_files.append(document.skipped)
        elif document.empty:
            self.empty_documents += 1
        else:
            self.text_bytes += document.text_bytes
            targets = document.targets
            self.targets += len(document.tokens) if targets is None else int(targets.sum(dtype=int))
            self.trimmed_documents += document.removed > 0
            self.removed_tokens += document.removed
            self.too_long_documents += document.too_long


@dataclass(frozen=True)
class Encoder:
    """What one process does with a batch."""

    reader: SourceReader
    tokenizer_path: Path | None  # None: only look at the texts
    end_token: int = 0
    trimming: Trimming | None = None

    def __call__(self, batch: RecordBatch) -> list[Encoded]:
        """Parse, check and tokenize.

        Raises:
            DataError: as document_of.
        """
        documents = [document_of(raw, self.reader) for raw in batch.records]
        return [
            Encoded(
                raw.cursor, of.tokens, of.targets, document.text_bytes, document.sha256, document.skipped,
                document.empty, of.removed, of.too_long,
            )
            for raw, document, of in zip(batch.records, documents, self._tokens_of(documents), strict=True)
        ]  # fmt: skip

    def _tokens_of(self, documents: Sequence[Document]) -> Iterator[_Tokens]:
        """Yield what becomes of each document."""
        if self._tokenizer is None:
            yield from (_Tokens(np.zeros(0, np.uint32)) for _ in documents)
            return
        plain = (d for d in documents if not d.empty and d.learned is None)
        encodings = iter(encode(self._tokenizer, [text for document in plain for text in document.texts]))
        for document in documents:
            if document.empty:
                yield _Tokens(np.zeros(0, np.uint32))
            elif document.learned is not None:
                yield self._conversation(document.texts[0], document.learned)
            else:
                yield self._text(document.texts, [next(encodings) for _ in document.texts])

    def _text(self, texts: tuple[str, ...], parts: list[NDArray[np.uint32]]) -> _Tokens:
        """Return a text, or a prompt and completion, that is encoded, with its end; trimmed if it must be."""
        removed, excess = 0, sum(map(len, parts)) + 1 - self._most
        if excess > 0 and self.trimming is not None and self._tokenizer is not None:
            text, answer = texts[-1], (0, len(texts[-1])) if len(texts) > 1 else None
            encoded = encode_with_offsets(self._tokenizer, text)
            taken = removal(text, encoded, self.trimming.reasoning(text, answer), int(excess))
            if taken is not None:
                removed = taken.stop - taken.start
                parts = [*parts[:-1], np.delete(parts[-1], taken)]
        tokens = np.concatenate([*parts, [np.uint32(self.end_token)]])
        prompt = sum(map(len, parts[:-1]))
        targets = (np.arange(tokens.size) >= prompt).astype(np.uint8) if len(parts) > 1 else None
        return _Tokens(tokens, targets, removed, excess > 0 and not removed)

    def _conversation(self, text: str, learned: tuple[tuple[int, int], ...]) -> _Tokens:
        """Return a conversation, of which what the assistant says is learned; trimmed if it must be."""
        assert self._chat_tokenizer is not None
        encoded = encode_with_offsets(self._chat_tokenizer, text)
        tokens, targets = encoded.ids, np.zeros(len(encoded.ids), np.uint8)
        starts, ends = encoded.offsets[:, 0], encoded.offsets[:, 1]
        for first, last in learned:
            targets[(starts < last) & (ends > first)] = 1
        ended = bool(tokens.size) and tokens[-1] == self.end_token
        removed, excess = 0, tokens.size + (not ended) - self._most
        if excess > 0 and self.trimming is not None:
            taken = removal(text, encoded, self.trimming.reasoning(text, learned[-1]), int(excess))
            if taken is not None:
                removed = taken.stop - taken.start
                tokens, targets = np.delete(tokens, taken), np.delete(targets, taken)
        if not ended:
            # The end is learned where the last token is, so that a model ends what it was to say itself.
            tokens, targets = np.append(tokens, np.uint32(self.end_token)), np.append(targets, targets[-1:])
        return _Tokens(tokens, targets, removed, excess > 0 and not removed)

    @property
    def _most(self) -> float:
        """Tokens that a document may have."""
        return math.inf if self.trimming is None else self.trimming.context + 1

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        return None if self.tokenizer_path is None else load_tokenizer(self.tokenizer_path)

    @cached_property
    def _chat_tokenizer(self) -> Tokenizer | None:
        """The tokenizer of conversations, whose template writes special tokens."""
        if self.tokenizer_path is None:
            return None
        tokenizer = load_tokenizer(self.tokenizer_path)
        tokenizer.encode_special_tokens = False
        return tokenizer


class _Tokens(NamedTuple):
    """What became of one document; see `Encoded`."""

    tokens: NDArray[np.uint32]
    targets: NDArray[np.uint8] | None = None
    removed: int = 0
    too_long: bool = False


def default_workers() -> int:
    """Few on a login node, which is others' too; in a Slurm job all the cores that it was given."""
    cores = len(os.sched_getaffinity(0))
    return cores if own_job_id() else min(FEW, cores)


def encode_all(
    encoder: Encoder, batches: Iterable[RecordBatch], workers: int
) -> Generator[tuple[RecordBatch, list[Encoded]], None, None]:
    """Yield every batch, which is taken when it is needed, and what became of it, in order.

    `workers` are processes of lower priority than this one; 1: this process, at its own priority.

    Raises:
        DataError: the first fault in the order of the batches, whatever the number of workers; or a process
            was killed.
    """
    faults: list[DataError] = []
    readable = _until_fault(batches, faults)
    head = list(islice(readable, 2))
    if workers == 1 or len(head) < 2:  # to start processes takes longer than one batch
        for batch in chain(head, readable):
            yield batch, encoder(batch)
    else:
        yield from _in_processes(encoder, chain(head, readable), workers)
    if faults:
        raise faults[0]


def _in_processes(
    encoder: Encoder, batches: Iterable[RecordBatch], workers: int
) -> Iterator[tuple[RecordBatch, list[Encoded]]]:
    """As encode_all."""
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_begin, initargs=(encoder,))
    waiting: deque[tuple[RecordBatch, Future[list[Encoded]]]] = deque()
    try:
        for batch in batches:
            waiting.append((batch, pool.submit(_work, batch)))
            if len(waiting) > 2 * workers:
                yield _next(waiting)
        while waiting:
            yield _next(waiting)
    except BrokenProcessPool as error:
        raise BuildFailed(
            "a tokenizing process was killed, perhaps for want of memory; "
            "run it again with fewer --workers or a smaller --max-document"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _until_fault(batches: Iterable[RecordBatch], faults: list[DataError]) -> Iterator[RecordBatch]:
    """Yield the batches before one that cannot be read; why goes to `faults`, for when these are done."""
    try:
        yield from batches
    except DataError as error:
        faults.append(error)


def _next(waiting: deque[tuple[RecordBatch, Future[list[Encoded]]]]) -> tuple[RecordBatch, list[Encoded]]:
    batch, future = waiting.popleft()
    return batch, future.result()


_encoder: Encoder | None = None  # of this process


def _begin(encoder: Encoder) -> None:
    """Set up a process: it leaves Ctrl-C to its parent, and does not outlive it."""
    global _encoder
    _encoder = encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(batch: RecordBatch) -> list[Encoded]:
    assert _encoder is not None
    return _encoder(batch)
