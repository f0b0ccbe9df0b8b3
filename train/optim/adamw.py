"""AdamW over this rank's flat chunk: torch's own optimizer, on views of the shard.

Every extent of the chunk is one parameter of `torch.optim.AdamW` (fused), in one of two groups: decayed
matrices, undecayed vectors. Its moments are views of two flat buffers, so a checkpoint writes three flat arrays.
Elementwise throughout: the result does not depend on how the elements are divided.
"""

from __future__ import annotations

import torch
from torch import Tensor

from train.config import OptimConfig
from train.parallel.zero import ZeroShards

STATES = ("master", "exp_avg", "exp_avg_sq")


class ShardedAdamW:
    """AdamW for one rank's chunk of master weights.

    Attributes:
        moments: exp_avg and exp_avg_sq of the chunk, flat, in the master weights' format.
        steps: optimizer steps taken.
    """

    def __init__(self, shards: ZeroShards, config: OptimConfig) -> None:
        """Set up zero moments."""
        self.shards = shards
        self.moments = {name: torch.zeros_like(shards.master) for name in STATES[1:]}
        self.steps = 0
        decay = {info.name: info.decay for info in shards.table}
        groups: dict[bool, list[Tensor]] = {True: [], False: []}
        self._views: list[tuple[Tensor, slice]] = []
        for extent in shards.extents:
            view = shards.master[extent.in_chunk]
            view.grad = shards.master_gradient[extent.in_chunk]
            groups[decay[extent.tensor]].append(view)
            self._views.append((view, extent.in_chunk))
        self._optimizer: torch.optim.AdamW | None = None
        if self._views:  # a rank whose chunk is all padding owns nothing
            self._optimizer = torch.optim.AdamW(
                [
                    {"params": groups[True], "weight_decay": config.weight_decay},
                    {"params": groups[False], "weight_decay": 0.0},
                ],
                lr=0.0,
                betas=config.betas,
                eps=config.eps,
                fused=True,
            )
        self._attach()

    def _attach(self) -> None:
        if self._optimizer is None:
            return
        for view, here in self._views:
            self._optimizer.state[view] = {
                "step": torch.tensor(float(self.steps), device=view.device),
                **{name: moment[here] for name, moment in self.moments.items()},
            }

    def restore(self, steps: int) -> None:
        """Continue after `steps` steps; master weights and moments were filled by the caller."""
        self.steps = steps
        self._attach()

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update the master weights from `master_gradient`."""
        self.steps += 1
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()

    def arrays(self) -> dict[str, Tensor]:
        """The flat chunk of every state, by name; they are the live tensors."""
        return {"master": self.shards.master, **self.moments}
