"""How full best-fit packing makes sequences, and how fast it is, against Hugging Face `trl`.

Peer: `trl.pack_dataset(strategy="bfd")`, as its trainers call it: a `datasets.Dataset` of token lists goes in, one
of packed lists comes out, 1,000 documents at a time, which is what `Dataset.map` hands over. Ours packs the same
documents and reads all packs as its loader does ("zslurm, tokens"): rows of tokens, and where documents begin. A
run itself makes an index only, of whole windows of documents, and copies tokens when they are read ("zslurm,
index").
The function behind trl's is timed as well, on as many documents at once, with lists whose elements take no
memory. What windows do is shown as well: they are full, and cut documents.

Lengths are drawn, log-normal: web pages (median 600 tokens) at a context of 4,096, chains of thought (median
6,000) at 32,768, chats (median 900) at 32,768; one longer than the context is cut to it, on both sides. Both place
documents by best-fit decreasing; a window is what is packed at once.

`trl` is not a dependency: python -m pip install --no-deps --target FOLDER trl, and PYTHONPATH=FOLDER.
"""

from __future__ import annotations

from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from benchmarks.common import alternate, write_result
from zslurm.train.data.bundle import Corpus
from zslurm.train.data.packs.packs import WINDOW, pack
from zslurm.train.data.sequences import PackedSequences

KINDS = {"web pages": (4096, 600), "chains of thought": (32768, 6000), "chats": (32768, 900)}
SPREAD = 1.0
MICROBATCH = 16
"""Sequences that are read at a time: fresh memory for all of them at once takes longer than to fill it."""


def draw(documents: int, typical: int, most: int) -> NDArray[np.int64]:
    """Draw lengths of documents."""
    drawn = np.random.default_rng(7).lognormal(np.log(typical), SPREAD, documents)
    return np.clip(drawn, 2, most).astype(np.int64)


def corpus_of(lengths: NDArray[np.int64]) -> Corpus:
    """Return a corpus of such documents, as far as packing and reading packs ask for it."""
    offsets = np.append(0, np.cumsum(lengths)).astype(np.uint64)
    tokens = np.full(int(offsets[-1]), 5, np.uint16)
    bundle = SimpleNamespace(
        documents=offsets,
        document_count=len(lengths),
        token_count=len(tokens),
        scattered=tokens,
        masked=False,
        header=SimpleNamespace(vocab_size=1000),
    )
    return cast(Corpus, SimpleNamespace(bundles=(bundle,), document_count=len(lengths), path=Path("drawn")))


def packed(corpus: Corpus, context: int) -> int:
    """Pack a corpus and read all packs, MICROBATCH at a time: their tokens, and where documents begin.

    Returns:
        How many places there are in the packs.
    """
    packs = pack(corpus, context, "trim")
    places = 0
    for first in range(0, len(packs), MICROBATCH):
        starts, tokens, sizes = packs.pieces(np.arange(first, min(first + MICROBATCH, len(packs))))
        rows = PackedSequences(context, sizes, [corpus.bundles[0]] * len(starts), starts.tolist(), tokens)
        rows.bounds()
        places += rows.read(np.dtype(np.uint16), 0).size
    return places


def cut_share(lengths: NDArray[np.int64], context: int) -> float:
    """Return the share of the documents that windows cut: a border is inside of them."""
    ends = np.cumsum(lengths)
    first, last = (ends - lengths) // context, (ends - 1) // context
    return float((first != last).mean())


def run(documents: int = WINDOW, window: int = 4096, peer_documents: int = 2048, runs: int = 3) -> None:
    """Measure and write results/packing.json."""
    import trl
    from datasets import Dataset
    from trl.data_utils import _pack_bfd

    rows = []
    for name, (context, typical) in KINDS.items():
        lengths = draw(documents, typical, context + 1)
        few = lengths[:peer_documents]
        inputs = pa.table({"input_ids": [np.full(length, 5, np.int32) for length in few.tolist()]})
        dataset, whole = Dataset(inputs), _zero_width(lengths[:window])
        corpus, part, same = corpus_of(lengths), corpus_of(lengths[:window]), corpus_of(few)
        ours = pack(corpus, context, "trim")
        theirs = trl.pack_dataset(dataset, context + 1, strategy="bfd")
        timings = alternate(
            {
                "zslurm, tokens": partial(packed, same, context),
                "zslurm, index": partial(pack, corpus, context, "trim"),
                "zslurm, index of fewer": partial(pack, part, context, "trim"),
                "trl, as many": partial(_pack_bfd, whole, context + 1),
                "trl.pack_dataset": partial(
                    trl.pack_dataset,
                    dataset,
                    context + 1,
                    strategy="bfd",
                    map_kwargs={"load_from_cache_file": False},
                ),
            },
            runs=runs,
        )
        each = {
            "zslurm, tokens": len(few),
            "zslurm, index": documents,
            "zslurm, index of fewer": window,
            "trl, as many": window,
            "trl.pack_dataset": len(few),
        }
        rate = {contender: each[contender] / timing.median for contender, timing in timings.items()}
        rows.append(
            {
                "documents": name,
                "context": context,
                "median_tokens": int(np.median(lengths)),
                "filled": round(int(ours.tokens.sum()) / (len(ours) * (context + 1)), 5),
                "filled_trl": round(float(few.sum()) / (len(theirs) * (context + 1)), 5),
                "cut_by_windows": round(cut_share(lengths, context), 3),
                "timings": [
                    timing.row() | {"documents_per_s": round(rate[timing.name])} for timing in timings.values()
                ],
                "rate_against_trl": round(rate["zslurm, tokens"] / rate["trl.pack_dataset"], 2),
                "rate_against_its_function": round(rate["zslurm, index of fewer"] / rate["trl, as many"], 2),
            }
        )
    write_result(
        "packing",
        {
            "window_documents": WINDOW,
            "documents": documents,
            "documents_of_its_function": window,
            "peer_documents": peer_documents,
            "trl": metadata.version("trl"),
            "kinds": rows,
        },
    )


def _zero_width(lengths: NDArray[np.int64]) -> Any:
    """Return a table of lists of these lengths whose elements take no memory."""
    offsets = pa.array(np.append(0, np.cumsum(lengths)).astype(np.int64))
    return pa.table({"input_ids": pa.LargeListArray.from_arrays(offsets, pa.nulls(int(lengths.sum())))})
