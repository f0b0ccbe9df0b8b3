"""ZeRO-1: every rank holds all weights, and 1/N of the master weights and of the optimizer's state.

Who owns what is `checkpoint_tools.partition`, the same function that checkpoints are written and read by: vectors,
convolutions and the embedding in equal flat shares, each matrix of Muon whole. The protocol of one step, with P
parameters on N ranks, of which P_M are in matrices:

    backward, per microbatch   each gradient is added to a buffer as it is finished, in fp32 (or bf16, a setting)
      of the last microbatch   full buckets of matrices are reduce-scattered meanwhile        P_M (N-1)/N elements
    reduce_gradients           the rest of the buckets; the flat space in one reduce-scatter    (P - P_M) (N-1)/N
                               one all-to-all: what a rank holds of matrices goes to owners     P_M/N
    the optimizer              updates this rank's chunk of the master weights                  nothing
                               and on GPUs writes the weights rounded from it, packed to be sent
    start_gathering            masters rounded if they were not yet, one all-to-all back     P_M/N
      under the next forward   all-gather: the flat space, then bucket by bucket, first layers first  P (N-1)/N
    wait_for_weights           before a layer runs, for the buckets that it has weights in      nothing

so 2 (N-1)/N P elements and 2 P_M/N more, the gradients in `reduce_dtype`, the weights in their own. The flat space
comes last because the embedding is in it, whose gradient (it is the head as well) is finished last of all.

Every rank makes the same collectives in the same order: bucket after bucket, whatever order gradients come in, and
also if a rank has no microbatch. No other collective of the group may come between the first backward of a step
and the end of `reduce_gradients`, which waits for every gather that forward did not wait for (a rank without a
microbatch runs no forward): a gather that failed raises there at the latest. Sums over ranks are the only thing
that depends on their number.

With two levels (two_level.py) each of these collectives is made inside the nodes and along the rails, and each
all-to-all in two hops. Which chunk a rank has is then its position in the layout (topology.py); nothing else
differs.

Memory per parameter: 2 or 4 bytes of weights, 4 (2) of gradients, and for 1/N of the parameters 4 of masters, 4 of
their gradient, the optimizer's state, and for matrices 8 of the exchange. All is allocated once; memory.py has the
exact numbers. Reducing in another format than accumulating takes a staging buffer of two buckets, or of the flat
space if that is larger; two levels of L ranks a node take 1/L of that. On one rank there is nothing to hold or
exchange.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zslurm.checkpoint_tools import Batch, Extent, partition
from zslurm.train.parallel.buckets import MatrixSpace
from zslurm.train.parallel.comm import DONE, Comm, Handle
from zslurm.train.parallel.exchange import Exchange
from zslurm.train.parallel.levels import Levels
from zslurm.train.parallel.memory import CPU_NORM_ELEMENTS, STAGES, between_elements, stage_elements
from zslurm.train.parallel.two_level import TwoLevel
from zslurm.train.shapes import TensorInfo

_NOWHERE = 2**62
_FLAT = -1
"""The flat space, among the numbers of the buckets."""


@dataclass
class _Place:
    """A parameter's gradient in the buffer, and how far it has come in this step."""

    name: str
    total: Tensor  # the sum so far, a view of the buffer
    buckets: range  # the buckets that it has elements in; none if it is flat
    added: int = 0  # backward passes that added to it
    begun: bool = False  # whether the sum is of this step, because something was added to it


