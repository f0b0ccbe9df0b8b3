"""The root of every error that zslurm raises for a reason that its caller can act on."""

from __future__ import annotations


class Error(Exception):
    """Something that one line can explain: what, where, and what to do next.

    Three families derive from it: `ZslurmError` (commands and runs), `CheckpointError` (checkpoints, usable alone)
    and `TrainError` (the trainer and published models).
    """
