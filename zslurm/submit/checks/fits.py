"""Refuse before the queue what a GPU cannot hold."""

from __future__ import annotations

from collections.abc import Iterator

import psutil

from zslurm.checkpoint_tools.quantities import counted, show_bytes
from zslurm.config.spec import RunSpec
from zslurm.core.errors import ConfigError
from zslurm.submit.size import card_of
from zslurm.train.plan.memory import LEFT_FREE, MemoryPlan, plan_memory, with_least_recompute


def check_fits(spec: RunSpec) -> list[str]:
    """Refuse a run that its GPUs cannot hold or compute; return what is worth knowing, a line each.

    Raises:
        ConfigError: with the nearest setting that fits.
    """
    card = card_of(spec, None, "")
    if (memory := card.memory) is None:
        return []
    plan = _plan(spec, memory)
    if plan.peak <= (1 - LEFT_FREE) * memory:
        return []
    if card.copies_too_large:
        raise ConfigError(f"memory of a rank: {card.copies_too_large}: the run does not fit; {_better(spec)}")
    gpu = f"{spec.cluster.gpu_family or spec.cluster.gpu_type} has {show_bytes(memory)}"
    gpu += f" besides {show_bytes(card.copies)} of copies in the same memory" if card.copies else ""
    need = f"memory of a rank: {show_bytes(plan.peak)} at the peak ({plan.peak_moment}), and each {gpu}"
    if plan.peak <= memory:
        return [f"{need}: little is left for the allocator and the network's library"]
    better = _better(spec)
    if _is_estimate(spec):
        return [f"{need}; compiled layers may take less, else {better}"]
    raise ConfigError(f"{need}: the run does not fit; {better}")


def _better(spec: RunSpec) -> str:
    """Return the nearest setting with which the run fits, as advice."""
    for changes, smaller_spec in _smaller(spec):
        memory = card_of(smaller_spec, None, "").memory or 0  # copies of the state are smaller on more ranks
        if (smaller := _plan(smaller_spec, memory)).peak <= (1 - LEFT_FREE) * memory:
            return f"set {changes} ({show_bytes(smaller.peak)})"
    return (
        "no smaller batch, recomputation or number of nodes is enough: take a smaller model or a shorter context"
    )


def check_fits_here(spec: RunSpec) -> list[str]:
    """Return a line if all ranks of a local run on CPUs need more memory than this machine has."""
    memory, ranks = psutil.virtual_memory().total, spec.world_size

    def total(of: RunSpec) -> int:
        config = with_least_recompute(of, ranks, None, on_cpu=True, local=ranks)
        return ranks * plan_memory(config, ranks, on_cpu=True, local=ranks).peak

    needed = total(spec)
    if needed <= memory:
        return []
    fitting = next(
        (changes for changes, smaller_spec in _smaller_batches(spec) if total(smaller_spec) <= memory), ""
    )
    return [
        f"memory of {counted(ranks, 'rank')}: {show_bytes(needed)} at the peak, and this machine has "
        f"{show_bytes(memory)}: " + (f"set {fitting}" if fitting else "take a smaller model or a shorter context")
    ]


def _is_estimate(spec: RunSpec) -> bool:
    """Return whether the plan counts more than the run may take."""
    return bool(spec.parallel.compile)


def _plan(spec: RunSpec, memory: int) -> MemoryPlan:
    ranks, local = spec.world_size, spec.ranks_per_node
    return plan_memory(
        with_least_recompute(spec, ranks, memory, on_cpu=False, local=local), ranks, on_cpu=False, local=local
    )


def _smaller(spec: RunSpec) -> Iterator[tuple[str, RunSpec]]:
    """Yield settings that take less memory, those first that cost least, each with its run."""
    yield from _smaller_batches(spec)
    if spec.parallel.recompute not in (True, "auto"):
        recomputing = spec.model_copy(update={"parallel": spec.parallel.model_copy(update={"recompute": True})})
        yield "parallel.recompute to true", recomputing
        for changes, smaller_spec in _smaller_batches(recomputing):
            yield f"parallel.recompute to true and {changes}", smaller_spec
    nodes = spec.slurm.nodes
    batch = min(phase.global_batch * phase.context_parallel for phase in spec.phases)
    while nodes * 2 * spec.ranks_per_node <= batch:
        nodes *= 2
        slurm = spec.slurm.model_copy(update={"nodes": nodes})
        yield f"slurm.nodes to {nodes}", spec.model_copy(update={"slurm": slurm})


def _smaller_batches(spec: RunSpec) -> Iterator[tuple[str, RunSpec]]:
    """Yield the run with half, a quarter, ... of the largest microbatch, in tokens, of its phases."""
    phases = list(spec.phases)
    changed: dict[int, int] = {}
    while True:
        index = max(
            range(len(phases)),
            key=lambda phase_index: phases[phase_index].micro_batch * phases[phase_index].context,
        )
        if phases[index].micro_batch == 1:
            return
        half = phases[index].micro_batch // 2
        while phases[index].global_batch % half or any(s.global_batch % half for s in phases[index].segments):
            half -= 1
        changed[index] = half
        phases[index] = phases[index].model_copy(update={"micro_batch": half})
        shown = " and ".join(
            f"phases[{phase_index}].micro_batch to {size}" for phase_index, size in sorted(changed.items())
        )
        yield shown, spec.model_copy(update={"phases": tuple(phases)})
