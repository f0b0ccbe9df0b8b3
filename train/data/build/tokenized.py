"""Corpora whose tokens exist already: Megatron's `.bin` and `.idx`, and MosaicML's MDS shards.

Megatron (megatron/core/datasets/indexed_dataset.py): NAME.bin has the ids of all sequences, one after the other;
NAME.idx, little-endian,

    MMIDIDX and two zeros; u8 version, 1; u1 code of the ids' type; u8 sequences; u8 documents and 1
    i4[sequences]        their lengths
    i8[sequences]        their places in NAME.bin, in bytes
    i8[documents + 1]    the first sequence of each document

MDS (mosaicml-streaming, streaming/base/format/mds): a directory with index.json, which names shards and columns;
a shard is

    u4 samples; u4[samples + 1] places of the samples in the file; a header in JSON; the samples

and a sample the u4 sizes of its columns of variable size, then the columns. Tokens are in one column, as `bytes`
(`--mds-column NAME:uint16`), or as `ndarray:TYPE` of one dimension. Compressed shards must be unpacked first.

The ids are written as they are; a document that does not end with the end-of-document token gets one.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zslurm.checkpoint_tools.durable import sync
from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.data.build.bundle_writer import RollingWriter
from zslurm.train.data.build.tokenizer import end_token_id, file_sha256, load_tokenizer, vocabulary_size
from zslurm.train.data.build.unfinished import CORPUS, staging_directory
from zslurm.train.data.bundle import Corpus
from zslurm.train.data.manifest import BuildManifest, BuildSummary
from zslurm.train.data.schema import TOKENIZER_FILE, VERSION, BundleHeader
from zslurm.train.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""By their codes; 6 and 7 are numbers with a fraction."""

Ids = NDArray[np.integer]


def is_tokenized(source: Path) -> bool:
    """Return whether a source is a corpus of tokens: an .idx or .bin of Megatron, or a directory of MDS."""
    return source.suffix in (".idx", ".bin") or (source / "index.json").is_file()


