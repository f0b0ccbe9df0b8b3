"""RUN_DIR/metrics.jsonl: one JSON line for each step and each checkpoint. Rank 0 is its only writer.

    {"kind": "step", "attempt", "step", "tokens", "phase", "loss", "lr", "grad_norm", "tokens_per_s",
     "step_time_s", "skip_share", "load_entropy", "time"}
    {"kind": "checkpoint", "attempt", "step", "state", "bytes", "seconds", "time"}

`step` counts finished optimizer steps, from 1. `loss` is the mean cross-entropy of the step's targets in nats.
`load_entropy` is the smallest over layers of H(p)/ln E, p the share of tokens of each real expert. A restart
repeats the steps after its checkpoint: of several lines with one step, the last attempt's counts.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from train.jsonl import JsonLinesWriter, read_jsonl


class MetricsWriter:
    """Appends to metrics.jsonl."""

    def __init__(self, path: Path, attempt: int) -> None:
        """Open the file.

        Raises:
            OSError: it cannot be written.
        """
        self._attempt = attempt
        self._lines = JsonLinesWriter(path)

    def write(self, kind: str, **fields: Any) -> None:
        """Append one line.

        Raises:
            OSError: the disk is full or the file system is gone.
        """
        self._lines.append({"kind": kind, "attempt": self._attempt, **fields, "time": time.time()})

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def last_attempt(path: Path) -> int:
    """The highest attempt number in a metrics file; 0 where there is none."""
    return max((int(row.get("attempt", 0)) for row in read_jsonl(path)), default=0)


def routing_metrics(counts_LC: Tensor, skip_expert: bool) -> dict[str, float]:
    """How evenly the experts are used.

    Args:
        counts_LC: choices of each class in each layer, over all ranks.
        skip_expert: whether the last class is the skip class.

    Returns:
        skip_share, the mean over layers, and load_entropy, the smallest over layers of H(p)/ln E in [0, 1].
    """
    counts = counts_LC.double()
    real = counts[:, :-1] if skip_expert else counts
    skip = 1 - (real.sum() / counts.sum()).item()
    shares = real / real.sum(dim=-1, keepdim=True).clamp(min=1)
    entropy = -torch.special.xlogy(shares, shares).sum(dim=-1)
    experts = real.shape[-1]
    return {
        "skip_share": skip,
        "load_entropy": entropy.min().item() / math.log(experts) if experts > 1 else 1.0,
    }
