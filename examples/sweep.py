"""Try several learning rates at once, each as a run, and print which is best.

    python examples/sweep.py                       # on this machine
    python examples/sweep.py --cluster mi300x      # on the cluster of that profile

`zslurm submit run.yaml --sweep phases.0.lr=1e-4,3e-4` does so from a terminal for a run of zslurm's own trainer.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import zslurm

TRAINER = Path(__file__).with_name("tiny_trainer.py")


def main() -> int:
    """Submit all, wait for all, compare; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cluster", default="local", help="a profile; local is this machine")
    parser.add_argument("--lr", type=float, nargs="+", default=[0.003, 0.03, 0.3])
    arguments = parser.parse_args()

    runs = {
        lr: zslurm.submit(
            {
                "run": {"name": f"sweep-lr-{lr:g}"},
                "trainer": {"command": [sys.executable, TRAINER, "--lr", str(lr)], "steps": 50},
            },
            cluster=arguments.cluster,
            new=True,
        )
        for lr in arguments.lr
    }
    states = {lr: run.wait().state for lr, run in runs.items()}
    losses = {lr: float(run.metrics().steps["loss"][-1]) for lr, run in runs.items() if states[lr] == "completed"}
    for lr, run in runs.items():
        print(f"{run.name}: {states[lr]}, loss {losses.get(lr, float('nan')):.2e}")
    if len(losses) < len(runs):
        return 1
    print(f"best learning rate: {min(losses, key=losses.__getitem__):g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
