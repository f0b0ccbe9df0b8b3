"""Train one number by gradient descent, without torch: the program that run_from_python.py and sweep.py submit.

    zslurm submit --cluster local -- python examples/tiny_trainer.py --lr 0.1 --steps 50

`progress.step` is all that it knows of zslurm.
"""

from __future__ import annotations

import argparse
import time

from zslurm import progress


def main() -> None:
    """Bring x to 3."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()

    x = 0.0
    for step in range(1, arguments.steps + 1):
        loss = (x - 3) ** 2
        x -= arguments.lr * 2 * (x - 3)
        progress.step(step, loss=loss, lr=arguments.lr)
        time.sleep(0.02)  # a step of a model takes longer
    print(f"x = {x:.4f}")


if __name__ == "__main__":
    main()
