"""Run routing and the experts' steps on a GPU: one kernel each, two for `sort`.

`sort` is a counting sort: one kernel counts each class in blocks of choices, torch adds the counts up, classes
first, so that they are the start of each class's rows of each block, and another kernel places the choices there.

Rows of tokens move 16 bytes at a time if their width allows it. Everything is computed in fp32.
"""

from __future__ import annotations

from zslurm.kernels.experts.triton.launches import launches
from zslurm.kernels.experts.triton.routing import choose, choose_backward, sort
from zslurm.kernels.experts.triton.rows import activate, activate_backward, combine, gather, weights_backward

__all__ = [
    "activate",
    "activate_backward",
    "choose",
    "choose_backward",
    "combine",
    "gather",
    "launches",
    "sort",
    "weights_backward",
]
