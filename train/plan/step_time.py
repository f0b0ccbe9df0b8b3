"""Where the time of an optimizer step goes on one rank, and its MFU: a model, without torch.

    products        each call of forward and backward at its rate (rates.py), what is recomputed included
    attention       scores and values, at the rate of attention
    communication   what is exposed of ZeRO-1's, by the model of communication.py, and of context groups
    rest            reading and writing: every activation that is kept is written once, read once, and its gradient
                    written once; the optimizer's state, weights and gradients are read and written once a step;
                    and Muon's Newton-Schulz products on the rank with most of them, as fast as unmeasured products

Times add up: nothing but communication runs beside anything else. The host, waiting for data, kernel launches,
evaluation and saves are left out. Nothing of this was measured on an MI300X.
"""

from __future__ import annotations

from dataclasses import dataclass

from zslurm.train.config import TrainConfig
from zslurm.train.parallel.memory import ITEMSIZE
from zslurm.train.phases import PhaseConfig
from zslurm.train.plan.communication import StepTraffic, context_traffic
from zslurm.train.plan.matmuls import Matmul
from zslurm.train.plan.memory import MemoryPlan
from zslurm.train.plan.rates import Rates
from zslurm.train.shapes import owned_table

_TERA, _GIGA = 1e12, 1e9


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, in the order in which they are shown."""

    products: float
    attention: float
    communication: float
    rest: float

    @property
    def seconds(self) -> float:
        """Return the time of the step."""
        return self.products + self.attention + self.communication + self.rest


def step_time(
    config: TrainConfig,
    phase: PhaseConfig,
    sequences: int,
    products: list[Matmul],
    memory: MemoryPlan,
    traffic: StepTraffic,
    rates: Rates,
    activation_bytes: int,
) -> StepTime | None:
    """Return the time of a step in which a rank has so many sequences; None where rates are not known.

    `products` are those of a microbatch, and `activation_bytes` what its layers keep for backward.
    """
    default = rates.default
    if default is None:
        return None
    microbatches = sequences / min(phase.micro_batch, sequences)
    dense = attention = forward = backward = 0.0
    for product in products:
        rate = rates.of(product)
        assert rate is not None
        seconds = product.total_flops / (rate.tflops * _TERA)
        if product.kind == "attention":
            attention += seconds
        else:
            dense += seconds
        if product.pass_name == "forward":
            forward += seconds
        else:
            backward += seconds
    moved = 3 * activation_bytes * microbatches + 2 * _state_bytes(config, memory)
    rest = moved / (rates.memory_gb_s * _GIGA) if rates.memory_gb_s else 0.0
    rest += newton_schulz_flops(config, memory) / (default.tflops * _TERA)
    exposed = traffic.exposed_s(forward, backward) + context_traffic(config, phase, sequences).seconds
    return StepTime(dense * microbatches, attention * microbatches, exposed, rest)


def newton_schulz_flops(config: TrainConfig, memory: MemoryPlan) -> float:
    """Return the FLOPs of Muon's products in a step, on the rank that has most of them; 0 for AdamW alone.

    A step of a matrix with sides s <= l is X X^T (2 s^2 l), its square (2 s^3) and a product with X (2 s^2 l).
    """
    flops = 0.0
    for row in owned_table(config.model, config.optim):
        if row.whole and row.matrices:
            count, rows, columns = row.matrices
            rows = rows * count // row.whole  # gate and up rows may be a matrix each
            short, long = sorted((rows, columns))
            flops += row.whole * config.optim.muon.steps * (4.0 * short**2 * long + 2.0 * short**3)
    uneven = memory.balance.cost / memory.balance.cost_mean if memory.balance.cost else 1.0
    return flops / memory.ranks * uneven


def _state_bytes(config: TrainConfig, memory: MemoryPlan) -> int:
    """Return the bytes that the optimizer updates on a rank, with all weights and gradients."""
    owned = sum(
        memory.resident.get(name, 0) for name in ("master weights", "reduced gradients", "optimizer state")
    )
    elements = sum(row.numel for row in owned_table(config.model, config.optim))
    both = ITEMSIZE[config.parallel.dtype] + ITEMSIZE[config.parallel.gradient_dtype]
    return owned + elements * both
