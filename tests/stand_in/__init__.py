"""A stand-in for the trainer, without torch, for tests of launching, Slurm and Aegis.

A rank of it costs a tenth of the processor time of a real one, which spends most of it on importing torch. To
everything around the ranks it is the trainer: it writes the same progress records, rows of metrics.jsonl, log
lines and checkpoints, computes a curve that only the state in its checkpoints can continue, keeps in step with
its peers, fails when one of them is lost, answers requests to stop, and takes the faults of tests/faults/in_ranks.
`test_stand_in.py` compares it with the trainer.

The seam is the environment: `environment()` puts `in_ranks/` on PYTHONPATH (`cluster.env` of a run); its
sitecustomize gives `zslurm.job.rank`, and no other process, the modules of that folder for `zslurm.train.setup`,
`zslurm.train.main` and `torch.distributed`. All else in the rank is the product.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

IN_RANKS = Path(__file__).resolve().parent / "in_ranks"


def environment(env: Mapping[str, str], modules: Path = IN_RANKS) -> dict[str, str]:
    """`cluster.env` of a run whose ranks are stand-ins; other sitecustomize modules on its PYTHONPATH run too.

    Args:
        env: what the run has besides.
        modules: where the ranks find IN_RANKS.
    """
    paths = [str(modules), *filter(None, [env.get("PYTHONPATH")])]
    return {**env, "PYTHONPATH": os.pathsep.join(paths)}
