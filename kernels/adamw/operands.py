"""Hold the tensors of AdamW's step: checked once, for they are the same in every step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from zslurm.kernels import check_lists


@dataclass(frozen=True, eq=False)
class Operands:
    """Tensors of a model, in lists of the same length and shapes.

    Attributes:
        masters: fp32 or fp64, at least one; updated.
        gradients: in the masters' format; left alone.
        exp_avgs: first moments, in the masters' format; updated.
        exp_avg_sqs: second moments, likewise.
        weights: in any format, rounded from the masters; or None.
        elements: how many there are in each list.

    Making one raises ValueError for lists that do not match, mixed formats or devices, and shared memory.
    """

    masters: list[Tensor]
    gradients: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    weights: list[Tensor] | None = None
    elements: int = field(init=False)

    def __post_init__(self) -> None:
        if not self.masters:
            raise ValueError("adamw: there are no masters")
        states = {"masters": self.masters, "exp_avgs": self.exp_avgs, "exp_avg_sqs": self.exp_avg_sqs}
        in_one_format = {**states, "gradients": self.gradients}
        out = {"weights": self.weights} if self.weights is not None else {}
        check_lists.same_shapes("adamw", in_one_format | out)
        check_lists.one_device("adamw", in_one_format | out)
        check_lists.one_dtype("adamw", (torch.float32, torch.float64), in_one_format)
        check_lists.disjoint("adamw", states | out, {"gradients": self.gradients})
        object.__setattr__(self, "elements", sum(master.numel() for master in self.masters))
