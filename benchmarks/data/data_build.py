"""How fast `zslurm data build` tokenizes, against the tokenizer by itself.

Peer: `Tokenizer.encode_batch_fast` of the library `tokenizers` on the same texts, already in memory, with as many
threads as the build has processes, its tokens thrown away: the ceiling of whatever uses it. The build reads and
parses its sources, starts its processes, hashes, and writes bundles durably. Text: the Python standard library,
as files and as one .jsonl; vocabulary: 16,384, trained on it.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.common import alternate, write_result
from zslurm.train.data.build.build import build
from zslurm.train.data.build.documents import document_of
from zslurm.train.data.build.encode import default_workers
from zslurm.train.data.build.source_reader import Fields, SourceReader
from zslurm.train.data.build.sources import DEMO_CORPUS_GLOB, demo_corpus_sources, find_files
from zslurm.train.data.build.tokenizer import encoding_threads, load_tokenizer, train_tokenizer

VOCAB_SIZE = 16_384
BATCH = 256  # texts


def run(runs: int = 5, workers: int | None = None) -> None:
    """Measure and write results/data_build.json."""
    workers = workers or default_workers()
    reader = SourceReader(find_files([demo_corpus_sources()], DEMO_CORPUS_GLOB), Fields())
    texts = [text for raw, *_ in reader.records() if (text := document_of(raw, reader).texts[0])]
    with tempfile.TemporaryDirectory() as folder, encoding_threads(workers):
        tokenizer_path, lines = Path(folder) / "tokenizer.json", Path(folder) / "texts.jsonl"
        train_tokenizer(texts, VOCAB_SIZE).save(str(tokenizer_path))
        lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        tokenizer = load_tokenizer(tokenizer_path)
        out, tokens = Path(folder) / "out", {}

        def alone() -> None:
            for start in range(0, len(texts), BATCH):
                tokenizer.encode_batch_fast(texts[start : start + BATCH], add_special_tokens=False)

        def built(source: Path) -> None:
            shutil.rmtree(out, ignore_errors=True)
            summary = build([source], out, tokenizer=tokenizer_path, glob=DEMO_CORPUS_GLOB, workers=workers)
            tokens[source] = summary.tokens - summary.documents  # without end-of-document tokens

        names = {"build from text files": demo_corpus_sources(), "build from .jsonl": lines}
        builds = {name: partial(built, source) for name, source in names.items()}
        timings = alternate({"encode_batch_fast alone": alone, **builds}, runs=runs)
    count = next(iter(tokens.values()))
    assert set(tokens.values()) == {count}
    peer = timings["encode_batch_fast alone"].median
    write_result(
        "data_build",
        {
            "workers": workers,
            "text_mb": round(sum(len(text.encode()) for text in texts) / 1e6, 2),
            "tokens": count,
            "timings": [
                timing.row() | {"tokens_per_s": round(count / timing.median)} for timing in timings.values()
            ],
            "share_of_encode_batch": {name: round(peer / timings[name].median, 3) for name in builds},
        },
    )
