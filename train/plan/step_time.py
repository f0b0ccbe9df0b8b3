"""Where a rank spends the time of an optimizer step, and its MFU: a model, without torch.

    products        each call of forward and backward at its rate (rates.py), what is recomputed included
    attention       scores and values, at the rate of attention
    operations      what is not one of these: convolutions, norms, activations, sorting rows, softmax and cross
                    entropy. If every part of a microbatch was measured (parts.py), it is the parts' time less
                    that of the products and of attention in them. Else every activation that is kept is written
                    once, read once, and its gradient written once, and convolutions count as products
    communication   what is exposed of ZeRO-1's, by the model of communication.py, and of context groups
    optimizer       reading and writing: the gradients of each microbatch are added to a sum, which is read and
                    written; the optimizer's state, weights and gradients are read and written once a step; and
                    Muon's Newton-Schulz steps on the rank with most of them, in the time that was measured for
                    matrices of their shape and format, else as fast as all measured products together
    checks          with integrity.every_steps: K, in every K-th step a microbatch more, one more reduction of the
                    gradients, under which nothing is computed, and gradients read three times, weights twice; in
                    every step masters and moments are read twice

Times add up: only communication overlaps with anything else. Waiting for data, evaluation and saves are left
out; so is the start of kernels if parts were not measured. Nothing of this was measured on an MI300X.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zslurm.train.config import TrainConfig
from zslurm.train.parallel.memory import ITEMSIZE
from zslurm.train.plan.communication import StepTraffic, context_traffic
from zslurm.train.plan.matmuls import Matmul, MicrobatchShape
from zslurm.train.plan.memory import MemoryPlan
from zslurm.train.plan.newton_schulz import matrix_batches
from zslurm.train.plan.parts import PARTS, PASSES, calls, is_recomputed
from zslurm.train.plan.rates import Rates
from zslurm.train.sections.phases import PhaseConfig
from zslurm.train.shapes import owned_table

_TERA, _GIGA = 1e12, 1e9


PARTS_OF_A_STEP = ("products", "attention", "other operations", "exposed communication", "optimizer", "checks")
"""What users read, in the order of the fields of `StepTime`."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, in the order in which they are shown."""

    products: float
    attention: float
    operations: float
    communication: float
    optimizer: float
    checks: float

    @property
    def seconds(self) -> float:
        """Return the time of the step."""
        return self.products + self.attention + self.operations + self.communication + self.optimizer + self.checks


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
    """Return the time of a step in which a rank has `sequences` sequences; None if rates are not known.

    `products` are a microbatch's, and `activation_bytes` what its layers keep for backward.
    """
    default = rates.default
    if default is None:
        return None
    microbatch = MicrobatchShape.of(phase, sequences)
    microbatches = sequences / microbatch.sequences
    parts = _parts_s(config, microbatch, memory.recomputed, rates)
    dense = attention = forward = backward = 0.0
    for product in products:
        if parts is not None and product.kind == "convolution":
            continue
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
    if parts is None:
        operations = 3 * activation_bytes / (rates.memory_gb_s * _GIGA) if rates.memory_gb_s else 0.0
    else:
        forward, backward = parts
        operations = max(0.0, forward + backward - dense - attention)
    optimizer = _optimizer_bytes(config, memory, microbatches) / (rates.memory_gb_s or math.inf) / _GIGA
    optimizer += _newton_schulz_s(config, memory, rates, rates.large or default.tflops)
    exposed = traffic.exposed_s(forward, backward) + context_traffic(config, phase, sequences).seconds
    return StepTime(
        products=dense * microbatches,
        attention=attention * microbatches,
        operations=operations * microbatches,
        communication=exposed,
        optimizer=optimizer,
        checks=_checks_s(config, memory, traffic, rates, dense + attention + operations),
    )


def _parts_s(
    config: TrainConfig, microbatch: MicrobatchShape, recomputed: int, rates: Rates
) -> tuple[float, float] | None:
    """Return the measured seconds of a microbatch forward and backward; None if a part was not measured."""
    model, forward, backward = config.model, 0.0, 0.0
    for part in PARTS:
        once, both = (rates.part_s(part, pass_name, microbatch, model.hidden_size) for pass_name in PASSES)
        if once is None or both is None:
            return None
        count = calls(model, part)
        forward += count * once
        backward += count * (both - once)
        if is_recomputed(part):
            backward += count * once * recomputed / model.layers
    return forward, backward


def _newton_schulz_s(config: TrainConfig, memory: MemoryPlan, rates: Rates, tflops: float) -> float:
    """Return the seconds of Muon's products in a step, on the rank that has most of them; 0 with only AdamW.

    What was measured has its time; other matrices are as fast as `tflops`.
    """
    seconds = 0.0
    for batch in matrix_batches(config):
        measured = rates.newton_schulz_s(batch)
        seconds += batch.count * (batch.flops / (tflops * _TERA) if measured is None else measured)
    uneven = memory.balance.cost / memory.balance.cost_mean if memory.balance.cost else 1.0
    return seconds / memory.ranks * uneven


def _checks_s(
    config: TrainConfig, memory: MemoryPlan, traffic: StepTraffic, rates: Rates, microbatch_s: float
) -> float:
    """Return the seconds of a step that `integrity` takes: a K-th of what a checked step does, and each step's."""
    every = config.integrity.every_steps
    if not every:
        return 0.0
    elements = sum(row.numel for row in owned_table(config.model, config.optim))
    kept = sum(memory.resident.get(name, 0) for name in ("master weights", "optimizer state"))
    read = 3 * ITEMSIZE[config.parallel.gradient_dtype] + 2 * ITEMSIZE[config.parallel.dtype]
    moved = 2 * kept + elements * read / every
    reduction = traffic.reduce_scatter.seconds + traffic.to_owners.seconds if memory.ranks > 1 else 0.0
    return (microbatch_s + reduction) / every + moved / (rates.memory_gb_s or math.inf) / _GIGA


def _optimizer_bytes(config: TrainConfig, memory: MemoryPlan, microbatches: float) -> float:
    """Return the bytes that move for sums of gradients, and for what the optimizer updates on a rank."""
    owned = sum(
        memory.resident.get(name, 0) for name in ("master weights", "reduced gradients", "optimizer state")
    )
    elements = sum(row.numel for row in owned_table(config.model, config.optim))
    weights, gradients = ITEMSIZE[config.parallel.dtype], ITEMSIZE[config.parallel.gradient_dtype]
    added = microbatches * elements * (weights + 2 * gradients)
    return added + 2 * (owned + elements * (weights + gradients))
