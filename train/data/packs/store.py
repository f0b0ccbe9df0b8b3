"""A packing on disk, next to its bundles, so that a run maps it instead of packing again.

    packs-CONTEXT-RULE.h5     RULE is data.long_documents; made by `zslurm data pack`

    /ends      <i8 [packs + 1]   where the pieces of each pack begin and, last, how many there are
    /starts    <i8 [pieces]      where each piece begins in the corpus's stream of tokens
    /tokens    <i4 [pieces]      how many tokens it has

Attributes of the root: format, version, fingerprint (of the corpus), context, long_documents, window, crc32 and
the counts. A file of other bundles, of another version or with another window is refused: it would silently be
another order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from zslurm.checkpoint_tools.durable import replace_durably
from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.data.bundle import Corpus
from zslurm.train.data.hdf5 import create_hdf5, locate, open_hdf5, read_text, write_text
from zslurm.train.data.packs.packs import (
    LARGEST_IN_MEMORY,
    WINDOW,
    Counts,
    LongDocuments,
    Packs,
    pack,
    pack_windows,
)
from zslurm.train.data.spool import Spool
from zslurm.train.errors import DataError

FORMAT = "zslurm-packs"
VERSION = 1
_DTYPES: dict[str, np.dtype[Any]] = {"ends": np.dtype("<i8"), "starts": np.dtype("<i8"), "tokens": np.dtype("<i4")}
_BLOCK = 1 << 20  # elements copied at a time


def path_of(corpus: Corpus, context: int, long_documents: LongDocuments) -> Path:
    """Return the path of the packing of a corpus, or of a single bundle."""
    name = f"packs-{context}-{long_documents}.h5"
    return corpus.path / name if corpus.path.is_dir() else corpus.path.with_name(f"{corpus.path.stem}.{name}")


def packs_of(corpus: Corpus, context: int, long_documents: LongDocuments) -> Packs:
    """Return the packs of a corpus: the stored ones, or packed now if the corpus is small enough.

    Raises:
        DataError: what is stored belongs to other bundles or is damaged; the corpus is too large to pack at every
            start; or see `pack`.
    """
    path = path_of(corpus, context, long_documents)
    if path.exists():
        return load(path, corpus, context, long_documents)
    if corpus.document_count > LARGEST_IN_MEMORY:
        raise DataError(
            f"{corpus.path}: packing its {counted(corpus.document_count, 'document')} at every start takes long, "
            f"and is refused above {LARGEST_IN_MEMORY:,}; store it once: "
            f"zslurm data pack {corpus.path} --context {context} --long-documents {long_documents}"
        )
    return pack(corpus, context, long_documents)


def store(
    corpus: Corpus,
    context: int,
    long_documents: LongDocuments,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Path, Counts]:
    """Pack a corpus a window at a time and write the packing next to it, durably, complete or not at all.

    Returns:
        The file, and what became of the documents.

    Raises:
        DataError: see `pack`; or the directory cannot be written.
    """
    path = path_of(corpus, context, long_documents)
    partial = path.with_name(path.name + ".partial")
    try:
        spools = {name: Spool(path.with_name(f"{path.name}.{name}.spool")) for name in _DTYPES}
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}") from error
    try:
        checksum, pieces, counts = 0, 0, Counts()
        spools["ends"].append(np.zeros(1, _DTYPES["ends"]))
        for window in pack_windows(corpus, context, long_documents, report):
            ends = pieces + np.cumsum(window.sizes)
            for name, array in (("ends", ends), ("starts", window.starts), ("tokens", window.tokens)):
                spools[name].append(array.astype(_DTYPES[name]))
            checksum, pieces, counts = (
                window.checksum(checksum),
                pieces + len(window.starts),
                counts + window.counts,
            )
        with create_hdf5(partial) as file:
            write_text(file, "format", FORMAT)
            write_text(file, "fingerprint", corpus.fingerprint)
            write_text(file, "long_documents", long_documents)
            numbers = {"version": VERSION, "context": context, "window": WINDOW, "crc32": checksum}
            for name, value in {**numbers, **asdict(counts)}.items():
                file.attrs[name] = value
            for name, length in (("ends", counts.packs + 1), ("starts", pieces), ("tokens", pieces)):
                _copy(spools[name], file.create_dataset(name, shape=(length,), dtype=_DTYPES[name]))
        replace_durably(partial, path)
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
        for spool in spools.values():
            spool.discard()
    return path, counts


def _copy(spool: Spool, dataset: Any) -> None:
    """Write what was spooled into a dataset, a block at a time."""
    for block, content in enumerate(spool.read(_BLOCK * dataset.dtype.itemsize)):
        dataset[block * _BLOCK : (block + 1) * _BLOCK] = np.frombuffer(content, dataset.dtype)


def load(path: Path, corpus: Corpus, context: int, long_documents: LongDocuments) -> Packs:
    """Map a stored packing.

    Raises:
        DataError: it is damaged, or was made for other bundles or by another version.
    """
    again = f"make it again: zslurm data pack {corpus.path} --context {context} --long-documents {long_documents}"
    with open_hdf5(path) as file:
        expected = {"format": FORMAT, "fingerprint": corpus.fingerprint, "long_documents": long_documents}
        texts = {name: read_text(file, name) for name in expected}
        numbers = {"version": VERSION, "context": context, "window": WINDOW}
        attributes = texts | {name: int(file.attrs[name]) for name in numbers}
        counts = Counts(**{field.name: int(file.attrs[field.name]) for field in fields(Counts)})
        located = {name: locate(path, file, name) for name in _DTYPES}
        checksum = int(file.attrs["crc32"])
    for name, value in (expected | numbers).items():
        if attributes[name] != value:
            reason = f"{name} {str(attributes[name])[:12]}, not {str(value)[:12]}"
            raise DataError(f"{path}: is not the packing of {corpus.path} ({reason}); {again}")
    lengths = {name: where.length for name, where in located.items()}
    dtypes = {name: where.dtype for name, where in located.items()}
    if dtypes != _DTYPES or lengths["ends"] != counts.packs + 1 or lengths["starts"] != lengths["tokens"]:
        raise DataError(f"{path}: is damaged: its datasets do not belong together; {again}")
    return Packs(context, **{name: located[name].map(path) for name in _DTYPES}, counts=counts, crc32=checksum)
