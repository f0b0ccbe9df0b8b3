"""AdamW over flat elements: torch's own fused AdamW, on views of a rank's chunk.

Every extent is one parameter, in one of two groups: decayed matrices, undecayed vectors. Its moments are views of
two flat buffers, so a checkpoint writes three flat arrays. Elementwise throughout: the result does not depend on
how the elements are divided.

The function is called, not the class `torch.optim.AdamW`, which would import all of torch's compiler: a second
of every rank's start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from zslurm.checkpoint_tools import Extent
from zslurm.train.config import OptimConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class _Group:
    """Extents with the same decay: views of the flat buffers, in the order of the chunk."""

    weight_decay: float
    masters: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    exp_avgs: list[Tensor] = field(default_factory=list)
    exp_avg_sqs: list[Tensor] = field(default_factory=list)


class AdamW:
    """AdamW for flat master weights.

    Attributes:
        moments: exp_avg and exp_avg_sq, flat, in the master weights' format.
    """

    def __init__(
        self,
        master: Tensor,
        gradient: Tensor,
        extents: Iterable[Extent],
        decays: Mapping[str, bool],
        config: OptimConfig,
    ) -> None:
        """Set up zero moments for flat `master` and `gradient`, which are made of `extents` and padding.

        `decays` holds, by the name of a tensor, whether weight decay applies.
        """
        self.config, self._device = config, master.device
        self.moments = {name: torch.zeros_like(master) for name in MOMENTS}
        groups = {True: _Group(config.weight_decay), False: _Group(0.0)}
        for extent in extents:
            group, here = groups[decays[extent.tensor]], extent.in_chunk
            group.masters.append(master[here])
            group.gradients.append(gradient[here])
            group.exp_avgs.append(self.moments["exp_avg"][here])
            group.exp_avg_sqs.append(self.moments["exp_avg_sq"][here])
        self._groups = [group for group in groups.values() if group.masters]

    @torch.no_grad()
    def step(self, lr: float, steps: int) -> None:
        """Update the master weights from the gradient; `steps` were taken before this one."""
        for group in self._groups:
            adamw(
                group.masters,
                group.gradients,
                group.exp_avgs,
                group.exp_avg_sqs,
                max_exp_avg_sqs=[],
                # torch counts each of them up by itself
                state_steps=[torch.tensor(float(steps), device=self._device) for _ in group.masters],
                fused=True,
                amsgrad=False,
                beta1=self.config.betas[0],
                beta2=self.config.betas[1],
                lr=lr,
                weight_decay=group.weight_decay,
                eps=self.config.eps,
                maximize=False,
            )
