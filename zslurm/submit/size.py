"""The sizes of a run: its products, the rules that they break, and the time of a step, for each phase."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from zslurm.checkpoint_tools.quantities import show_bytes
from zslurm.cluster.xgmi import xgmi_costs
from zslurm.config.spec import RunSpec
from zslurm.submit.phase_plan import Communication
from zslurm.train.config import ModelConfig, TrainConfig
from zslurm.train.errors import ConfigError
from zslurm.train.plan.matmuls import Matmul, MicrobatchShape, matmuls
from zslurm.train.plan.memory import MemoryPlan, plan_memory, with_least_recompute
from zslurm.train.plan.rates import Rates
from zslurm.train.plan.shape_search import ShapeProposal, nearest_shapes, search_shapes
from zslurm.train.plan.size_rules import (
    SHAPE_RULES,
    SizeFinding,
    batch_findings,
    memory_findings,
    width_findings,
)
from zslurm.train.plan.step_time import StepTime, step_time
from zslurm.train.schedule import check_ranks
from zslurm.train.sections.phases import PhaseConfig
from zslurm.train.telemetry.flops import PEAKS, token_flops


@dataclass(frozen=True)
class Card:
    """What is known of a GPU.

    Attributes:
        peak: FLOP/s at its peak in the run's format.
        memory: its bytes that the trainer's tensors may take.
        copies: bytes of the same memory that copies of the state take, if the host has no other (MI300A); else 0.
            If they take more than there is, `memory` is 0.
        whole: its bytes, those of the copies among them.
    """

    peak: float | None
    memory: int | None
    copies: int = 0
    whole: int | None = field(default=None, compare=False)

    @property
    def copies_too_large(self) -> str:
        """Return in a clause that the copies alone take more than the GPU has; empty if they do not."""
        if self.memory != 0 or self.whole is None:
            return ""
        return (
            f"copies of a rank's state, for checkpoints and recovery, take {show_bytes(self.copies)}, and the "
            f"GPU, whose memory is the host's as well, has {show_bytes(self.whole)}"
        )


@dataclass(frozen=True)
class PhaseSize:
    """A phase on a rank.

    Attributes:
        phase: of the run.
        sequences: that a rank has in a step at most.
        microbatch: of the rank.
        products: of a microbatch.
        time: of a step; None if no rate is known.
        mfu: share of the peak that the step reaches; None if time or peak are not known.
    """

    phase: PhaseConfig
    sequences: int
    microbatch: MicrobatchShape
    products: list[Matmul]
    time: StepTime | None
    mfu: float | None

    @property
    def flops(self) -> float:
        """Return the FLOPs of a rank's microbatch, without what is computed twice."""
        return sum(product.total_flops for product in self.products if product.pass_name != "recompute")

    @property
    def all_flops(self) -> float:
        """Return them with what is computed twice."""
        return sum(product.total_flops for product in self.products)


@dataclass(frozen=True)
class RunSize:
    """The phases of a run, the rules that it breaks, and its memory."""

    phases: list[PhaseSize]
    findings: list[SizeFinding]
    memory: MemoryPlan


_CARD_GIB = {
    ("MI355X",): 288,
    ("MI350X",): 288,
    ("MI325X",): 256,
    ("MI300X",): 192,
    ("MI300A",): 128,
    ("MI250X",): 64,
    ("H200",): 139,
    ("H100", "PCIE"): 80,
    ("H100",): 80,
}
"""Memory of devices in telemetry's table of peaks that are sold with one size only."""

_SHARED = frozenset([("MI300A",)])
"""Devices whose memory is that of the host as well (AMD, MI300A data sheet)."""


def card_of(spec: RunSpec, gib: float | None, device: str, *, on_cpu: bool = False) -> Card:
    """Return what is known of a run's GPUs: by `metrics.peak_tflops`, `gib`, and the name of the device.

    Without a name it is the profile's. Of CPUs only `metrics.peak_tflops` is known.
    """
    named = device or spec.cluster.gpu_family or spec.cluster.gpu_type or ""
    words = set() if on_cpu else set(re.split(r"[\W_]+", named.upper()))
    row = next((row for row in PEAKS if words.issuperset(row.words)), None)
    peak = {"bf16": row.bf16, "fp32": row.fp32}.get(spec.parallel.dtype) if row else None
    peak = spec.metrics.peak_tflops or peak
    gib = gib or (_CARD_GIB.get(row.words) if row else None)
    whole = int(gib * 2**30) if gib else None
    copies = _copies(spec) if whole and row is not None and row.words in _SHARED else 0
    memory = None if whole is None else max(0, whole - copies)
    return Card(peak * 1e12 if peak else None, memory, copies, whole)


def shares_memory(spec: RunSpec) -> bool:
    """Return whether the GPUs of a run, by the profile's name for them, share their memory with the host."""
    words = set(re.split(r"[\W_]+", (spec.cluster.gpu_family or spec.cluster.gpu_type or "").upper()))
    return any(words.issuperset(device) for device in _SHARED)


def _copies(spec: RunSpec) -> int:
    """Return the bytes of copies of a rank's state, for checkpoints and for recovery in memory."""
    local, ranks = spec.ranks_per_node, spec.world_size
    plan = plan_memory(with_least_recompute(spec, ranks, None, on_cpu=False, local=local), ranks, on_cpu=False)
    return plan.staging + (plan.copies if spec.recovers_in_memory else 0)


