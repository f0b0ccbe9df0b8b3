"""AdamW over flat elements: torch's fused AdamW on views of a rank's chunk.

Every extent is one parameter, in one of two groups: decayed matrices, undecayed vectors. The moments are views of
two flat buffers, so a checkpoint writes three flat arrays. AdamW is elementwise: the result does not depend on how
the elements are divided among ranks.

The function of torch is called, not the class `torch.optim.AdamW`, which would import all of torch's compiler: a
second of every rank's start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from zslurm.checkpoint_tools import Extent
from zslurm.train.config import OptimConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class _Group:
    """Parameters with one weight decay, in lists of one length; `weights` are None if nothing is rounded."""

    weight_decay: float
    masters: list[Tensor]
    gradients: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    weights: list[Tensor] | None


class AdamW:
    """AdamW for flat master weights.

    Attributes:
        moments: exp_avg and exp_avg_sq, flat, in the master weights' format.
    """

    def __init__(
        self,
        master: Tensor,
        gradient: Tensor,
        extents: Sequence[Extent],
        decays: Mapping[str, bool],
        config: OptimConfig,
        weights: Tensor | None = None,
    ) -> None:
        """Set up zero moments for flat `master` and `gradient`, which are made of `extents` and padding.

        `decays` holds, by the name of a tensor, whether weight decay applies. `weights`, laid out like the
        masters, are rounded from them in each step.
        """
        self.config = config
        self.moments = {name: torch.zeros_like(master) for name in MOMENTS}
        buffers = (master, gradient, *self.moments.values())
        self._groups: list[_Group] = []
        for decayed, weight_decay in ((True, config.weight_decay), (False, 0.0)):
            slices = [extent.in_chunk for extent in extents if decays[extent.tensor] == decayed]
            if slices:
                masters, gradients, means, squares = ([buffer[part] for part in slices] for buffer in buffers)
                rounded = None if weights is None else [weights[part] for part in slices]
                self._groups.append(_Group(weight_decay, masters, gradients, means, squares, rounded))

    @torch.no_grad()
    def step(self, lr: float, steps: int) -> None:
        """Update the master weights from the gradient; `steps` were taken before this one."""
        for group in self._groups:
            steps_P = torch.full((len(group.masters),), float(steps), device=group.masters[0].device)
            adamw(
                group.masters,
                group.gradients,
                group.exp_avgs,
                group.exp_avg_sqs,
                max_exp_avg_sqs=[],
                state_steps=list(steps_P),  # torch adds 1 to each
                fused=True,
                amsgrad=False,
                beta1=self.config.betas[0],
                beta2=self.config.betas[1],
                lr=lr,
                weight_decay=group.weight_decay,
                eps=self.config.eps,
                maximize=False,
            )
            if group.weights is not None:
                torch._foreach_copy_(group.weights, group.masters)
