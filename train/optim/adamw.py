"""AdamW over flat elements: the operation `adamw` of zslurm.kernels, on views of a rank's chunk.

Every extent is one parameter, in one of two groups: decayed matrices, undecayed vectors. Its moments are views of
two flat buffers, so a checkpoint writes three flat arrays. Elementwise throughout: the result does not depend on
how the elements are divided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zslurm.checkpoint_tools import Extent
from zslurm.kernels import adamw as kernel
from zslurm.train.config import OptimConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


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
        # By weight decay: views of masters, gradients and both moments, in the order of the chunk.
        self._groups: list[tuple[float, kernel.Operands]] = []
        for decayed, weight_decay in ((True, config.weight_decay), (False, 0.0)):
            slices = [extent.in_chunk for extent in extents if decays[extent.tensor] == decayed]
            if slices:
                masters, gradients, means, squares = ([buffer[here] for here in slices] for buffer in buffers)
                rounded = None if weights is None else [weights[here] for here in slices]
                operands = kernel.Operands(masters, gradients, means, squares, rounded)
                self._groups.append((weight_decay, operands))

    @torch.no_grad()
    def step(self, lr: float, steps: int) -> None:
        """Update the master weights from the gradient; `steps` were taken before this one."""
        for weight_decay, operands in self._groups:
            kernel.update(
                operands,
                lr=lr,
                betas=self.config.betas,
                eps=self.config.eps,
                weight_decay=weight_decay,
                step=steps + 1,
            )
