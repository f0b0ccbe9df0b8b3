"""The demo's training speed: two ranks of the tiny recipe on this machine, on as many tokens as the demo chooses.

Peer: this machine's own fp32 matrix product (of 1024 x 1024 on all cores, by the faster of torch's libraries as in
the model), measured before and after. The model's arithmetic is counted as 6 FLOPs for each active parameter and
token, the tied head included.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.common import write_result
from zslurm.train.config import load_train_config
from zslurm.train.jsonl import read_jsonl
from zslurm.train.shapes import parameter_counts


def matmul_rate(seconds: float = 2.0) -> float:
    """FLOP/s of an fp32 product on all cores."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    torch.mm(a, b)
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        torch.mm(a, b)
        count += 1
    return count * 2 * 1024**3 / (time.perf_counter() - started)


def run() -> None:
    """Measure and write results/demo_speed.json."""
    before = matmul_rate()
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "zslurm", "demo", "--dir", f"{folder}/demo"], check=True)
        seconds = time.perf_counter() - started
        run_dir = Path(folder) / "demo" / "runs" / "demo"
        steps = [row for row in read_jsonl(run_dir / "metrics.jsonl") if row["kind"] == "step"]
        config = load_train_config(run_dir / "config.json")
    after = matmul_rate()
    counts = parameter_counts(config.model)
    active = counts.active + config.model.vocab_size * config.model.hidden_size
    tokens_per_s = statistics.median(row["tokens_per_s"] for row in steps)
    peer = (before + after) / 2
    write_result(
        "demo_speed",
        {
            "wall_time_s": round(seconds, 1),
            "tokens": config.phases[0].tokens,
            "steps": steps[-1]["step"],
            "tokens_per_s": round(tokens_per_s),
            "loss_first": round(steps[0]["loss"], 3),
            "loss_last_10_mean": round(statistics.mean(row["loss"] for row in steps[-10:]), 3),
            "model_gflops": round(6 * active * tokens_per_s / 1e9, 2),
            "matmul_gflops": round(peer / 1e9, 2),
            "ratio_to_matmul": round(6 * active * tokens_per_s / peer, 3),
        },
    )
