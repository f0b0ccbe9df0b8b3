"""AdamW over this rank's flat chunk: torch's own fused AdamW, on views of the shard.

Every extent of the chunk is one parameter, in one of two groups: decayed matrices, undecayed vectors. Its moments
are views of two flat buffers, so a checkpoint writes three flat arrays. Elementwise throughout: the result does
not depend on how the elements are divided.

The function is called, not the class `torch.optim.AdamW`, which would import all of torch's compiler: a second
of every rank's start.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from train.config import OptimConfig
from train.parallel.zero import ZeroShards

STATES = ("master", "exp_avg", "exp_avg_sq")


@dataclass
class _Group:
    """Extents with the same decay: views of the flat buffers, in the order of the chunk."""

    weight_decay: float
    masters: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    exp_avgs: list[Tensor] = field(default_factory=list)
    exp_avg_sqs: list[Tensor] = field(default_factory=list)


class ShardedAdamW:
    """AdamW for one rank's chunk of master weights.

    Attributes:
        moments: exp_avg and exp_avg_sq of the chunk, flat, in the master weights' format.
        steps: optimizer steps taken.
    """

    def __init__(self, shards: ZeroShards, config: OptimConfig) -> None:
        """Set up zero moments."""
        self.shards, self.config = shards, config
        self.moments = {name: torch.zeros_like(shards.master) for name in STATES[1:]}
        self.steps = 0
        decay = {info.name: info.decay for info in shards.table}
        groups = {True: _Group(config.weight_decay), False: _Group(0.0)}
        for extent in shards.extents:
            group, here = groups[decay[extent.tensor]], extent.in_chunk
            group.masters.append(shards.master[here])
            group.gradients.append(shards.master_gradient[here])
            group.exp_avgs.append(self.moments["exp_avg"][here])
            group.exp_avg_sqs.append(self.moments["exp_avg_sq"][here])
        self._groups = [group for group in groups.values() if group.masters]

    def restore(self, steps: int) -> None:
        """Continue after `steps` steps; master weights and moments were filled by the caller."""
        self.steps = steps

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update the master weights from `master_gradient`."""
        device = self.shards.master.device
        for group in self._groups:
            adamw(
                group.masters,
                group.gradients,
                group.exp_avgs,
                group.exp_avg_sqs,
                max_exp_avg_sqs=[],
                # torch counts each of them up by itself
                state_steps=[torch.tensor(float(self.steps), device=device) for _ in group.masters],
                fused=True,
                amsgrad=False,
                beta1=self.config.betas[0],
                beta2=self.config.betas[1],
                lr=lr,
                weight_decay=group.weight_decay,
                eps=self.config.eps,
                maximize=False,
            )
        self.steps += 1

    def arrays(self) -> dict[str, Tensor]:
        """The flat chunk of every state, by name; they are the live tensors."""
        return {"master": self.shards.master, **self.moments}
