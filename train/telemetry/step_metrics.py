"""Report each step: its line of metrics, and from time to time one for people in the run's log."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import psutil
import torch
from torch import Tensor

from zslurm.train.schedule import Position
from zslurm.train.telemetry.observer import ObservedRun, Observer, StepResult
from zslurm.train.telemetry.throughput import ThroughputMeter
from zslurm.train.telemetry.timing import StepPart

_LOG = logging.getLogger(__name__)
_CHECKED_STEPS = 3
"""Steps of an attempt whose memory is looked at."""

_MEMORY_LIMIT = 0.8
"""Share of a GPU's memory above which a run is warned."""


class StepMetrics(Observer):
    """Records the steps that were taken."""

    def __init__(self, run: ObservedRun, throughput: ThroughputMeter) -> None:
        """Record the steps of `run`."""
        self._run, self._config, self._throughput = run, run.config, throughput
        self._memory = MemoryCheck(run.world.device)

    @classmethod
    def create(cls, run: ObservedRun) -> StepMetrics | None:
        """Return the observer of rank 0; all ranks measure the peak of their devices together."""
        throughput = ThroughputMeter(run.config, run.world)
        return cls(run, throughput) if run.world.is_first else None

    def step_done(self, step: int, here: Position, result: StepResult, split: Mapping[StepPart, float]) -> None:
        """Record the step, in detail and in the log at every metrics.log_every."""
        if not result.taken:
            return
        seconds, skip_expert = sum(split.values()), self._config.model.skip_expert
        routing = routing_metrics(result.counts_LC, skip_expert)
        in_detail = step % self._config.metrics.log_every == 0
        memory = memory_metrics(self._run.world.device)
        self._memory.look(step, memory)
        row = {
            "step": step,
            "tokens": here.tokens_before + here.step_tokens,
            "phase": here.phase.name,
            "loss": result.loss,
            **({"z_loss": result.z_loss} if self._config.optim.z_loss else {}),
            "lr": here.lr,
            "grad_norm": result.grad_norm,
            **self._throughput.of(here, seconds, routing["skip_share"]),
            "step_time_s": seconds,
            "time_split_s": {str(part): part_seconds for part, part_seconds in split.items()},
            **memory,
            **routing,
            **(load_by_layer(result.counts_LC, skip_expert) if in_detail else {}),
        }
        self._run.record("step", **row)
        if in_detail or step == 1:
            _LOG.info(describe_step(row, self._run.total_steps))


def routing_metrics(counts_LC: Tensor, skip_expert: bool) -> dict[str, float]:
    """Measure how evenly the experts are used, from the choices of each class in each layer, over all ranks.

    Returns skip_share, the mean over layers (the last class skips if there is a skip class), and load_entropy,
    the smallest over layers of H(p)/ln E in [0, 1], p the share of tokens of each real expert.
    """
    counts = counts_LC.double()
    real = counts[:, :-1] if skip_expert else counts
    return {
        "skip_share": 1 - (real.sum() / counts.sum()).item(),
        "load_entropy": _load_entropies(counts, skip_expert).min().item(),
    }


def load_by_layer(counts_LC: Tensor, skip_expert: bool) -> dict[str, Any]:
    """Return each layer's entropy of the load over real experts, and each class's share of the choices."""
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
    """Return this rank's memory in bytes: of the process now, and on a GPU the highest since the last call."""
    metrics = {"memory_rss_bytes": int(psutil.Process().memory_info().rss)}
    if device.type == "cuda":
        metrics["memory_allocated_bytes"] = torch.cuda.max_memory_allocated(device)
        metrics["memory_reserved_bytes"] = torch.cuda.max_memory_reserved(device)
        metrics["memory_total_bytes"] = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.reset_peak_memory_stats(device)
    return metrics


class MemoryCheck:
    """Warns once if the first steps of an attempt leave little of a GPU's memory."""

    def __init__(self, device: torch.device) -> None:
        """Look at `device`; a CPU is never warned about."""
        on_gpu = device.type == "cuda"
        self._total = torch.cuda.get_device_properties(device).total_memory if on_gpu else 0
        self._steps = _CHECKED_STEPS

    def look(self, step: int, memory: Mapping[str, int]) -> None:
        """Look at what `memory_metrics` returned after a step."""
        if not self._total or not self._steps:
            return
        self._steps -= 1
        reserved, allocated = memory["memory_reserved_bytes"], memory["memory_allocated_bytes"]
        if reserved > _MEMORY_LIMIT * self._total:
            self._steps = 0
            _LOG.warning(
                "memory: step %d took %.0f %% of this GPU's %.1f GiB (%.1f GiB in tensors at most, %.1f GiB held "
                "by the allocator), and uneven experts, RCCL or an evaluation may need the rest; "
                "set parallel.recompute: auto or true, or lower phases[].micro_batch",
                step,
                100 * reserved / self._total,
                self._total / 2**30,
                allocated / 2**30,
                reserved / 2**30,
            )


def describe_step(row: dict[str, Any], total_steps: int) -> str:
    """Return a step's line for people, from its metrics."""
    mfu = "" if row["mfu"] is None else f" mfu {100 * row['mfu']:.1f} %"
    return (
        f"step {row['step']}/{total_steps} loss {row['loss']:.4f} lr {row['lr']:.3g} "
        f"grad norm {row['grad_norm']:.3g} {row['tokens_per_s']:,.0f} tokens/s{mfu}"
    )
