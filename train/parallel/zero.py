"""ZeRO-1: every rank holds all weights, and 1/N of the master weights and of the optimizer's state.

The protocol of one step, P parameters on N ranks:

    backward, per microbatch     each gradient is added to one flat buffer, in fp32 (or bf16, a setting)
    reduce_gradients             one reduce-scatter: rank r gets chunk r of the sum         P (N-1)/N elements
    the optimizer                updates chunk r of the fp32 master weights                 nothing
    gather_weights               master chunk rounded to the weights' format, all-gather    P (N-1)/N elements

Memory per parameter: 2 or 4 bytes of weights, 4 (2) of gradients, and (4 + optimizer state)/N. Who owns what is
`checkpoint_tools.partition`, the same function that checkpoints are written and read by.

What it does not do: overlap with backward, buckets, and whole-matrix owners; the reduce-scatter runs after the
last microbatch. gloo has no native reduce-scatter and sends what an all-reduce would.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from checkpoint_tools import Extent, partition
from train.shapes import TensorInfo

# torch 2.13 renamed both collectives.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class ZeroShards:
    """The flat buffers of a model, and this rank's chunk of them.

    Attributes:
        weights: all parameters, flat, in the model's format; the model's parameters are views of it.
        gradients: all gradients, flat; filled by backward.
        master: this rank's chunk of the weights in fp32 (fp64 for an fp64 model).
        master_gradient: this rank's chunk of the reduced gradient, in the same format.
        extents: what the chunk is made of.
    """

    def __init__(
        self,
        model: nn.Module,
        table: tuple[TensorInfo, ...],
        group: dist.ProcessGroup,
        gradient_dtype: torch.dtype,
    ) -> None:
        """Move the model's parameters into a flat buffer and take this rank's chunk of it."""
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.table = table
        self.layout = partition(table, self.world_size)
        self.extents: tuple[Extent, ...] = self.layout.extents(self.rank)
        parameters = dict(model.named_parameters())
        first = next(iter(parameters.values()))
        master_dtype = torch.promote_types(first.dtype, torch.float32)

        self.weights = torch.zeros(self.layout.length, dtype=first.dtype, device=first.device)
        sum_dtype = torch.float64 if first.dtype == torch.float64 else gradient_dtype
        self.gradients = torch.zeros(self.layout.length, dtype=sum_dtype, device=first.device)
        for place in self.layout.placements:
            parameter = parameters[place.name]
            here = slice(place.offset, place.offset + place.numel)
            self.weights[here].copy_(parameter.data.flatten())
            parameter.data = self.weights[here].view(parameter.shape)
            _accumulate_into(parameter, self.gradients[here].view(parameter.shape))
        self._mine = slice(self.rank * self.layout.chunk, (self.rank + 1) * self.layout.chunk)
        self.master = self.weights[self._mine].to(master_dtype, copy=True)
        self.master_gradient = torch.zeros_like(self.master)

    def zero_gradients(self) -> None:
        """Forget the gradients of the last step."""
        self.gradients.zero_()

    def reduce_gradients(self) -> None:
        """Sum the gradients over all ranks; this rank's chunk of the sum goes to `master_gradient`."""
        same = self.gradients.dtype == self.master_gradient.dtype
        mine = self.master_gradient if same else torch.empty_like(self.gradients[self._mine])
        _reduce_scatter(mine, self.gradients, group=self.group)
        if not same:
            self.master_gradient.copy_(mine)

    def clip_gradients(self, limit: float | None) -> Tensor:
        """Scale the reduced gradient down to a global norm of `limit`; returns the norm before that, a scalar."""
        total = self.master_gradient.double().square().sum()
        dist.all_reduce(total, group=self.group)
        norm = total.sqrt()
        if limit is not None:
            # A factor of exactly 1 changes no bit of a gradient that is short enough.
            self.master_gradient.mul_((limit / norm).clamp(max=1.0).to(self.master_gradient.dtype))
        return norm

    def gather_weights(self) -> None:
        """Round every rank's master chunk to the weights' format and collect all of them."""
        mine = self.master.to(self.weights.dtype)
        _all_gather(self.weights, mine, group=self.group)


def _accumulate_into(parameter: nn.Parameter, total: Tensor) -> None:
    """Add each gradient of `parameter` to `total` as backward finishes it, and free it."""

    def add(finished: Tensor) -> None:
        assert finished.grad is not None
        total.add_(finished.grad)
        finished.grad = None

    parameter.register_post_accumulate_grad_hook(add)
