"""How fast microbatches come out of a bundle, against a raw numpy memmap and Hugging Face `datasets`.

All read the same sequences of the same corpus in the same random order, turn by turn, and hold each microbatch
until the next. The peers get their offsets worked out beforehand; ours finds them, checks every token id, and
advises the kernel. `numpy` stacks slices of a memmap; `datasets` indexes an Arrow table of sequences of a fixed
length, memory-mapped, in its numpy format. Tokens stay as stored, which is what leaves the host for a GPU.

In memory: after a run that touched everything. Cold: the corpus is dropped from the page cache before each run,
and few sequences are read, so that what the kernel reads ahead for one seldom serves another; what the disk had to
read is measured too.
"""

from __future__ import annotations

import gc
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.common import Timing, alternate, ratio, write_result
from zslurm.train.config import DataConfig
from zslurm.train.data.build.bundle_writer import BundleWriter
from zslurm.train.data.bundle import BundleHeader
from zslurm.train.data.order import DataOrder
from zslurm.train.data.reader import read_from
from zslurm.train.data.training_data import ALONE, TrainingData
from zslurm.train.schedule import Plan
from zslurm.train.sections.phases import PhaseConfig

VOCAB_SIZE = 50_000
CORPUS_TOKENS = 1 << 29
TOKENS = 1 << 24  # that a run reads from memory
COLD_SEQUENCES = 64
SHAPES = ((256, 4), (4096, 4), (32768, 1))  # context, sequences in a microbatch


