"""Bytes that a run takes on each rank, for any number of ranks, without torch and without allocating anything.

The peak is the sum of what lives as long as the run and of the largest of these moments:

    start                  the model's own weights, until they have moved into the shared buffer
    forward and backward   one microbatch (activations.py), of the phase that needs most
    clipping               squares of the owned gradient in fp64, a part at a time
    Muon                   the temporary tensors of a chunk of matrices (optim/workspace.py)

What lives as long as the run is listed in parallel/memory.py. On a CPU the copy that checkpoints are written from
(checkpointing/snapshot.py) belongs to it as well, unless `checkpoint.background` is false; on GPUs it is in the
host's memory. Ranks differ in what they own; the figures are for the rank that owns most. Counted are live
tensors, not what an allocator, the runtime or the collectives' library hold besides.
"""

from __future__ import annotations

from dataclasses import dataclass

from zslurm.checkpoint_tools import Balance, Partition, partition
from zslurm.train.config import TrainConfig
from zslurm.train.optim.workspace import matrices_at_once, update_bytes
from zslurm.train.parallel.memory import CPU_NORM_ELEMENTS, ITEMSIZE, sharded_bytes
from zslurm.train.parallel.topology import Topology
from zslurm.train.plan.activations import (
    MicrobatchMemory,
    head_chunk,
    microbatch_memory,
    product_sums,
    recomputed_layers,
)
from zslurm.train.plan.communication import RankGroup, bucket_bytes
from zslurm.train.plan.matmuls import MicrobatchShape
from zslurm.train.shapes import owned_table

_EXACT = 8  # bytes of an element in fp64
_COPY = "copy for a checkpoint"
_BOTH_PASSES = "forward and backward"
_LATER = (
    "exchange of matrices",
    "staging",
    "between two levels",
    "optimizer state",
    _COPY,
)  # allocated when the weights have moved