class ZeroShards:
    """The flat buffers of a model, and this rank's chunk of them.

    Attributes:
        weights: all parameters, flat, in the model's format, first the flat space, then the matrix space; the
            model's parameters are views of it.
        gradients: all gradients of this rank, laid out like the weights; kept until the next step.
        master: this rank's chunk of the weights in fp32 (fp64 for an fp64 model).
        master_gradient: this rank's chunk of the reduced gradient, in the same format.
        flat_weights: this rank's share of the flat space's weights, laid out like the chunk's first elements.
        position: the number of this rank's chunk in the layout: its rank, unless collectives are in two levels.
        extents: what the chunk is made of.
        reduce_dtype: the format in which gradients are summed over ranks.
        comm: the ranks, and the bytes that were sent.
    """

    def __init__(
        self,
        model: nn.Module,
        table: tuple[TensorInfo, ...],
        group: dist.ProcessGroup,
        *,
        levels: Levels | None = None,
        gradient_dtype: torch.dtype = torch.float32,
        reduce_dtype: torch.dtype | None = None,
        bucket_bytes: float = 64 << 20,
        overlap: bool = True,
        weights_memory: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Move the model's parameters into a flat buffer and take this rank's chunk of it.

        The gradients of microbatches are added up in `gradient_dtype`, and summed over ranks in `reduce_dtype`
        (by default the same; fp64 for an fp64 model), with `overlap` during the last backward of a step.
        `bucket_bytes` is the size of one reduction of matrices, rounded down to whole elements for every rank.
        `table` is from `train.shapes.owned_table`. With `levels`, collectives are in two levels.
        The weights are allocated inside of `weights_memory()`.
        """
        parameters = dict(model.named_parameters())
        first = next(iter(parameters.values()))
        device, exact = first.device, first.dtype == torch.float64
        self._topology = None if levels is None else levels.topology
        self.comm = Comm(group) if levels is None else TwoLevel(group, levels, device)
        self.rank, self.world_size, self.position = self.comm.rank, self.comm.size, self.comm.position
        self.table, self.overlap = table, overlap
        self.layout = partition(table, self.world_size)
        self.extents: tuple[Extent, ...] = self.layout.extents(self.position)
        self._sum_dtype = torch.float64 if exact else gradient_dtype
        self.reduce_dtype = torch.float64 if exact else reduce_dtype or gradient_dtype
        self._space = MatrixSpace(table, self.layout, int(bucket_bytes / self.reduce_dtype.itemsize))
        self._buckets = self._space.buckets if self.world_size > 1 else ()  # one rank has nothing to reduce

        length = self.layout.flat_length + self._space.length
        with weights_memory():
            self.weights = torch.zeros(length, dtype=first.dtype, device=device)
        self.gradients = torch.zeros(length, dtype=self._sum_dtype, device=device)
        master_dtype = torch.promote_types(first.dtype, torch.float32)
        self.master = torch.zeros(self.layout.chunk(self.position), dtype=master_dtype, device=device)
        self.master_gradient = torch.zeros_like(self.master)
        self._named, self._parameters = parameters, tuple(parameters.values())
        self._hooks: list[RemovableHandle] = []
        self._places = self._adopt(parameters)
        self._take_masters(parameters)
        self._allocate_reduction()

        self._backwards = 0
        self._next_bucket = 0
        self._missing = [0] * len(self._buckets)  # of each bucket, the tensors whose gradients are not finished
        self._handles: list[Handle] = []
        self._gathers: dict[int, Handle] = {}  # under way, by the number of the bucket
        self._gathers_of: dict[str, tuple[int, ...]] = {}  # what a module has weights in, as far as it was asked

    # ---------------------------------------------------------------------------------------------- one step

    def begin_step(self, backwards: int) -> None:
        """Forget the gradients of the last step; `backwards` passes of this rank will make the next ones."""
        self._backwards, self._next_bucket = backwards, 0
        self._missing = [0] * len(self._buckets)
        for accumulation in self._places:
            accumulation.added, accumulation.begun = 0, False
            for number in accumulation.buckets:
                self._missing[number] += 1

    def adder(self, name: str) -> Callable[[Tensor], None] | None:
        """Return what adds a part of a parameter's gradient to its sum, without autograd's rounding.

        To be called in backward, before autograd has finished what else the gradient is made of. None if
        autograd's gradients have the format of the sums: then they are not rounded.

        Args:
            name: of the parameter.
        """
        accumulation = next(candidate for candidate in self._places if candidate.name == name)
        if accumulation.total.dtype == self.weights.dtype:
            return None
        return lambda gradient: _add(accumulation, gradient)

    def gradient_sum(self, name: str) -> GradientSum:
        """Return the sum of a parameter's gradients, for a backward pass that adds to it by itself."""
        return GradientSum(self, next(candidate for candidate in self._places if candidate.name == name))

    def reduce_gradients(self) -> None:
        """Sum the gradients over all ranks; this rank's chunk of the sum goes to `master_gradient`."""
        self.wait_for_weights()
        for accumulation in self._places:
            if not accumulation.begun:
                accumulation.total.zero_()
        while self._next_bucket < len(self._buckets):
            self._reduce_next_bucket()
        flat = self._reduce_flat()
        for handle in (*self._handles, flat):
            handle.wait()
        self._handles.clear()
        self._exchange.to_owners(self._held_gradients, self._owned_gradients)
        if self._flat_sum is not self._flat_gradient:
            self._flat_gradient.copy_(self._flat_sum)

    def reduce_again(self) -> None:
        """Repeat the sum of the same gradients over all ranks, in the same way."""
        self._next_bucket = 0
        self.reduce_gradients()

    def gradient_norm(self) -> Tensor:
        """Return the norm of the reduced gradient over all ranks, an fp64 scalar.

        Not finite if any element is not.
        """
        on_cpu = self.master.device.type == "cpu"
        total = (_squares_in_cache if on_cpu else squares_in_one_pass)(self.master_gradient)
        self.comm.all_reduce(total)
        return total.sqrt()

    def scale_gradients(self, factor: Tensor | float) -> None:
        """Multiply the reduced gradient by a number that is the same on all ranks."""
        self.master_gradient.mul_(factor)

    def clip_gradients(self, limit: float | None) -> Tensor:
        """Scale the reduced gradient down to a global norm of `limit`; returns the norm before that, a scalar."""
        norm = self.gradient_norm()
        if limit is not None:
            # A factor of exactly 1 changes no bit of a gradient that is short enough.
            self.scale_gradients((limit / norm).clamp(max=1.0).to(self.master_gradient.dtype))
        return norm

    def first_nonfinite(self) -> tuple[str, int] | None:
        """Return the parameter whose own gradient was the first to be infinite or NaN, and on which rank.

        First in the order of backward, then by rank; None if the gradients of all ranks were finite and only
        their sum is not. It looks at the gradients before the reduction, which are kept, and reads all of them:
        to be asked, by all ranks, when the norm is not finite.
        """
        bad_index = next(
            (i for i, accumulation in enumerate(self._places) if not accumulation.total.isfinite().all()), None
        )
        code = _NOWHERE if bad_index is None else bad_index * self.world_size + self.rank
        first = torch.tensor(code, dtype=torch.int64, device=self.master.device)
        self.comm.all_reduce(first, dist.ReduceOp.MIN)
        index, rank = divmod(int(first.item()), self.world_size)
        return None if index >= len(self._places) else (self._places[index].name, rank)

    def totals(self) -> list[tuple[str, Tensor]]:
        """Return this rank's sum of each gradient by the parameter's name, as far as it is added up.

        In the order of backward; without elements if nothing was added.
        """
        return [
            (summed.name, summed.total if summed.begun else summed.total.new_zeros(0)) for summed in self._places
        ]

    def buckets_of_weights(self) -> list[Tensor]:
        """Return the weights of the flat space and of each bucket; all of them must be there."""
        matrices = self.weights[self.layout.flat_length :]
        buckets = [matrices[bucket.start : bucket.stop] for bucket in self._buckets]
        return [self.weights[: self.layout.flat_length], *buckets]

    def weights_by_owner(self) -> list[list[Tensor]]:
        """Return for each rank views of the weights that it owns, in the order of its chunk; without padding."""
        owned = [self.layout.extents(self.position_of(rank)) for rank in range(self.world_size)]
        return [
            [self._named[extent.tensor].data.flatten()[extent.start : extent.stop] for extent in extents]
            for extents in owned
        ]

    def unlike_masters(self) -> str | None:
        """Return the name of the first parameter whose weights are not the rounded masters of this rank."""
        for extent in self.extents:
            rounded = self.master[extent.in_chunk].to(self.weights.dtype)
            if not torch.equal(self._named[extent.tensor].data.flatten()[extent.start : extent.stop], rounded):
                return extent.tensor
        return None

    def gather_weights(self) -> None:
        """Round every rank's masters to the weights' format and collect all of them."""
        self.start_gathering()
        self.wait_for_weights()

    def start_gathering(self, *, rounded: bool = False) -> None:
        """Begin to collect the weights of all ranks; nothing may read any of them before `wait_for_weights`.

        With `rounded` the optimizer has rounded them: `flat_weights`, and on one rank `matrix_weights`, on
        several `packed_weights`.
        """
        self.wait_for_weights()
        if not rounded:
            self.flat_weights.copy_(self.master[: self.layout.flat_share])
        flat = self.weights[: self.layout.flat_length]
        self._keep(_FLAT, self.comm.all_gather(flat, self.flat_weights))
        if not rounded or self.world_size > 1:
            self._exchange.to_holders(self._owned_masters, self._held_weights, packed=rounded)
        matrices = self.weights[self.layout.flat_length :]
        # What the next forward uses first was the last to get its gradient.
        for number, bucket in reversed(tuple(enumerate(self._buckets))):
            held = matrices[bucket.held(self.position)]
            self._keep(number, self.comm.all_gather(matrices[bucket.start : bucket.stop], held))

    def is_gathering(self, module: str | None = None) -> bool:
        """Return whether `wait_for_weights` would have to wait for a collective."""
        return any(number in self._gathers for number in self._needed(module))

    def wait_for_weights(self, module: str | None = None) -> None:
        """Wait until the weights of a module, named as in `named_modules`, are here; by default all weights.

        On a GPU the current stream waits, not the host. A gather that failed raises, here and whenever it is
        waited for again.
        """
        for number in self._needed(module):
            if number in self._gathers:
                self._gathers[number].wait()
                del self._gathers[number]

    def packed_weights(self, batch: Batch) -> tuple[tuple[Tensor, ...], ...]:
        """Return the buffers, in pieces, with the weights of a batch's matrices for the ranks that hold them.

        Of each matrix, in the batch's order, the pieces in the order of its elements. They may be written between
        `reduce_gradients`, which uses this memory, and `start_gathering`, which sends it if its caller passes
        `rounded`. For several ranks.
        """
        owned = zip(self._exchange.owned, self._exchange.weights_to_send(), strict=True)
        pieces = sorted(((piece.offset, packed) for piece, packed in owned), key=lambda pair: pair[0])
        starts = [offset for offset, _ in pieces]
        first = [batch.offset + number * batch.stride for number in range(batch.count)]
        ends = [offset + batch.rows * batch.columns for offset in first]
        return tuple(
            tuple(packed for _, packed in pieces[bisect_left(starts, start) : bisect_left(starts, end)])
            for start, end in zip(first, ends, strict=True)
        )

    def matrix_weights(self, batch: Batch) -> list[Tensor]:
        """Return views [k, m, n] of the weights of a batch's matrices, in its order, as few as strides allow.

        For one rank: of several each holds parts of them.
        """
        starts = {piece.offset: piece.start for piece in self._space.owned_by(self.position)}
        matrices = self.weights[self.layout.flat_length :]
        first = [starts[batch.offset + number * batch.stride] for number in range(batch.count)]
        return [
            matrices.as_strided(
                (len(run), batch.rows, batch.columns),
                (run[1] - run[0] if len(run) > 1 else batch.rows * batch.columns, batch.columns, 1),
                matrices.storage_offset() + run[0],
            )
            for run in _even_runs(first)
        ]

    def _keep(self, number: int, gather: Handle) -> None:
        if gather is not DONE:
            self._gathers[number] = gather

    def _needed(self, module: str | None) -> tuple[int, ...]:
        """Return the numbers of the gathers that a module's weights come with, in the order of their start."""
        if module is None or not self._gathers:
            return tuple(self._gathers)
        if module not in self._gathers_of:
            buckets = {
                number
                for tensor in self._space.placements
                if self._buckets and tensor.name.startswith(f"{module}.")
                for number in self._space.buckets_of(tensor)
            }
            self._gathers_of[module] = (_FLAT, *sorted(buckets, reverse=True))
        return self._gathers_of[module]

    # ------------------------------------------------------------------------------------- after a lost rank

    def abandon(self) -> None:
        """Forget the collectives that are under way, once they have ended, and gradients that were not added."""
        for handle in (*self._handles, *self._gathers.values()):
            with suppress(RuntimeError):  # its peer is gone
                handle.wait()
        self._handles.clear()
        self._gathers.clear()
        for parameter in self._parameters:
            parameter.grad = None

    def release(self) -> None:
        """Let go of the model, so that it can be divided again, over another number of ranks; see `abandon`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def position_of(self, rank: int) -> int:
        """Return the number of a rank's chunk in the layout."""
        return rank if self._topology is None else self._topology.position(rank)

    def regroup(self, group: dist.ProcessGroup, levels: Levels | None) -> None:
        """Continue over a new group of as many ranks, this one at the same place; see `abandon`."""
        self.comm.regroup(group, levels)

    # -------------------------------------------------------------------------------------------- the buffers

    def _adopt(self, parameters: dict[str, nn.Parameter]) -> list[_Place]:
        """Make the parameters views of `weights`, and collect their gradients; places in the order of backward."""
        matrices = self._space.placements
        starts = {tensor.name: tensor.offset for tensor in self.layout.placements}
        starts |= {tensor.name: self.layout.flat_length + tensor.offset for tensor in matrices}
        buckets = {tensor.name: self._space.buckets_of(tensor) for tensor in matrices if self._buckets}
        places = []
        for row in reversed(self.table):
            parameter = parameters[row.name]
            values_of = slice(starts[row.name], starts[row.name] + row.numel)
            self.weights[values_of].copy_(parameter.data.flatten())
            parameter.data = self.weights[values_of].view(parameter.shape)
            total = self.gradients[values_of].view(parameter.shape)
            accumulation = _Place(row.name, total, buckets.get(row.name, range(0)))
            self._collect(parameter, accumulation)
            places.append(accumulation)
        return places

    def _take_masters(self, parameters: dict[str, nn.Parameter]) -> None:
        for extent in self.extents:
            values = parameters[extent.tensor].data.flatten()
            self.master[extent.in_chunk].copy_(values[extent.start : extent.stop])

    def _allocate_reduction(self) -> None:
        """Allocate the buffers between the gradients and the owners, and all views that a step needs."""
        length, share = self.layout.flat_length, self.layout.flat_share
        device, alone = self.master.device, self.world_size == 1
        self.flat_weights = self.weights[self.position * share : (self.position + 1) * share]
        self._flat_gradient = self.master_gradient[:share]
        same = alone or self.reduce_dtype == self.master_gradient.dtype
        self._flat_sum = (
            self._flat_gradient if same else torch.empty(share, dtype=self.reduce_dtype, device=device)
        )
        converts = not alone and self.reduce_dtype != self._sum_dtype
        staged = stage_elements(self._space, length) if converts else 0
        self._stage = torch.empty(staged, dtype=self.reduce_dtype, device=device)

        between = between_elements(self._space, length, self._topology)
        self.comm.reserve(torch.empty(between, dtype=self.reduce_dtype, device=device))
        self._exchange = Exchange(
            self._space,
            self.comm,
            device,
            gradients=self.reduce_dtype,
            weights=self.weights.dtype,
            topology=self._topology,
        )
        held, owned = self._exchange.held, self._exchange.owned
        matrices = slice(length, None)
        self._held_gradients = (
            _views(self.gradients[matrices], [(piece.start, piece.numel) for piece in held])
            if alone
            else _views(self._exchange.share, [(piece.in_share, piece.numel) for piece in held])
        )
        self._held_weights = _views(self.weights[matrices], [(piece.start, piece.numel) for piece in held])
        self._owned_gradients = _views(self.master_gradient, [(piece.offset, piece.numel) for piece in owned])
        self._owned_masters = _views(self.master, [(piece.offset, piece.numel) for piece in owned])

    # ----------------------------------------------------------------------------------------- the reductions

    def _collect(self, parameter: nn.Parameter, place: _Place) -> None:
        """Add each gradient of `parameter` to its place as backward finishes it, and free it."""

        def add(finished: Tensor) -> None:
            if finished.grad is None:  # backward has added to the sum by itself: torch calls hooks all the same
                return
            self._expect(place)
            _add(place, finished.grad)
            finished.grad = None
            self._added(place)

        self._hooks.append(parameter.register_post_accumulate_grad_hook(add))

    def _expect(self, place: _Place) -> None:
        assert place.added < self._backwards, f"{place.name}: more backward passes than begin_step announced"

    def _added(self, place: _Place) -> None:
        """Note a gradient of one backward pass. After the last, reduce what is complete, in the buckets' order."""
        place.added += 1
        if place.added < self._backwards:
            return
        for number in place.buckets:
            self._missing[number] -= 1
        while self.overlap and self._next_bucket < len(self._buckets) and not self._missing[self._next_bucket]:
            self._reduce_next_bucket()

    def _reduce_next_bucket(self) -> None:
        number = self._next_bucket
        self._next_bucket += 1
        bucket, start = self._buckets[number], self.layout.flat_length
        gradients = self.gradients[start + bucket.start : start + bucket.stop]
        if len(self._stage):
            if number >= STAGES:
                self._handles[number - STAGES].wait()
            slot = number % STAGES * self._space.bucket
            gradients = self._stage[slot : slot + len(gradients)].copy_(gradients)
        first = bucket.start // self.world_size
        held = self._exchange.share[first : first + bucket.chunk]
        self._handles.append(self.comm.reduce_scatter(held, gradients))

    def _reduce_flat(self) -> Handle:
        gradients = self.gradients[: self.layout.flat_length]
        if len(self._stage):
            for handle in self._handles[-STAGES:]:
                handle.wait()
            gradients = self._stage[: len(gradients)].copy_(gradients)
        return self.comm.reduce_scatter(self._flat_sum, gradients)


class GradientSum:
    """The sum of one parameter's gradients, which a backward pass adds to by itself, in the sum's format.

    Autograd then gets no gradient of the parameter.
    """

    def __init__(self, shards: ZeroShards, place: _Place) -> None:
        self._shards, self._place = shards, place

    def begin(self) -> tuple[Tensor, bool]:
        """Return the sum, and whether it has gradients of this step, to which others are added."""
        self._shards._expect(self._place)
        adds, self._place.begun = self._place.begun, True
        return self._place.total, adds

    def end(self) -> None:
        """Note that the gradient of one backward pass was added."""
        self._shards._added(self._place)


def squares_in_one_pass(gradient: Tensor) -> Tensor:
    """Return the sum of squares as an fp64 scalar, for which a GPU reads each element once.

    `torch.linalg.vector_norm` with `dtype=torch.float64` copies fp32 to fp64 first, on GPUs as well: its reduction
    widens only 16-bit elements (torch's ReduceOpsUtils.h). The list form loads fp32 and adds in fp64
    (foreach_reduce.cuh, torch 2.9 to 2.13).
    """
    (norm,) = torch._foreach_norm([gradient], 2, dtype=torch.float64)
    return norm.square()


def _squares_in_cache(gradient: Tensor) -> Tensor:
    """Return the same on a CPU, where the list form would copy."""
    total = torch.zeros((), dtype=torch.float64)
    for part in gradient.split(CPU_NORM_ELEMENTS):
        total += part.double().square().sum()
    return total


def _add(place: _Place, gradient: Tensor) -> None:
    """Add a gradient to a sum, in the sum's format."""
    if place.begun:
        place.total.add_(gradient)
    else:
        place.total.copy_(gradient)
    place.begun = True


def _views(buffer: Tensor, ranges: Sequence[tuple[int, int]]) -> list[Tensor]:
    return [buffer[start : start + numel] for start, numel in ranges]


def _even_runs(starts: Sequence[int]) -> list[list[int]]:
    """Cut numbers into runs that each ascend in equal steps."""
    runs: list[list[int]] = []
    for start in starts:
        run = runs[-1] if runs else []
        ascends = bool(run) and start > run[-1]
        if ascends and (len(run) == 1 or start - run[-1] == run[1] - run[0]):
            run.append(start)
        else:
            runs.append([start])
    return runs