class Reading:
    """One context's sequences, and ways to read them."""

    def __init__(self, path: Path, context: int, micro_batch: int, tokens: int) -> None:
        batch = max(micro_batch, tokens // context)
        phase = PhaseConfig(
            tokens=batch * context, context=context, global_batch=batch, micro_batch=micro_batch, lr=1
        )
        self.context, self.micro_batch, self.tokens = context, micro_batch, batch * context
        self.order = DataOrder(TrainingData.open(DataConfig(path=str(path))), Plan((phase,)), seed=0)
        _, index = self.order.at(0, np.arange(batch))
        self.indices = index.reshape(-1, micro_batch)
        self.offsets = (self.indices * context).tolist()
        (self.bundle,) = self.order.data.corpora[ALONE].bundles

    def ours_as_stored(self) -> Iterator[NDArray[Any]]:
        for read in read_from(self.order, 0, 0, 1):
            yield from np.split(read.windows_NS, np.cumsum(read.sizes)[:-1])

    def numpy_as_stored(self) -> Iterator[NDArray[Any]]:
        extent = self.bundle.ranges["tokens"]
        tokens = np.memmap(self.bundle.path, extent.dtype, "r", offset=extent.offset, shape=(extent.length,))
        count = self.context + 1
        for starts in self.offsets:
            yield np.stack([tokens[start : start + count] for start in starts])

    def datasets_as_stored(self, table: Any) -> Iterator[NDArray[Any]]:
        for indices in self.indices:
            yield table[indices]["input_ids"]


def _drain(items: Callable[[], Iterator[Any]]) -> Callable[[], None]:
    def run() -> None:
        for _ in items():
            pass

    return run


def _table(reading: Reading, folder: Path) -> Any:
    """The corpus's sequences as a memory-mapped dataset; built in blocks, as it would be for any corpus."""
    import datasets
    import pyarrow

    corpus, count = reading.order.data.corpora[ALONE], reading.context + 1
    schema = pyarrow.schema([("input_ids", pyarrow.list_(pyarrow.uint16(), count))])
    path = folder / f"context-{reading.context}.arrow"
    block = max(1, (1 << 24) // count)
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, schema) as writer:
        for first in range(0, corpus.sequences(reading.context), block):
            here = np.arange(first, min(first + block, corpus.sequences(reading.context)))
            located = reading.order.data.locate(np.zeros_like(here), here, reading.context)
            flat = pyarrow.array(reading.order.data.read(located).ravel())
            rows = pyarrow.FixedSizeListArray.from_arrays(flat, count)
            writer.write_batch(pyarrow.record_batch([rows], schema=schema))
    return datasets.Dataset.from_file(str(path)).with_format("numpy")


def _in_memory(path: Path, folder: Path, context: int, micro_batch: int, runs: int) -> dict[str, Any]:
    reading = Reading(path, context, micro_batch, TOKENS)
    table = _table(reading, folder)
    for ours, theirs, others in zip(
        reading.ours_as_stored(), reading.numpy_as_stored(), reading.datasets_as_stored(table), strict=True
    ):
        assert np.array_equal(ours, theirs)
        assert np.array_equal(ours, others)
    timings = alternate(
        {
            "ours, as stored": _drain(reading.ours_as_stored),
            "numpy, as stored": _drain(reading.numpy_as_stored),
            "datasets, as stored": _drain(lambda: reading.datasets_as_stored(table)),
        },
        runs=runs,
    )
    rates = {name: reading.tokens / timing.median for name, timing in timings.items()}
    return {
        "context": context,
        "micro_batch": micro_batch,
        "tokens_per_s": {name: round(rate) for name, rate in rates.items()},
        "as_stored_over_numpy": _ratio(timings, "numpy, as stored", "ours, as stored"),
        "as_stored_over_datasets": _ratio(timings, "datasets, as stored", "ours, as stored"),
        "timings": [timing.row() for timing in timings.values()],
    }


def _ratio(timings: dict[str, Timing], slower: str, faster: str) -> float:
    return ratio(timings[slower], timings[faster])


def _cold(path: Path, context: int, runs: int) -> dict[str, Any]:
    """A few sequences with nothing of the corpus in memory; opening the corpus is not counted."""
    ways: dict[str, Callable[[Reading], Iterator[Any]]] = {
        "ours, as stored": Reading.ours_as_stored,
        "numpy, as stored": Reading.numpy_as_stored,
    }
    tokens, read = COLD_SEQUENCES * context, dict.fromkeys(ways, 0)
    timings = {name: Timing(name, []) for name in ways}
    for _ in range(runs):
        for name, way in ways.items():
            reading = Reading(path, context, 1, tokens)
            _forget(path)
            before, started = _bytes_read(), time.perf_counter()
            for _ in way(reading):
                pass
            timings[name].seconds.append(time.perf_counter() - started)
            read[name] = _bytes_read() - before
    asked = COLD_SEQUENCES * (context + 1) * 2
    return {
        "context": context,
        "tokens_per_s": {name: round(tokens / timing.median) for name, timing in timings.items()},
        "bytes_read_over_bytes_asked_for": {name: round(count / asked, 2) for name, count in read.items()},
        "ratio": _ratio(timings, "numpy, as stored", "ours, as stored"),
        "timings": [timing.row() for timing in timings.values()],
    }


def _forget(path: Path) -> None:
    """Drop a file from the page cache; pages that are still mapped would stay."""
    gc.collect()
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _bytes_read() -> int:
    """Bytes that this process had its disks read."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def _read_ahead_kib(path: Path) -> int | None:
    """The read-ahead of the disk that a file is on; None if it is on none."""
    device = path.stat().st_dev
    places = [f"{os.major(device)}:{os.minor(device)}/queue", f"{os.major(device)}:{os.minor(device)}/../queue"]
    for place in places:
        setting = Path("/sys/dev/block", place, "read_ahead_kb")
        if setting.exists():
            return int(setting.read_text())
    return None


def run(runs: int = 7) -> None:
    """Measure and write results/data_loader.json."""
    import datasets

    logging.getLogger("datasets").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.h5"
        generator = np.random.default_rng(0)
        with BundleWriter(path, BundleHeader(VOCAB_SIZE, "a" * 64, 1, "random")) as writer:
            for _ in range(CORPUS_TOKENS >> 22):
                writer.append(generator.integers(0, VOCAB_SIZE, 1 << 22, dtype=np.uint16))
        read_ahead = _read_ahead_kib(path)
        write_result(
            "data_loader",
            {
                "numpy": np.__version__,
                "datasets": datasets.__version__,
                "threads": 1,
                "corpus_mib": path.stat().st_size >> 20,
                "in_memory": [_in_memory(path, Path(folder), *shape, runs) for shape in SHAPES],
                "disk_read_ahead_kib": read_ahead,
                "cold": [_cold(path, context, runs) for context, _ in SHAPES] if read_ahead is not None else [],
            },
        )
