"""How evenly the experts of each layer are used while the demo's model trains; ZAYA1's router and a linear one.

The run is the demo's, made longer: recipe zaya1-tiny on the standard library's sources, 4,096 tokens in a step.
After every 50 steps the saved model routes 64 sequences of the text, and H(p) / ln E is taken for each layer, p
the share of their tokens that each real expert gets (the skip class is left out). Peer: `model.router: linear`,
the same run with one matrix per layer and no depth averaging. Both run on one thread, at the same time.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import write_result
from zslurm.cli.demo import RANKS, RUN_FILE, VOCAB_SIZE
from zslurm.config.layers import Override
from zslurm.config.load import resolve
from zslurm.train.checkpointing.load_weights import load_model
from zslurm.train.config import load_train_config
from zslurm.train.data.build.build import build
from zslurm.train.data.build.sources import DEMO_CORPUS_GLOB, demo_corpus_sources
from zslurm.train.data.bundle import Corpus
from zslurm.train.data.sampler import Sampler
from zslurm.train.hub import open_weights
from zslurm.train.jsonl import read_jsonl
from zslurm.train.telemetry.step_metrics import routing_metrics

STEPS = 300
EVERY = 50
SEQUENCES = 64
ROUTERS = ("mlp", "linear")
OTHER_SEED = 1  # of the order in which the sequences are drawn that the saved models route


def run(overrides: tuple[str, ...] = ()) -> None:
    """Measure and write results/router_balance.json.

    Args:
        overrides: further `KEY=VALUE` settings of both runs, to try something out.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        build([demo_corpus_sources()], directory / "data", vocab_size=VOCAB_SIZE, glob=DEMO_CORPUS_GLOB)
        runs = {router: _prepare(directory, router, overrides) for router in ROUTERS}
        _train_all(list(runs.values()))
        figures = {router: _figures(run_dir) for router, run_dir in runs.items()}
    lowest = min(figures["mlp"]["load_entropy_by_layer"][-1])
    write_result(
        "router_balance",
        {
            "torch": torch.__version__,
            "steps": STEPS,
            "settings_changed": list(overrides),
            "lowest_entropy_of_a_layer_at_the_end": lowest,
            "goal": 0.95,
            "reached": lowest > 0.95,
            "routers": figures,
        },
    )


def _prepare(directory: Path, router: str, overrides: tuple[str, ...]) -> Path:
    """A run directory with the demo's configuration for STEPS steps."""
    run_file = directory / "run.yaml"
    run_file.write_text(RUN_FILE.format(ranks=RANKS))
    (phase,) = resolve(run_file).spec.phases
    changed = (
        f"phases[0].tokens={STEPS * phase.global_batch * phase.context}",
        f"model.router={router}",
        "parallel.threads=1",
        f"checkpoint.every_steps={EVERY}",
        f"checkpoint.keep_last={STEPS // EVERY}",
        *overrides,
    )
    run_dir = directory / router
    run_dir.mkdir()
    spec = resolve(run_file, overrides=list(map(Override.parse, changed))).spec
    (run_dir / "config.json").write_text(json.dumps(spec.model_dump(mode="json")))
    return run_dir


def _train_all(run_dirs: list[Path]) -> None:
    """Train side by side, one rank each."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([sys.executable, "-m", "zslurm.train", str(run_dir)], env=environment, stdout=sys.stderr)
        for run_dir in run_dirs
    ]
    try:
        for process in processes:
            if process.wait():
                raise RuntimeError(f"training ended with exit code {process.returncode}")
    finally:
        for process in processes:
            process.kill()


def _figures(run_dir: Path) -> dict[str, Any]:
    losses = {row["step"]: row["loss"] for row in read_jsonl(run_dir / "metrics.jsonl") if row["kind"] == "step"}
    steps = list(range(EVERY, STEPS + 1, EVERY))
    counts = [_routed(run_dir, step) for step in steps]
    balance = [[routing_metrics(layer, skip_expert=True) for layer in counts_LC.split(1)] for counts_LC in counts]
    return {
        "step": steps,
        "loss_mean_of_10_steps": [
            round(statistics.mean(losses[step - before] for before in range(10)), 3) for step in steps
        ],
        "load_entropy_by_layer": [[round(layer["load_entropy"], 4) for layer in layers] for layers in balance],
        "skip_share_by_layer": [[round(layer["skip_share"], 4) for layer in layers] for layers in balance],
    }


@torch.inference_mode()
def _routed(run_dir: Path, step: int) -> Tensor:
    """How many tokens of the sequences each class of each layer gets from the model saved at `step`."""
    config = load_train_config(run_dir / "config.json")
    with open_weights(run_dir / "checkpoints" / f"step-{step:08d}") as weights:
        model = load_model(weights, dtype=torch.float32)
    (phase,) = config.phases
    corpus = Corpus.open(str(config.data.path))
    indices = Sampler(corpus.sequences(phase.context), OTHER_SEED).indices(range(SEQUENCES))
    tokens_BS = torch.from_numpy(corpus.windows(indices, phase.context))
    counts: Tensor = model(tokens_BS[:, :-1], tokens_BS[:, 1:], rope_base=phase.rope_base)[1]
    return counts
