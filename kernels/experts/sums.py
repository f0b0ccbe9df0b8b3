"""Add the gradients of the experts' matrices to sums of the caller's: they are neither kept nor rounded."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from zslurm.kernels.grouped_gemm import Groups, add_weight_gradient, weight_gradient


class WeightSum(Protocol):
    """The sum of one weight's gradients."""

    def begin(self) -> tuple[Tensor, bool]:
        """Return the tensor, and whether to add to what is in it."""
        ...

    def end(self) -> None:
        """Note that the gradient of one backward pass is in the sum."""
        ...


class ExpertSums(NamedTuple):
    """The sums of both tensors of an expert network."""

    gate_up: WeightSum
    down: WeightSum


def gradient_or_sum(left_NI: Tensor, right_NO: Tensor, groups: Groups, sum_of: WeightSum | None) -> Tensor | None:
    """Return left transposed by right over the rows of each group; None if there is a sum, which gets it."""
    if sum_of is None:
        return weight_gradient(left_NI, right_NO, groups)
    total_EIO, adds = sum_of.begin()
    add_weight_gradient(left_NI, right_NO, groups, total_EIO, adds)
    sum_of.end()
    return None
