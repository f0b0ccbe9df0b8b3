"""How many tokens' caches there is memory for, beside what is taken already."""

from __future__ import annotations

import torch

from zslurm.train.model.cache import bytes_per_token
from zslurm.train.model.zaya import Zaya

_SHARE = 0.5
"""Of a GPU's free memory: doubling a pool of pages holds the old one beside the new, and activations need some."""


def most_tokens(model: Zaya, at_least: int) -> int | None:
    """Return the tokens that a GPU has memory for, or `at_least`; None on a CPU, which takes pages as needed."""
    weight = model.embedding.weight
    if weight.device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(weight.device)
    free += torch.cuda.memory_reserved(weight.device) - torch.cuda.memory_allocated(weight.device)
    return max(at_least, int(free * _SHARE) // bytes_per_token(model.config, weight.dtype))