def documents_of(source: Path, column: str) -> Iterator[Ids]:
    """Yield the ids of each document of a corpus, in its order.

    Raises:
        DataError: it is not what it should be.
    """
    try:
        yield from _of_mds(source, column) if source.is_dir() else _of_megatron(source)
    except (OSError, ValueError, KeyError, IndexError, struct.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise DataError(f"{source}: not a corpus of Megatron or MDS: {reason}") from error


def _of_megatron(source: Path) -> Iterator[Ids]:
    index = source.with_suffix(".idx").read_bytes()
    if not index.startswith(_MAGIC):
        raise ValueError(f"{source.with_suffix('.idx')} does not begin with MMIDIDX")
    version, code, sequences, ends = struct.unpack_from("<QBQQ", index, len(_MAGIC))
    if version != 1 or code not in _TYPES:
        raise ValueError(f"version {version}, ids of type {code}: expected version 1 and whole numbers")
    place = len(_MAGIC) + struct.calcsize("<QBQQ")
    lengths = np.frombuffer(index, "<i4", sequences, place)
    places = np.frombuffer(index, "<i8", sequences, place + lengths.nbytes)
    documents = np.frombuffer(index, "<i8", ends, place + lengths.nbytes + places.nbytes)
    dtype = np.dtype(_TYPES[code])
    ids = np.memmap(source.with_suffix(".bin"), dtype, "r")
    for first, after in pairwise(documents.tolist()):
        parts = [
            ids[start // dtype.itemsize : start // dtype.itemsize + length]
            for start, length in zip(places[first:after].tolist(), lengths[first:after].tolist(), strict=True)
        ]
        if sum(map(len, parts)) != lengths[first:after].sum():
            raise ValueError(f"{source.with_suffix('.bin')} is too short")
        yield np.concatenate(parts) if parts else ids[:0]


def _of_mds(source: Path, column: str) -> Iterator[Ids]:
    name, _, given = column.partition(":")
    for shard in json.loads((source / "index.json").read_text())["shards"]:
        if shard["format"] != "mds" or shard.get("compression"):
            raise ValueError(
                f"{shard['format']} with compression {shard.get('compression')}: unpack its shards first"
            )
        names, sizes = shard["column_names"], shard["column_sizes"]
        if name not in names:
            raise ValueError(f"no column {name}; columns: {', '.join(names)}")
        encoding = shard["column_encodings"][names.index(name)]
        data = (source / shard["raw_data"]["basename"]).read_bytes()
        (samples,) = struct.unpack_from("<I", data)
        ends = np.frombuffer(data, "<u4", samples + 1, 4)
        for begin, end in pairwise(ends.tolist()):
            sample = data[begin:end]
            variable = [index for index, size in enumerate(sizes) if size is None]
            given_sizes = np.frombuffer(sample, "<u4", len(variable)).tolist()
            lengths = [given_sizes.pop(0) if size is None else size for size in sizes]
            start = 4 * len(variable) + sum(lengths[: names.index(name)])
            yield _decoded(sample[start : start + lengths[names.index(name)]], encoding, given)


def _decoded(value: bytes, encoding: str, given: str) -> Ids:
    """Return the ids of a cell: raw bytes, or an array with its dimensions in front."""
    if encoding == "bytes":
        if not given:
            raise ValueError("the column has bytes: name the type of its ids, such as --mds-column tokens:uint16")
        return np.frombuffer(value, np.dtype(given).newbyteorder("<"))
    kind, _, rest = encoding.partition(":")
    dtype, _, shape = rest.partition(":")
    if kind != "ndarray" or not dtype:
        raise ValueError(f"the column has {encoding}: expected bytes, or ndarray:TYPE")
    # The first byte has how many dimensions there are, and below that the bytes of each as a power of two.
    header = 0 if shape else 1 + (value[0] >> 2) * (1 << (value[0] & 3))
    return np.frombuffer(value[header:], np.dtype(dtype).newbyteorder("<"))


def import_tokens(
    sources: Sequence[Path],
    out: Path,
    tokenizer: Path,
    *,
    column: str,
    end_token: str | None,
    bundle_bytes: int,
    note: Callable[[str], None] = lambda text: None,
) -> BuildSummary:
    """Write corpora of tokens as bundles into `out`, which appears complete or not at all.

    Args:
        sources: corpora, in this order.
        out: must not exist, or be empty.
        tokenizer: the tokenizer.json that the ids came from, or its directory.
        column: of MDS, and the type of its ids if it has bytes.
        end_token: the tokenizer's end-of-document token, if it is not one of the usual ones.
        bundle_bytes: a new bundle begins before it would exceed this.
        note: gets messages for people.

    Raises:
        DataError: a corpus is damaged, has ids that the tokenizer lacks, or `out` is taken.
    """
    began, out = time.monotonic(), out.absolute()
    if out.exists() and any(out.iterdir()):
        raise DataError(f"{out}: exists; name another directory, or remove this one")
    file = tokenizer / TOKENIZER_FILE if tokenizer.is_dir() else tokenizer
    loaded = load_tokenizer(file)
    end, shown = end_token_id(loaded, end_token), ", ".join(map(str, sources))
    header = BundleHeader(
        vocab_size=vocabulary_size(loaded), tokenizer_sha256=file_sha256(file), end_token=end, source=shown
    )
    digest, added, empty = hashlib.sha256(), 0, 0
    with staging_directory(out, note) as staging:
        directory = staging / CORPUS
        shutil.copyfile(file, directory / TOKENIZER_FILE)
        sync(directory / TOKENIZER_FILE)
        with RollingWriter(directory, header, bundle_bytes) as writer:
            for source in sources:
                for ids in documents_of(source, column):
                    digest.update(ids.tobytes())
                    empty += not ids.size
                    if not ids.size:
                        continue
                    if int(ids[-1]) != end:
                        ids, added = np.append(ids, end), added + 1
                    if not writer.has_room_for(ids.size):
                        writer.finish()
                    writer.append(ids)
            if not writer.commit():
                raise DataError(f"{shown}: no document has a token")
        corpus = Corpus.open(directory)
        settings: dict[str, Any] = {"bundle_version": VERSION, "tokenized": True, "mds_column": column}
        manifest = BuildManifest(
            source=shown, settings=settings, source_sha256=digest.hexdigest(), bundles=len(corpus.bundles),
            documents=corpus.document_count, tokens=corpus.token_count, vocab_size=header.vocab_size,
            tokenizer_sha256=header.tokenizer_sha256, fingerprint=corpus.fingerprint, text_bytes=0,
            empty_documents=empty, skipped_files=(), targets=corpus.token_count,
        )  # fmt: skip
        manifest.write(directory)
    if added:
        note(f"{counted(added, 'document')} did not end with the end-of-document token ({end}), and got one")
    summary = manifest.summary(out, reused=False)
    return replace(summary, seconds=time.monotonic() - began)
