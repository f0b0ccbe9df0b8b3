"""What the trainer reads of a Slurm job around it.

torchrun starts the trainer without the rest of zslurm, so it cannot ask `zslurm.slurm.environment`, as all other
packages do.
"""

from __future__ import annotations

import os
import socket


def own_job_id() -> str:
    """Return the id of the Slurm job that this process runs in; empty outside of a job."""
    return os.environ.get("SLURM_JOB_ID", "")


def own_node() -> str:
    """Return this node's name as Slurm has it, or the host's name outside Slurm."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
