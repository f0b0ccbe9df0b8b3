"""Put a rank's model and its shards together, as all ranks agree.

What must be the same on all ranks is decided here: by collectives when a run starts, and in a process that takes
the place of a rank later by the `AgreedFacts` that the ranks left for it.
"""

from __future__ import annotations

import gc
import logging
from datetime import timedelta

import torch

from zslurm.checkpoint_tools.quantities import counted, show_bytes
from zslurm.kernels import dispatch
from zslurm.kernels.grouped_gemm import Groups, chosen_for
from zslurm.train.config import TrainConfig
from zslurm.train.context.context_parallel import ContextParallel, context_groups
from zslurm.train.data.order import DataOrder
from zslurm.train.data.reader import read_from
from zslurm.train.data.training_data import TrainingData
from zslurm.train.errors import ConfigError
from zslurm.train.model.attention_backends.automatic import aiter_of_auto
from zslurm.train.model.attention_backends.choice import attention_backend
from zslurm.train.model.attention_backends.documents import documents_by_torch, failure_of
from zslurm.train.model.attention_backends.packages import FORMATS, FlashAttention, choose_kernels
from zslurm.train.model.zaya import Zaya, build
from zslurm.train.parallel.copy_engines import weights_memory
from zslurm.train.parallel.facts import AgreedFacts, kernel_facts
from zslurm.train.parallel.kernel_agreement import leave_out_together, share_tables
from zslurm.train.parallel.levels import Levels, choose_levels, make_levels
from zslurm.train.parallel.topology import Topology
from zslurm.train.parallel.world import DTYPES, World, choose_device, least_of_all, overlaps
from zslurm.train.parallel.zero import ZeroShards
from zslurm.train.plan.activations import recomputed_layers
from zslurm.train.plan.communication import RankGroup, bucket_bytes
from zslurm.train.plan.memory import largest_head_chunk, plan_memory, with_least_recompute
from zslurm.train.schedule import Plan
from zslurm.train.shapes import owned_table
from zslurm.train.telemetry.throughput import own_rate

_LOG = logging.getLogger(__name__)
_WARM_UP_LIMIT = 1 << 28
_WARM_UP_TOKENS = 128


def initial_model(config: TrainConfig, device: torch.device) -> Zaya:
    """Return the model with its initial values; it draws no random numbers but its own."""
    return build(config.model, config.run.seed, dtype=DTYPES[config.parallel.dtype], device=device)


def run_model(model: Zaya, config: TrainConfig, device: torch.device, recomputed: int) -> None:
    """Make a model run as parallel.* asks for, with its first layers `recomputed`.

    Raises:
        ConfigError: the attention kernels are not installed, or cannot run this model here.
    """
    parallel, dtype = config.parallel, DTYPES[config.parallel.dtype]
    attention = choose_kernels(parallel.attention, device=device, dtype=dtype, head_dim=config.model.head_dim)
    if attention == "auto" and device.type == "cuda":
        attention = _by_aiter(config, device, dtype) or attention
    if attention == "auto" and device.type == "cuda" and dtype in FORMATS and _keeps_documents_apart(config):
        attention = _by_bounds(config, device, dtype) or attention
    if device.type == "cuda":
        _LOG.info("attention runs on %s", attention_backend(attention, config, device, dtype))
    chosen = parallel.grouped_gemm
    dispatch.use("grouped_gemm", {"on": "torch", "off": "reference"}.get(chosen, chosen))
    if device.type == "cuda":
        _LOG.info("the experts' products run on %s", products_of_experts(config, device, dtype))
    model.run_with(
        attention=attention,
        recompute=recomputed,
        compile=parallel.compile,
        context_parallel=any(phase.context_parallel > 1 for phase in config.phases),
    )


def _keeps_documents_apart(config: TrainConfig) -> bool:
    """Return whether documents are kept apart in sequences that ranks do not share."""
    return any(config.data.isolates(phase) and phase.context_parallel == 1 for phase in config.phases)


def _by_aiter(config: TrainConfig, device: torch.device, dtype: torch.dtype) -> FlashAttention | None:
    """Return AITER's kernels if `auto` takes them; the log says why not if they are installed."""
    kernels, reason = aiter_of_auto(config, device, dtype)
    if reason is not None:
        _LOG.info("attention does not run on the installed AITER: %s", reason)
    return kernels


