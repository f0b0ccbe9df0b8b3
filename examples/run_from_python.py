"""Submit a run from Python, wait for it, and read what happened.

    python examples/run_from_python.py                       # on this machine
    python examples/run_from_python.py --cluster mi300x      # on the cluster of that profile

`zslurm.submit("run.yaml")` submits a run file in the same way. In a notebook, `run` alone shows its state.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import zslurm

TRAINER = Path(__file__).with_name("tiny_trainer.py")


def main() -> int:
    """Submit, wait, report; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cluster", default="local", help="a profile; local is this machine")
    arguments = parser.parse_args()

    try:
        run = zslurm.submit(
            {"run": {"name": "from-python"}, "trainer": {"command": [sys.executable, TRAINER], "steps": 50}},
            cluster=arguments.cluster,
            new=True,
        )
    except zslurm.Error as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{run.name} is job {run.job_id}, in {run.path}")
    state = run.wait()
    print(f"{state.state} at step {state.step}")
    for event in run.events():
        print(f"  {event.describe()}")
    losses = run.metrics().steps["loss"]  # a numpy array; run.metrics().frame() is a pandas DataFrame
    print(f"loss from {losses[0]:.2e} to {losses[-1]:.2e}")
    return 0 if state.state == "completed" else 1


if __name__ == "__main__":
    sys.exit(main())
