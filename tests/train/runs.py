"""Small training runs for tests: a corpus, a run directory, and ranks started by torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from zslurm.train.data.build.bundle_writer import BundleWriter
from zslurm.train.data.schema import BundleHeader
from zslurm.train.jsonl import read_jsonl

VOCAB = 64
MODEL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "layers": 2,
    "query_heads": 2,
    "kv_heads": 2,
    "head_dim": 8,
    "experts": 3,
    "expert_hidden_size": 24,
    "router_hidden_size": 8,
}
STEP_TOKENS = 6 * 16


def make_corpus(path: Path, tokens: int = 4000, tokenizer: str = "a" * 64) -> Path:
    """A bundle of text-like tokens: each depends on the one before, so there is something to learn."""
    generator = np.random.default_rng(7)
    stream = [5]
    for choice in generator.integers(0, 3, tokens - 2):
        stream.append(2 + (stream[-1] * 5 + int(choice)) % (VOCAB - 2))
    header = BundleHeader(vocab_size=VOCAB, tokenizer_sha256=tokenizer, end_token=1, source="tests")
    with BundleWriter(path, header) as writer:
        writer.append(np.array([*stream, 1], dtype=np.uint32))
    return path


def make_run(directory: Path, corpus: Path, *, steps: int = 6, **sections: dict[str, Any]) -> Path:
    """A run directory with a resolved config.json; `sections` override single keys."""
    phase = {
        "tokens": steps * STEP_TOKENS,
        "context": 16,
        "global_batch": 6,
        "micro_batch": 2,
        "lr": 3e-3,
        "final_lr": 3e-4,
        "warmup_steps": 2,
    } | sections.pop("phase", {})
    config = {
        "run": {"name": "tiny", "seed": 3},
        "model": MODEL | sections.pop("model", {}),
        "data": {"path": str(corpus)},
        "phases": [phase],
        "parallel": {"dtype": "fp32", "threads": 1} | sections.pop("parallel", {}),
        "checkpoint": {"every_steps": 3, "background": False} | sections.pop("checkpoint", {}),
        **sections,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def clean_environment() -> dict[str, str]:
    """This environment without what a launcher may have left in it."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "ZSLURM_PROGRESS_DIR")
    kept = {key: value for key, value in os.environ.items() if key not in dropped}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}


def torchrun(run: Path, ranks: int, *, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Train with `torchrun -m zslurm.train`, as a user without zslurm would."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [*command, "-m", "zslurm.train", str(run)],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def train_alone(run: Path, *, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Train on one rank without a launcher: `python -m zslurm.train RUN_DIR`."""
    return subprocess.run(
        [sys.executable, "-m", "zslurm.train", str(run)],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def steps_of(run: Path) -> list[dict[str, Any]]:
    """The step lines of a run's metrics, in order."""
    return [row for row in read_jsonl(run / "metrics.jsonl") if row["kind"] == "step"]


def losses_of(run: Path) -> list[float]:
    """The loss of every step line, in order."""
    return [row["loss"] for row in steps_of(run)]