def copies_bytes(state: int, ranks: int) -> int:
    """Return the bytes of host memory that a rank's copies for recovery take, besides what a save takes anyway.

    `state` are the bytes of its masters and optimizer state: twice its own, and twice those of the rank whose
    buddy it is (train/recovery/copies/buddy_copies.py), if there is one.
    """
    return (4 if ranks > 1 else 2) * state


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the rank that owns most."""

    ranks: int  # data-parallel ranks of the run
    resident: dict[str, int]  # what lives as long as the run, by name
    moments: dict[str, int]  # what comes on top of that at one time, by name
    microbatches: tuple[MicrobatchMemory, ...]  # forward and backward, of each phase
    recomputed: int  # layers that are computed again in backward, the first ones
    staging: int  # host memory that saving takes, without the rank's own; on a CPU that is in `resident`
    copies: int  # memory of the host that copies for recovery in memory take, where `aegis.recovery` asks for it
    matrices: int  # matrices that one rank each owns whole; 0 if AdamW trains everything
    balance: Balance  # how evenly these are divided

    @property
    def microbatch(self) -> MicrobatchMemory:
        """Return the memory of the phase that needs most."""
        return max(self.microbatches, key=lambda memory: memory.peak)

    @property
    def peak(self) -> int:
        """Return the largest sum of what is allocated at one time."""
        return sum(self.resident.values()) + self.moments[self.peak_moment]

    def peak_in(self, phase: int) -> int:
        """Return the peak of a run that had this phase only."""
        moments = self.moments | {_BOTH_PASSES: self.microbatches[phase].peak}
        return sum(self.resident.values()) + max(moments.values())

    @property
    def peak_moment(self) -> str:
        """Return when the peak is."""
        return max(self.moments, key=lambda name: self.moments[name])

    @property
    def idle_share(self) -> float:
        """Return the share of time that ranks are idle while the one with most Newton-Schulz steps takes them."""
        return 1 - self.balance.cost_mean / self.balance.cost if self.balance.cost else 0.0


def plan_memory(config: TrainConfig, ranks: int, *, on_cpu: bool, local: int = 8) -> MemoryPlan:
    """Return the memory of a run on a number of ranks, `local` of them on each node, which are CPUs or GPUs."""
    table = owned_table(config.model, config.optim)
    layout = partition(table, ranks)
    rank = max(range(ranks), key=layout.chunk)
    group = RankGroup.of(ranks, local, config.parallel.collectives)
    resident = sharded_bytes(
        config.model,
        config.optim,
        config.parallel,
        ranks,
        rank,
        bucket_bytes=bucket_bytes(config, group),
        topology=Topology(group.nodes, group.local) if group.two_level else None,
    )
    copy = resident["master weights"] + resident["optimizer state"]
    if on_cpu and config.checkpoint.background:
        resident[_COPY] = copy
    itemsize = ITEMSIZE[config.parallel.dtype]
    microbatches = _microbatches(config, on_cpu=on_cpu)
    later = sum(resident.get(name, 0) for name in _LATER)
    squared = min(layout.chunk(rank), CPU_NORM_ELEMENTS) if on_cpu else 0
    moments = {
        "start": max(0, sum(row.numel for row in table) * itemsize - later),
        _BOTH_PASSES: max(microbatch.peak for microbatch in microbatches),
        # A value and its square; an fp64 gradient is its own value.
        "clipping": squared * _EXACT * (1 if itemsize == _EXACT else 2),
        "Muon": _muon(config, layout, rank, on_cpu=on_cpu),
    }
    return MemoryPlan(
        ranks=ranks,
        resident=resident,
        moments=moments,
        microbatches=microbatches,
        recomputed=recomputed_layers(config),
        staging=0 if on_cpu else copy,
        copies=copies_bytes(copy, ranks),
        matrices=sum(row.whole for row in table),
        balance=layout.balance(),
    )


MOST_HEAD_TOKENS = 4096
"""Tokens whose logits a GPU has at one time at most: 4 GiB with a vocabulary of 262,272."""

LEFT_FREE = 0.1
"""Share of a device's memory that a plan leaves to the allocator, the runtime and the collectives' library."""


def with_least_recompute(
    config: TrainConfig, ranks: int, memory: int | None, *, on_cpu: bool, local: int = 8
) -> TrainConfig:
    """Return the configuration with a number of layers for `parallel.recompute: auto`; any other as it is.

    It is the least with which the plan leaves `LEFT_FREE` of the `memory` bytes of a device free; all layers if
    that is not enough. Without a limit (None), and on CPUs, nothing is recomputed.
    """
    if config.parallel.recompute != "auto":
        return config

    def recomputing(layers: int) -> TrainConfig:
        return config.model_copy(update={"parallel": config.parallel.model_copy(update={"recompute": layers})})

    if memory is None or on_cpu:
        return recomputing(0)
    plan = plan_memory(recomputing(0), ranks, on_cpu=False, local=local)
    if plan.peak_moment != _BOTH_PASSES:
        return recomputing(0)
    room = (1 - LEFT_FREE) * memory - sum(plan.resident.values())
    layers = config.model.layers
    choices = map(recomputing, range(layers))
    fitting = (
        candidate for candidate in choices if max(m.peak for m in _microbatches(candidate, on_cpu=False)) <= room
    )
    return next(fitting, recomputing(layers))


def largest_head_chunk(config: TrainConfig, ranks: int, memory: int | None, *, local: int = 8) -> int | None:
    """Return the tokens whose logits a GPU has at one time: as many as leave `LEFT_FREE` of its memory free.

    At most `MOST_HEAD_TOKENS`; every chunk reads and writes the whole gradient of the embedding. None: the head's
    own number, which the plan counts with; also without a limit, and if the head's products widen their operands.
    """
    if memory is None or config.parallel.dtype != "bf16":
        return None
    tokens = max(MicrobatchShape.of(phase).tokens for phase in config.phases)
    default_tokens = head_chunk(config.model, tokens, on_cpu=False)
    room = (1 - LEFT_FREE) * memory - plan_memory(config, ranks, on_cpu=False, local=local).peak
    for chunk in (MOST_HEAD_TOKENS, MOST_HEAD_TOKENS // 2):
        further = (chunk - default_tokens) * config.model.vocab_size * ITEMSIZE["fp32"]
        if default_tokens < chunk <= tokens and further <= room:
            return chunk
    return None


def _microbatches(config: TrainConfig, *, on_cpu: bool) -> tuple[MicrobatchMemory, ...]:
    return tuple(microbatch_memory(config, phase, on_cpu=on_cpu) for phase in config.phases)


def _muon(config: TrainConfig, layout: Partition, rank: int, *, on_cpu: bool) -> int:
    """Return the temporary tensors of the shape that needs most."""
    exact = config.parallel.dtype == "fp64"
    product = _EXACT if exact else ITEMSIZE[config.optim.muon.dtype]
    most = 0
    for batch in layout.batches(rank):
        bytes_of_matrix = update_bytes(batch.rows, batch.columns, product, _EXACT if exact else ITEMSIZE["fp32"])
        together = min(batch.count, matrices_at_once(bytes_of_matrix, "cpu" if on_cpu else "cuda"))
        sums = product_sums(batch.rows * batch.columns, product) if on_cpu else 0  # CPUs multiply one by one
        most = max(most, bytes_of_matrix * together + sums)
    return most
