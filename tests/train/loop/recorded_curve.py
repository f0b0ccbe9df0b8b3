"""The run whose loss curve is recorded, and how to record it again: `python -m tests.train.loop.recorded_curve`.

Twenty steps of a tiny model through the whole trainer (data, order, schedule, clipping, balancing), in one
process and thread on a CPU. The text is drawn from SHAKE-256, so it is the same with any version of anything.
Record again, and say why in the commit, only when a change of the numbers is meant; recorded_curves.json holds

    losses    of every step in fp64, and in fp32
    spread    how far from the fp32 curve (root mean square of relative differences) the furthest of eight runs is
              whose weights were moved by one unit in the last place before the first step
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.train.loop.curves import nudge as nudge_weights
from tests.train.runs import MODEL, VOCAB, losses_of, make_run
from zslurm.train.config import load_train_config
from zslurm.train.data.build.bundle_writer import BundleWriter
from zslurm.train.data.schema import BundleHeader
from zslurm.train.parallel.world import open_world
from zslurm.train.setup import open_trainer
from zslurm.train.stop import StopRequest

RECORDED = Path(__file__).parent / "recorded_curves.json"
OPTIMIZERS = ("adamw", "muon")
STEPS = 20
PERTURBED_RUNS = 8
SECTIONS: dict[str, Any] = {
    "phase": {
        "context": 32,
        "global_batch": 8,
        "micro_batch": 4,
        "tokens": STEPS * 8 * 32,
        "lr": 1e-2,
        "warmup_steps": 4,
    },
    "checkpoint": {"every_steps": 1000},
}


def make_text(path: Path, tokens: int = 8000) -> Path:
    """A bundle of text in which each token has four likely successors."""
    drawn = np.frombuffer(hashlib.shake_256(b"recorded curve").digest(tokens), np.uint8)
    text = [3]
    for choice in drawn[1:].tolist():
        successor = text[-1] * 7 + (choice % 4) * 11 if choice < 240 else choice
        text.append(2 + successor % (VOCAB - 2))
    header = BundleHeader(vocab_size=VOCAB, tokenizer_sha256="c" * 64, end_token=1, source="recorded curve")
    with BundleWriter(path, header) as writer:
        writer.append(np.array(text, np.uint32))
    return path


def train(directory: Path, optimizer: str, dtype: str, *, nudge: int | None = None, **optim: Any) -> list[float]:
    """Train in this process; the loss of every step.

    Args:
        directory: where the run goes; it is made.
        optimizer: of matrices.
        dtype: the format of everything.
        nudge: a seed that moves every weight by one unit in its last place, before the first step.
        optim: other settings of the section.
    """
    directory.mkdir(parents=True)
    text = make_text(directory / "text.h5")
    parallel = {"dtype": dtype, "gradient_dtype": "fp32", "device": "cpu"}
    optim_section = {"matrices": optimizer, **optim}
    run = make_run(directory / "run", text, parallel=parallel, optim=optim_section, **SECTIONS)
    config = load_train_config(run / "config.json")
    with open_world(config.parallel) as world:
        trainer = open_trainer(run, config, world, StopRequest())
        if nudge is not None:
            nudge_weights(trainer.shards.master, nudge)
            trainer.shards.gather_weights()
        trainer.run()
    return losses_of(run)


def distance(curve: Sequence[float], base: Sequence[float]) -> float:
    """Root mean square of the relative differences of losses."""
    return math.sqrt(float(np.mean((np.array(curve) / np.array(base) - 1) ** 2)))


def record() -> dict[str, Any]:
    """Train everything that is recorded."""
    curves: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for optimizer in OPTIMIZERS:
            directory = Path(folder) / optimizer
            exact, base = (train(directory / dtype, optimizer, dtype) for dtype in ("fp64", "fp32"))
            perturbed = [
                train(directory / f"perturbed-{seed}", optimizer, "fp32", nudge=seed)
                for seed in range(PERTURBED_RUNS)
            ]
            curves[optimizer] = {
                "fp64": exact,
                "fp32": base,
                "spread": max(distance(run, base) for run in perturbed),
            }
            print(
                optimizer,
                f"{exact[0]:.4f} -> {exact[-1]:.4f}, spread {curves[optimizer]['spread']:.2e}",
                file=sys.stderr,
            )
    where = {"torch": torch.__version__, "machine": platform.machine(), "python": platform.python_version()}
    return {"model": MODEL, "recorded_with": where, "curves": curves}


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(record(), indent=1) + "\n")