def run_size(spec: RunSpec, card: Card, rates: Rates, *, on_cpu: bool) -> RunSize:
    """Return the sizes of a run on its ranks.

    Raises:
        ConfigError: of the trainer: a phase's sequences cannot be divided by its context_parallel ranks.
    """
    local, ranks = spec.ranks_per_node, spec.world_size
    config = with_least_recompute(spec, ranks, card.memory, on_cpu=on_cpu, local=local)
    memory = plan_memory(config, ranks, on_cpu=on_cpu, local=local)
    traffic = Communication.of(spec).traffic
    phases = []
    for index, phase in enumerate(config.phases):
        sequences = most_sequences(spec, phase)
        microbatch = MicrobatchShape.of(phase, sequences)
        products = matmuls(config, microbatch, memory.recomputed, on_cpu=on_cpu)
        kept = memory.microbatches[index].layers
        time = step_time(config, phase, sequences, products, memory, traffic, rates, kept)
        tokens = sequences * phase.context / phase.context_parallel
        work = token_flops(config.model, phase.context, 0.0) * tokens
        mfu = work / (time.seconds * card.peak) if time and card.peak else None
        phases.append(PhaseSize(phase, sequences, microbatch, products, time, mfu))
    findings = [
        *_rank_findings(spec, on_cpu=on_cpu),
        *_findings(config, phases, memory, card, local, on_cpu=on_cpu),
    ]
    return RunSize(phases, findings, memory)


def most_sequences(spec: RunSpec, phase: PhaseConfig) -> int:
    """Return how many sequences of a phase a rank has in a step at most."""
    return -(-phase.global_batch // (spec.world_size // phase.context_parallel or 1))


def _rank_findings(spec: RunSpec, *, on_cpu: bool) -> list[SizeFinding]:
    """Check the ranks against the phases, and against the links of a node."""
    try:
        findings = [
            SizeFinding("ranks", line.split(" ", 1)[0], line)
            for line in check_ranks(spec.phases, spec.world_size, spec.ranks_per_node)
        ]
    except ConfigError as error:
        findings = [SizeFinding("ranks", str(error).split(" ", 1)[0], str(error))]
    return findings if on_cpu else [*findings, *(SizeFinding("xgmi", key, line) for key, line in xgmi_costs(spec))]


def _findings(
    config: TrainConfig, phases: list[PhaseSize], memory: MemoryPlan, card: Card, local: int, *, on_cpu: bool
) -> list[SizeFinding]:
    """Check widths, microbatches and memory: rules for GPUs."""
    if on_cpu:
        return []
    findings = list(width_findings(config))
    for index, size in enumerate(phases):
        findings += batch_findings(config, index, size.sequences, size.products)
    return findings + _memory_findings(config, memory, card, local)


def _memory_findings(config: TrainConfig, memory: MemoryPlan, card: Card, local: int) -> list[SizeFinding]:
    """Check that a run and the copies of its state fit; nothing if the memory of the GPUs is not known."""
    if card.memory is None:
        return []
    if card.copies_too_large:
        line = f"slurm.nodes: {card.copies_too_large}: use more ranks or a smaller model"
        return [SizeFinding("memory", "slurm.nodes", line)]
    return list(memory_findings(config, memory, card.memory, local=local))


def proposals(
    spec: RunSpec, parameters: float, card: Card, *, on_cpu: bool
) -> tuple[list[ShapeProposal], list[SizeFinding]]:
    """Return shapes near a number of parameters that keep the rules: on CPUs only the rules of widths.

    If there are none, the second list has what the nearest shape breaks; it is empty if no shape is near.
    """

    def broken(model: ModelConfig) -> list[SizeFinding]:
        return _width_broken(spec, model) if on_cpu else _broken_by(spec, model, card)

    shapes = search_shapes(spec.model, parameters, lambda model: not broken(model))
    if shapes:
        return shapes, []
    nearest = nearest_shapes(spec.model, parameters)[:1]
    return [], broken(nearest[0].model) if nearest else []


def _width_broken(spec: RunSpec, model: ModelConfig) -> list[SizeFinding]:
    findings = width_findings(spec.model_copy(update={"model": model}))
    return [finding for finding in findings if finding.rule in SHAPE_RULES]


def _broken_by(spec: RunSpec, model: ModelConfig, card: Card) -> list[SizeFinding]:
    """Return the rules that a shape breaks in the run's microbatches; memory, which takes longest, comes last."""
    changed = spec.model_copy(update={"model": model})
    if not isinstance(changed.parallel.recompute, str) and changed.parallel.recompute > model.layers:
        parallel = changed.parallel.model_copy(update={"recompute": True})
        changed = changed.model_copy(update={"parallel": parallel})
    findings = list(width_findings(changed))
    for index, phase in enumerate(spec.phases):
        sequences = most_sequences(spec, phase)
        products = matmuls(changed, MicrobatchShape.of(phase, sequences), 0, on_cpu=False)
        findings += batch_findings(changed, index, sequences, products)
    findings = [finding for finding in findings if finding.rule in SHAPE_RULES]
    if findings or card.memory is None:
        return findings
    local, ranks = spec.ranks_per_node, spec.world_size
    config = with_least_recompute(changed, ranks, card.memory, on_cpu=False, local=local)
    return _memory_findings(config, plan_memory(config, ranks, on_cpu=False, local=local), card, local)
