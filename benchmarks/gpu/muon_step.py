"""A Muon step of what one of 64 ranks owns of zaya1-8b, against torch's own and a compiled batched one.

The rank with most Newton-Schulz steps to take. Peers on the same shapes: `torch.optim.Muon`, one matrix at a time,
and the best that a few lines give: all matrices of a shape stacked, and the iteration under torch.compile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models import recipe
from zslurm.checkpoint_tools import partition
from zslurm.kernels.harness.timing import medians
from zslurm.train.config import OptimConfig
from zslurm.train.optim.muon import MatrixBatch, Muon
from zslurm.train.optim.newton_schulz import coefficient_schedule
from zslurm.train.shapes import owned_table

RANKS = 64
LR = 1e-3
_SAMPLES = 5


def rows(device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the times of ours and of each peer, with the matrices that they updated."""
    small = device.type == "cpu"
    shapes = [(2, 64, 96), (1, 96, 64)] if small else shares(RANKS)
    config = OptimConfig()
    batches = [_batch(shape, device, seed) for seed, shape in enumerate(shapes)]
    ours = Muon(batches, config.muon, config.weight_decay)
    torchs, compiled = _torchs(batches, config), _Compiled(batches, config, on_gpu=not small)
    peers: dict[str, Callable[[], object]] = {
        "torch.optim.Muon": torchs.step,
        "compiled, batched" if not small else "batched": compiled.step,  # compiling takes longest: last
    }
    for name, peer in peers.items():
        seconds = medians({"ours": lambda: ours.step(LR), name: peer}, device, samples=_SAMPLES)
        yield {
            "what": "Muon step" + ("" if small else f" of zaya1-8b's largest share at {RANKS} ranks"),
            "matrices": [list(shape) for shape in shapes],
            "peer": name,
            "seconds": seconds["ours"],
            "peer_s": seconds[name],
            "ratio": seconds[name] / seconds["ours"],
        }


def shares(ranks: int) -> list[tuple[int, int, int]]:
    """Return [count, rows, columns] of the matrices of the rank that has most to do."""
    layout = partition(owned_table(recipe("zaya1-8b"), OptimConfig()), ranks)
    busiest = max(range(ranks), key=layout.matrix_cost)
    return [(batch.count, batch.rows, batch.columns) for batch in layout.batches(busiest)]


def _batch(shape: tuple[int, int, int], device: torch.device, seed: int) -> MatrixBatch:
    generator = torch.Generator(device).manual_seed(seed)
    master, gradient = (torch.randn(shape, generator=generator, device=device) for _ in range(2))
    return MatrixBatch(master, gradient, torch.zeros_like(master))


def _torchs(batches: list[MatrixBatch], config: OptimConfig) -> Any:
    parameters = []
    for batch in batches:
        for master, gradient in zip(batch.master_KMN.unbind(), batch.gradient_KMN.unbind(), strict=True):
            parameter = nn.Parameter(master.clone())
            parameter.grad = gradient
            parameters.append(parameter)
    return torch.optim.Muon(
        parameters,
        lr=LR,
        weight_decay=config.weight_decay,
        momentum=config.muon.momentum,
        nesterov=config.muon.nesterov,
        ns_steps=config.muon.steps,
        adjust_lr_fn=config.muon.scale,
    )


class _Compiled:
    """All matrices of a shape at once, by compiled lines of torch; on a CPU not compiled."""

    def __init__(self, batches: list[MatrixBatch], config: OptimConfig, *, on_gpu: bool) -> None:
        self.states = [
            [batch.master_KMN.clone(), batch.gradient_KMN, batch.momentum_KMN.clone()] for batch in batches
        ]
        self.config = config
        self.schedule = coefficient_schedule(config.muon.coefficients, config.muon.steps)
        self.update: Callable[..., None] = self._update
        if on_gpu:  # for every shape on its own, which is fastest, however many there are
            torch._dynamo.config.recompile_limit = max(8, len(batches))
            self.update = torch.compile(self._update, dynamic=False)

    @torch.no_grad()
    def step(self) -> None:
        for master, gradient, momentum in self.states:
            self.update(master, gradient, momentum)

    def _update(self, master: Tensor, gradient: Tensor, momentum: Tensor) -> None:
        muon = self.config.muon
        momentum.lerp_(gradient, 1 - muon.momentum)
        x = gradient.lerp(momentum, muon.momentum).bfloat16()
        tall = x.shape[1] > x.shape[2]
        x = x.mT if tall else x
        x = x / x.float().norm(dim=(1, 2), keepdim=True).clamp(min=1e-7).bfloat16()
        for a, b, c in self.schedule:
            square = x @ x.mT
            polynomial = torch.baddbmm(square, square, square, beta=b, alpha=c)
            x = torch.baddbmm(x, polynomial, x, beta=a)
        x = x.mT if tall else x
        scale = 0.2 * max(master.shape[1:]) ** 0.5
        master.mul_(1 - LR * self.config.weight_decay).sub_(x * (LR * muon.lr_factor * scale))
