"""The bytes that ZeRO-1 and the optimizer allocate on a rank, known without torch: the same as zero.py does.

Every buffer is listed under the name of what it is for. What a step allocates and frees again (activations, the
workspace of Newton-Schulz steps, collectives' own buffers) is not here.
"""

from __future__ import annotations

from zslurm.checkpoint_tools import partition
from zslurm.train.config import ModelConfig, OptimConfig, ParallelConfig
from zslurm.train.parallel.buckets import MatrixSpace
from zslurm.train.parallel.route import Route, plan_route
from zslurm.train.parallel.topology import Topology
from zslurm.train.shapes import owned_table

ITEMSIZE = {"fp32": 4, "bf16": 2, "fp64": 8}
"""Bytes of an element in each of the formats that a configuration names."""

STAGES = 2
"""Buckets that are being reduced at once, if they have to be converted."""

CPU_NORM_ELEMENTS = 1 << 17
"""Elements of the gradient that a CPU squares in fp64 at a time.

They stay in its cache: one fp64 copy of a whole gradient took ten times as long, mostly for new pages. A GPU
copies nothing.
"""


def sharded_bytes(
    model: ModelConfig,
    optim: OptimConfig,
    parallel: ParallelConfig,
    world_size: int,
    position: int,
    *,
    bucket_bytes: float,
    topology: Topology | None = None,
) -> dict[str, int]:
    """Return the bytes of each buffer that a rank keeps for the whole run, in buckets of `bucket_bytes`.

    The rank is the one at `position` of the layout, which is its own number unless collectives are in two levels:
    those of `topology`.
    """
    table = owned_table(model, optim)
    layout = partition(table, world_size)
    weight = ITEMSIZE[parallel.dtype]
    gradient = 8 if weight == 8 else ITEMSIZE[parallel.gradient_dtype]
    reduced = 8 if weight == 8 else ITEMSIZE[parallel.reduce_dtype or parallel.gradient_dtype]
    master = max(weight, 4)
    space = MatrixSpace(table, layout, int(bucket_bytes / reduced))
    length = layout.flat_length + space.length
    chunk = layout.chunk(position)
    alone = world_size == 1
    return {
        "weights": length * weight,
        "gradients": length * gradient,
        "master weights": chunk * master,
        "reduced gradients": chunk * master + (0 if alone or reduced == master else layout.flat_share * reduced),
        "optimizer state": (chunk + layout.flat_share) * master,
        "exchange of matrices": sum(exchange_bytes(space, plan_route(space, position, topology), reduced, weight)),
        "staging": 0 if alone or reduced == gradient else stage_elements(space, layout.flat_length) * reduced,
        "between two levels": between_elements(space, layout.flat_length, topology) * reduced,
    }


def exchange_bytes(
    space: MatrixSpace, route: Route, gradient_itemsize: int, weight_itemsize: int
) -> tuple[int, int]:
    """Return bytes of the two packed buffers of the exchange (exchange.py).

    Of what is held, and of what is owned.
    """
    if space.ranks == 1:
        return 0, 0
    widest = max(gradient_itemsize, weight_itemsize)
    held = max(sum(piece.numel for piece in route.held), route.passed_on)
    owned = max(sum(piece.numel for piece in route.owned), route.passed_on)
    return held * widest, max(owned * widest, space.share * gradient_itemsize)


def between_elements(space: MatrixSpace, flat_length: int, topology: Topology | None) -> int:
    """Return the elements of the buffer between the two hops of reductions (two_level.py); 0 with one level."""
    return 0 if topology is None else max(STAGES * space.bucket, flat_length) // topology.local_size


def stage_elements(space: MatrixSpace, flat_length: int) -> int:
    """Return the elements of the staging buffer for gradients that are reduced in another format."""
    return max(STAGES * space.bucket, flat_length)
