"""The data of a run: one corpus, or several by name, opened and checked once.

All sources are made with one tokenizer: a run has one vocabulary. A run file gives a single source as a
path; here it is a mapping with one name, the empty one, so that nothing else needs to distinguish one from many.

Sequences are found first, many at once, then advised and read, some at once: a loop over few Python objects for
each of them. Tokens stay in the format of the bundles until they reach the device that computes with them.
"""

from __future__ import annotations

import hashlib
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.config import DataConfig
from zslurm.train.data.bundle import Bundle, BundleHeader, Corpus
from zslurm.train.data.packs.packs import LongDocuments, Packs, pack
from zslurm.train.data.sequences import PackedSequences, Sequences, Windows, joined
from zslurm.train.errors import ConfigError, DataError

ALONE = ""
"""Name of the source of a run with data.path."""
OTHER_FILES = 512
"""Files that a rank has open in addition to its bundles: sockets, libraries, devices, logs."""


@dataclass(frozen=True, eq=False)
class TrainingData:
    """The sources of a run, by name; names are sorted.

    Attributes:
        corpora: the sources.
        long_documents: what packing does with a document that is longer than a pack.
    """

    corpora: Mapping[str, Corpus]
    long_documents: LongDocuments = "split"

    @classmethod
    def open(cls, data: DataConfig) -> TrainingData:
        """Open what the run file names.

        Raises:
            ConfigError: it names nothing.
            DataError: a source is missing or damaged, or two were made with different tokenizers.
        """
        if data.path is None and not data.sources:
            raise ConfigError("data.path: required, but not given; make a token bundle with `zslurm data build`")
        paths = {ALONE: data.path} if data.path is not None else dict(sorted(data.sources.items()))
        corpora = {}
        for name, path in paths.items():
            with _named(name):
                corpora[name] = Corpus.open(path)
        opened = cls(corpora, data.long_documents)
        opened._check_tokenizers()
        return opened

    @property
    def names(self) -> tuple[str, ...]:
        """Return the sources, sorted."""
        return tuple(self.corpora)

    @property
    def header(self) -> BundleHeader:
        """Return what all sources have in common: vocabulary size, tokenizer, end-of-document token."""
        return next(iter(self.corpora.values())).header

    @property
    def token_count(self) -> int:
        """Return the tokens of all sources."""
        return sum(corpus.token_count for corpus in self.corpora.values())

    @property
    def paths(self) -> str:
        """Return where the data are, for people."""
        return ", ".join(str(corpus.path) for corpus in self.corpora.values())

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all sources' names and fingerprints; the corpus's own fingerprint if there is one path."""
        if self.names == (ALONE,):
            return self.corpora[ALONE].fingerprint
        lines = [f"{name} {corpus.fingerprint}\n" for name, corpus in self.corpora.items()]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def allow_open_files(self) -> None:
        """Let this process keep every bundle mapped: each mapping is an open file.

        A corpus of terabytes has thousands of bundles; common limits are 1,024 files, which a process may raise.

        Raises:
            DataError: the machine does not allow as many.
        """
        bundles = sum(len(corpus.bundles) for corpus in self.corpora.values())
        needed = 2 * bundles + OTHER_FILES
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if resource.RLIM_INFINITY != hard < needed:
            raise DataError(
                f"{self.paths}: {counted(bundles, 'bundle is', 'bundles are')} more than may be open at once "
                f"({counted(hard, 'file')}, ulimit -Hn); "
                "build them larger (zslurm data build --bundle-size), or have the limit raised"
            )
        if resource.RLIM_INFINITY != soft < needed:
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))

    def check_fits(self, vocab_size: int) -> None:
        """Raise a DataError unless a model with `vocab_size` embedding rows can read every token id."""
        name, corpus = next(iter(self.corpora.items()))
        with _named(name):
            corpus.check_fits(vocab_size)

    def sequences(self, name: str, context: int, *, packed: bool = False) -> int:
        """Return how many sequences of `context` tokens a source has: windows, or with `packed` packs.

        Raises:
            DataError: not a single one; with `packed` see also `packs`.
        """
        if packed:
            return len(self.packs(name, context))
        with _named(name):
            return self.corpora[name].sequences(context)

    def packs(self, name: str, context: int) -> Packs:
        """Return the packs of a source; found once.

        Raises:
            DataError: see `pack`.
        """
        if (name, context) not in self._packs:
            with _named(name):
                self._packs[name, context] = pack(self.corpora[name], context, self.long_documents)
        return self._packs[name, context]

    @cached_property
    def _packs(self) -> dict[tuple[str, int], Packs]:
        return {}

    def locate(
        self, source: NDArray[np.int64], index: NDArray[np.int64], context: int, *, packed: bool = False
    ) -> Sequences:
        """Find the sequences `index`, int64 [k], of the sources at places `source` in `names`, int64 [k]."""
        if packed:
            return self._locate_packs(source, index, context)
        bundle, start = np.empty_like(index), np.empty_like(index)
        bundles: list[Bundle] = []
        for source_index in np.unique(source).tolist():
            of_source, corpus = source == source_index, self.corpora[self.names[source_index]]
            which, start[of_source] = corpus.locate(index[of_source], context)
            bundle[of_source] = which + len(bundles)
            bundles += corpus.bundles
        return Windows(context, source, index, [bundles[number] for number in bundle.tolist()], start.tolist())

    def _locate_packs(self, source: NDArray[np.int64], index: NDArray[np.int64], context: int) -> PackedSequences:
        parts = []
        for source_index in np.unique(source).tolist():
            of_source, corpus = source == source_index, self.corpora[self.names[source_index]]
            starts, tokens, sizes = self.packs(self.names[source_index], context).pieces(index[of_source])
            which, inside = corpus.locate(starts, 1)
            bundles = [corpus.bundles[number] for number in which.tolist()]
            parts.append((of_source, sizes, tokens, bundles, inside.tolist()))
        return joined(context, parts)

    def read(self, sequences: Sequences) -> NDArray[np.unsignedinteger]:
        """Sequences as they are stored, uint16 or uint32 [k, context + 1].

        Each token is copied once, out of the mapping, and without the GIL. Padding is the end-of-document token.

        Raises:
            DataError: a token id is beyond the vocabulary.
        """
        if isinstance(sequences, PackedSequences):
            return sequences.read(self.header.token_dtype, self.header.end_token)
        count = sequences.context + 1
        rows = np.empty((len(sequences), count), self.header.token_dtype)
        for row, bundle, start in zip(range(len(rows)), sequences.bundles, sequences.starts, strict=True):
            tokens = bundle.scattered[start : start + count]
            rows[row] = tokens if len(tokens) == count else self._window(sequences, row)
        if rows.max() >= self.header.vocab_size:
            for row in range(len(rows)):
                self._window(sequences, row)  # raises, and names the token
        return rows

    @cached_property
    def masked(self) -> bool:
        """Return whether some of the targets may not count, even in windows."""
        return any(bundle.masked for corpus in self.corpora.values() for bundle in corpus.bundles)

    def target_mask(self, sequences: Sequences) -> NDArray[np.uint8] | None:
        """Return which targets of sequences count, uint8 [k, context] of 0 and 1; None if all do."""
        if isinstance(sequences, PackedSequences):
            return sequences.target_mask()
        mask: NDArray[np.uint8] | None = None
        for source_index in np.unique(sequences.source).tolist():
            of_source = sequences.source == source_index
            targets = self.corpora[self.names[source_index]].target_mask(
                sequences.index[of_source], sequences.context
            )
            if targets is not None:
                mask = np.ones((len(sequences), sequences.context), np.uint8) if mask is None else mask
                mask[of_source] = targets
        return mask

    def _window(self, sequences: Windows, row: int) -> NDArray[np.int64]:
        """Return one sequence, which may be in two bundles."""
        corpus = self.corpora[self.names[sequences.source[row]]]
        return corpus.window(int(sequences.index[row]), sequences.context)

    def _check_tokenizers(self) -> None:
        first, *others = self.corpora.items()
        for name, corpus in others:
            if difference := first[1].header.other_tokenizer(corpus.header):
                raise DataError(
                    f"{key_of(name)}: made with another tokenizer than {key_of(first[0])} ({difference}); build "
                    "one again with the tokenizer of the other (zslurm data build --tokenizer)"
                )


def key_of(name: str) -> str:
    """Return the key of a source in a run file."""
    return "data.path" if name == ALONE else f"data.sources.{name}"


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Name the source in errors."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{key_of(name)}: {error}") from error
