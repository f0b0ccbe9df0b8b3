"""Tests of `zslurm bench`."""

from pathlib import Path

IN_RANKS = Path(__file__).parent / "in_ranks"
"""On PYTHONPATH: `zslurm bench` measures every point only shortly."""
