"""RUN_DIR/metrics.jsonl: one JSON line for each step, checkpoint, evaluation and unusual event. Rank 0 writes it.

`docs/metrics.md` has every field of every kind of line, with its unit. Every line carries `kind`, `attempt` and
`time`. A restart repeats the steps after its checkpoint: of several lines with one step, the last counts.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from zslurm.train.jsonl import JsonLinesWriter, read_jsonl
from zslurm.train.telemetry.tensorboard import TensorBoard


class MetricsWriter:
    """Appends to metrics.jsonl, and shows the same to TensorBoard if there is one."""

    def __init__(self, path: Path, attempt: int, board: TensorBoard | None = None) -> None:
        """Open the file.

        Raises:
            OSError: it cannot be written.
        """
        self._attempt = attempt
        self._lines = JsonLinesWriter(path)
        self._board = board

    def write(self, kind: str, **fields: Any) -> None:
        """Append one line.

        Raises:
            OSError: the disk is full or the file system is gone.
        """
        self._lines.append({"kind": kind, "attempt": self._attempt, **fields, "time": time.time()})
        if self._board is not None:
            self._board.show(kind, fields)

    def close(self) -> None:
        """Close the file."""
        self._lines.close()
        if self._board is not None:
            self._board.close()


def last_attempt(path: Path) -> int:
    """The highest attempt number in a metrics file; 0 where there is none."""
    return max((int(row.get("attempt", 0)) for row in read_jsonl(path)), default=0)


def routing_metrics(counts_LC: Tensor, skip_expert: bool) -> dict[str, float]:
    """How evenly the experts are used.

    Args:
        counts_LC: choices of each class in each layer, over all ranks.
        skip_expert: whether the last class is the skip class.

    Returns:
        skip_share, the mean over layers, and load_entropy, the smallest over layers of H(p)/ln E in [0, 1], p the
        share of tokens of each real expert.
    """
    counts = counts_LC.double()
    real = counts[:, :-1] if skip_expert else counts
    return {
        "skip_share": 1 - (real.sum() / counts.sum()).item(),
        "load_entropy": _load_entropies(counts, skip_expert).min().item(),
    }


def load_by_layer(counts_LC: Tensor, skip_expert: bool) -> dict[str, Any]:
    """Each layer's entropy of the load over real experts, and each class's share of the choices, to 1e-5."""
    counts = counts_LC.double()
    shares_LC = counts / counts.sum(dim=-1, keepdim=True)
    return {
        "load_entropy_by_layer": [round(value, 5) for value in _load_entropies(counts, skip_expert).tolist()],
        "load_shares": [[round(share, 5) for share in layer] for layer in shares_LC.tolist()],
    }


def _load_entropies(counts_LC: Tensor, skip_expert: bool) -> Tensor:
    real = counts_LC[:, :-1] if skip_expert else counts_LC
    experts = real.shape[-1]
    if experts == 1:
        return real.new_ones(len(real))
    shares = real / real.sum(dim=-1, keepdim=True).clamp(min=1)
    return torch.special.entr(shares).sum(dim=-1) / math.log(experts)


def memory_metrics(device: torch.device) -> dict[str, int]:
    """This rank's memory in bytes: of the process now, and on a GPU the highest since the last call."""
    metrics = {"memory_rss_bytes": int(psutil.Process().memory_info().rss)}
    if device.type == "cuda":
        metrics["memory_allocated_bytes"] = torch.cuda.max_memory_allocated(device)
        metrics["memory_reserved_bytes"] = torch.cuda.max_memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
    return metrics


def describe_step(row: dict[str, Any], total_steps: int) -> str:
    """A step's line for people, from its metrics."""
    mfu = "" if row["mfu"] is None else f" mfu {100 * row['mfu']:.1f} %"
    return (
        f"step {row['step']}/{total_steps} loss {row['loss']:.4f} lr {row['lr']:.3g} "
        f"grad norm {row['grad_norm']:.3g} {row['tokens_per_s']:,.0f} tokens/s{mfu}"
    )