def products_of_experts(config: TrainConfig, device: torch.device, dtype: torch.dtype) -> str:
    """Return the implementation of the experts' first product in the first phase's microbatches."""
    model, phase = config.model, config.phases[0]
    rows = phase.micro_batch * (phase.context // phase.context_parallel) * model.experts_per_token
    element = torch.empty((), dtype=dtype, device=device)  # of shapes alone: nothing is read
    x_NI = element.expand(rows, model.hidden_size)
    weight_EIO = element.expand(model.experts, model.hidden_size, 2 * model.expert_hidden_size)
    ends_E = torch.zeros(model.experts, dtype=torch.int32, device=device)
    return chosen_for(x_NI, weight_EIO, Groups(ends_E))


def _by_bounds(config: TrainConfig, device: torch.device, dtype: torch.dtype) -> FlashAttention | None:
    """Return torch's kernels for documents kept apart; None, with a line in the log, if they do not work here."""
    kernels, model = documents_by_torch(), config.model
    reason: str | None = "this torch has no varlen_attn, which came with 2.10"
    if kernels is not None:
        reason = failure_of(kernels, device, dtype, (model.query_heads, model.kv_heads), model.head_dim)
    if reason is not None:
        _LOG.info("documents are kept apart by a mask, whose memory grows with the context squared (%s)", reason)
        return None
    return kernels


def recomputed_by_all(config: TrainConfig, world: World) -> int:
    """Return how many layers are recomputed in backward, as `planned_by_all` does."""
    return planned_by_all(config, world)[0]


def planned_by_all(config: TrainConfig, world: World) -> tuple[int, int | None]:
    """Return how many layers are recomputed in backward, and the tokens of a chunk of the head; None: its own.

    What is chosen by the plan of memory is written in the log. Both are the same on all ranks: if they share
    sequences, what one recomputes all of them exchange again.
    """
    device, layers = world.device, config.model.layers
    on_gpu = device.type == "cuda"
    memory = _usable_memory(config, world) if on_gpu else 0
    smallest, local = (int(value) for value in least_of_all([memory, world.local_size], world))
    limit = smallest if on_gpu else None
    recomputing = with_least_recompute(config, world.size, limit, on_cpu=not on_gpu, local=local)
    chosen = recomputed_layers(recomputing)
    if config.parallel.recompute == "auto":
        _LOG.info("parallel.recompute: auto recomputes %d of %s", chosen, counted(layers, "layer"))
    chunk = largest_head_chunk(recomputing, world.size, limit, local=local)
    if chunk is not None:
        _LOG.info("logits exist for %s at one time, as memory allows", counted(chunk, "token"))
    return chosen, chunk


def _usable_memory(config: TrainConfig, world: World) -> int:
    """Return the bytes of the device that tensors may take; an MI300A also has the copy for a checkpoint.

    Raises:
        ConfigError: that copy alone takes more than the device has.
    """
    properties = torch.cuda.get_device_properties(world.device)
    total = int(properties.total_memory)
    if not getattr(properties, "is_integrated", False):
        return total
    plan = plan_memory(with_least_recompute(config, world.size, None, on_cpu=False), world.size, on_cpu=False)
    if plan.staging >= total:
        raise ConfigError(
            f"the copy of a rank's state for a checkpoint takes {show_bytes(plan.staging)}, and the device, whose "
            f"memory is the host's as well, has {show_bytes(total)}: use more ranks or a smaller model"
        )
    return total - plan.staging


def make_or_choose_levels(config: TrainConfig, world: World, facts: AgreedFacts | None) -> Levels | None:
    """Return the levels of the collectives: as the ranks chose before (`facts`), or chosen now by all of them."""
    if facts is None:
        levels, line = choose_levels(config.parallel, world)
        if line is not None:
            _LOG.info(line)
        return levels
    if not facts.two_level:
        return None
    topology = Topology(world.size // world.local_size, world.local_size)
    return make_levels(topology, world.rank, timedelta(seconds=config.parallel.timeout_s))


def agree_on_facts(
    config: TrainConfig, world: World, recomputed: int, head_chunk: int | None, *, two_level: bool
) -> AgreedFacts:
    """Agree on the rest of what must be the same on all ranks, also if their nodes are unlike."""
    local, overlap = least_of_all([world.local_size, overlaps(config.parallel, world.device)], world)
    tables, missing = kernel_facts()
    return AgreedFacts(recomputed, int(local), bool(overlap), two_level, tables, missing, head_chunk)


def warm_up(model: Zaya, config: TrainConfig) -> None:
    """Do what makes a first step slower than the others, in a process that waits to take a rank's place.

    Modules are imported and libraries set up threads, plans and caches when they first run: a microbatch is read,
    and on a CPU a few tokens are run forward and backward. Weights, gradients and the random state are as before.
    Nothing is run if the first step would compile, nor of a large model.

    Raises:
        DataError: the data cannot be read.
    """
    plan = Plan(config.phases)
    order = DataOrder(TrainingData.open(config.data), plan, config.run.seed, config.data.packing)
    next(read_from(order, 0, 0, 1), None)
    _run_once(model, config)
    gc.collect()
    gc.freeze()


def _run_once(model: Zaya, config: TrainConfig) -> None:
    on_gpu = choose_device(config.parallel.device, 0).type == "cuda"
    if on_gpu or config.parallel.compile or sum(weight.numel() for weight in model.parameters()) > _WARM_UP_LIMIT:
        return
    run_model(model, config, torch.device("cpu"), 0)
    own_rate(DTYPES[config.parallel.dtype])
    state = torch.get_rng_state()
    phase = config.phases[0]
    tokens_BS = torch.zeros(phase.micro_batch, min(phase.context, _WARM_UP_TOKENS), dtype=torch.int64)
    losses, _ = model.losses(tokens_BS, tokens_BS, rope_base=phase.rope_base)
    losses.objective.backward()
    model.zero_grad(set_to_none=True)
    torch.set_rng_state(state)


def make_contexts(config: TrainConfig, world: World) -> dict[int, ContextParallel]:
    """Make the groups of ranks that share sequences in some phase; all ranks call it at the same point."""
    sizes, parallel = (phase.context_parallel for phase in config.phases), config.parallel
    with world.making_groups():
        return context_groups(sizes, parallel.context_attention, timedelta(seconds=parallel.timeout_s))


def assemble(
    config: TrainConfig, world: World, model: Zaya | None = None, facts: AgreedFacts | None = None
) -> tuple[Zaya, ZeroShards, AgreedFacts]:
    """Return the model, its shards, and what the ranks agreed on.

    A `model` that was made before is taken as it is. A process that takes the place of a rank adopts the `facts`
    of the others, which agreed on them before it came.
    """
    if facts is None:
        recomputed, head_chunk = planned_by_all(config, world)
    else:
        recomputed, head_chunk = facts.recomputed, facts.head_chunk
    model = (model if model is not None else initial_model(config, world.device)).to(world.device)
    run_model(model, config, world.device, recomputed)
    model.head_chunk = head_chunk
    if facts is None:
        share_tables(world.group, world.device)
        leave_out_together(world.group, world.device)
    with world.making_groups():
        levels = make_or_choose_levels(config, world, facts)
    facts = facts or agree_on_facts(config, world, recomputed, head_chunk, two_level=levels is not None)
    shards = shard(model, config, world, levels, facts)
    model.sum_gradients_by(shards)
    return model, shards, facts


def shard(model: Zaya, config: TrainConfig, world: World, levels: Levels | None, facts: AgreedFacts) -> ZeroShards:
    """Divide gradients and master weights over the ranks, as parallel.* asks for."""
    parallel = config.parallel
    group = RankGroup.of(world.size, facts.local, "flat" if levels is None else "two_level")
    return ZeroShards(
        model,
        owned_table(config.model, config.optim),
        world.group,
        levels=levels,
        gradient_dtype=DTYPES[parallel.gradient_dtype],
        reduce_dtype=DTYPES[parallel.reduce_dtype or parallel.gradient_dtype],
        bucket_bytes=bucket_bytes(config, group),
        overlap=facts.overlap,
        weights_memory=weights_memory(world, levels, facts.local),
    )
