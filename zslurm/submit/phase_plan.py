"""What each phase of a run is on its ranks: groups, memory, and what is sent between them. Nothing is measured.

Times follow from the model of the network in `train/plan/communication.py`, and from the assumption that a GPU
computes at ASSUMED_FLOPS; ranks on CPUs have no times.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from zslurm.config.spec import RunSpec
from zslurm.train.plan.communication import RankGroup, StepTraffic, Traffic, context_traffic, step_traffic
from zslurm.train.plan.memory import MemoryPlan
from zslurm.train.plan.rates import ASSUMED_TFLOPS
from zslurm.train.sections.phases import PhaseConfig
from zslurm.train.telemetry.flops import token_flops

ASSUMED_FLOPS = ASSUMED_TFLOPS * 1e12
"""FLOP/s of a GPU in forward and backward; a faster GPU hides less communication."""


@dataclass(frozen=True)
class PhasePlan:
    """A phase on the ranks of a run, in the steps of its own batch (batches of a ramp have fewer sequences).

    Attributes:
        data_parallel: groups that divide the sequences of a step.
        sequences: of a step that one of them has at most.
        microbatches: forward passes in which it computes them.
        peak_bytes: memory of a rank in this phase.
        activation_bytes: of it, what a microbatch takes.
        context: what a rank sends to the others of its context group in a step.
        compute_s: seconds that a rank computes in a step, as assumed; None on CPUs.
        exposed_s: what communication adds to that, by the model.
    """

    phase: PhaseConfig
    data_parallel: int
    sequences: int
    microbatches: int
    peak_bytes: int
    activation_bytes: int
    context: Traffic
    compute_s: float | None
    exposed_s: float | None

    @property
    def exposed_share(self) -> float | None:
        """Return the share of a step in which ranks wait for communication."""
        if self.compute_s is None or self.exposed_s is None:
            return None
        return self.exposed_s / (self.compute_s + self.exposed_s)


@dataclass(frozen=True)
class Communication:
    """What a rank sends in a step of any phase, and what flat collectives would send instead."""

    group: RankGroup
    traffic: StepTraffic
    flat: StepTraffic

    @classmethod
    def of(cls, spec: RunSpec) -> Communication:
        """Return the communication volume of a run."""
        group = RankGroup.of(spec.world_size, spec.ranks_per_node, spec.parallel.collectives)
        return cls(group, step_traffic(spec, group), step_traffic(spec, replace(group, two_level=False)))

    def as_json(self) -> dict[str, Any]:
        """Return plain values: bytes of one rank, and seconds."""
        total = self.traffic.total
        parts = ("reduce_scatter", "exchange", "all_gather")
        return {
            "collectives": "two_level" if self.group.two_level else "flat",
            "buckets": self.traffic.buckets,
            "bucket_bytes": round(self.traffic.bucket_bytes),
            **{name: _bytes(getattr(self.traffic, name)) for name in parts},
            "most_exchange_messages": self.traffic.exchange.messages,
            "flat": {
                "exchange": _bytes(self.flat.exchange),
                "most_exchange_messages": self.flat.exchange.messages,
            },
            "predicted_s": total.seconds,
            "latency_share": total.latency_s / total.seconds if total.seconds else 0.0,
        }


def phase_plans(spec: RunSpec, memory: MemoryPlan, traffic: StepTraffic, *, on_cpu: bool) -> list[PhasePlan]:
    """Return the phases of a run with this memory and communication."""
    return [_plan(spec, index, memory, traffic, on_cpu=on_cpu) for index in range(len(spec.phases))]


def _plan(spec: RunSpec, index: int, memory: MemoryPlan, traffic: StepTraffic, *, on_cpu: bool) -> PhasePlan:
    phase = spec.phases[index]
    shares = spec.world_size // phase.context_parallel
    sequences = -(-phase.global_batch // shares)
    microbatches = -(-sequences // phase.micro_batch)
    context = context_traffic(spec, phase, sequences)
    compute_s = exposed_s = None
    if not on_cpu:
        tokens = sequences * phase.context / phase.context_parallel
        # Of forward; backward is two of them, and one more of what is recomputed.
        pass_s = token_flops(spec.model, phase.context, 0.0) * tokens / ASSUMED_FLOPS / 3
        passes = 3 + memory.recomputed / spec.model.layers
        compute_s = passes * pass_s
        # All ranks reduce under the last backward, and gather under the first forward.
        forward_s, backward_s = pass_s / microbatches, (passes - 1) * pass_s / microbatches
        exposed_s = traffic.exposed_s(forward_s, backward_s) + context.seconds
    return PhasePlan(
        phase,
        shares,
        sequences,
        microbatches,
        memory.peak_in(index),
        memory.microbatches[index].peak,
        context,
        compute_s,
        exposed_s,
    )


def phase_json(plan: PhasePlan, ranks_per_node: int) -> dict[str, Any]:
    """Return a phase as plain values: bytes of one rank, and seconds."""
    phase = plan.phase
    return {
        "name": phase.name,
        "context": phase.context,
        "context_parallel": phase.context_parallel,
        "context_groups": context_groups(phase.context_parallel, ranks_per_node),
        "data_parallel": plan.data_parallel,
        "global_batches": [segment.global_batch for segment in phase.segments],
        "sequences_per_rank": plan.sequences,
        "microbatches_per_rank": plan.microbatches,
        "peak_bytes": plan.peak_bytes,
        "activation_bytes": plan.activation_bytes,
        "context_bytes": _bytes(plan.context),
        "compute_s": plan.compute_s,
        "exposed_s": plan.exposed_s,
        "exposed_share": plan.exposed_share,
    }


def context_groups(size: int, ranks_per_node: int) -> list[str]:
    """Return the local ranks of each context group of a node, such as 0-3; nothing if none is shared."""
    if size == 1:
        return []
    return [f"{first}-{first + size - 1}" for first in range(0, ranks_per_node, size)]


def _bytes(traffic: Traffic) -> dict[str, int]:
    values = asdict(traffic)
    return {level: round(values[level]) for level in ("inside", "rail", "off_rail")}
