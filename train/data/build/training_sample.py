"""The texts that a tokenizer is trained on: about 64 MiB, spread over the sources, the same every time.

Of text files every k-th is taken whole; of files of many documents the first k-th part, since reading all of them
to choose would take as long as building. Whoever has sorted documents shuffles them, or brings a tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from zslurm.train.data.build.documents import document_of
from zslurm.train.data.build.source_reader import Cursor, SourceReader
from zslurm.train.data.build.sources import Kind, SourceFile

SAMPLE_BYTES = 64 << 20


def training_shares(files: Sequence[SourceFile], limit: int) -> dict[int, int]:
    """How many bytes to take of which files, by their number; all of all where they fit into `limit` bytes."""
    every = max(1, -(-sum(file.size for file in files) // limit))
    texts = [number for number, file in enumerate(files) if file.kind is Kind.TEXT]
    chosen = set(texts[::every])
    return {
        number: file.size if number in chosen else -(-file.size // every)
        for number, file in enumerate(files)
        if number in chosen or file.kind is not Kind.TEXT
    }


def training_texts(reader: SourceReader, report: Callable[[int, int], None]) -> Iterator[str]:
    """Yield the texts; `report` gets the bytes done and in all.

    Raises:
        DataError: a file cannot be read, or a record is faulty.
    """
    shares = training_shares(reader.files, SAMPLE_BYTES)
    done, total = 0, sum(shares.values())
    report(done, total)
    for number, share in shares.items():
        taken = 0
        for raw, size, _ in reader.records_of(reader.files[number], Cursor(number)):
            if taken >= share:
                break
            yield from filter(None, document_of(raw, reader).texts)
            taken += size
        done += share
        report(done, total)
