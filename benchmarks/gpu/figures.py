"""Compare operations with what is no implementation of them: one dense product, torch.compile, fp32.

The operation is what a caller gets: dispatch chooses. On a CPU nothing is compiled, for that takes minutes there:
the peers of the passes run as torch runs them, and the figures only show that the program works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zslurm.kernels import head, muon
from zslurm.kernels.case import drawn
from zslurm.kernels.grouped_gemm import Groups, multiply
from zslurm.kernels.grouped_gemm.cases import ends_of
from zslurm.kernels.harness.timing import medians, triad
from zslurm.kernels.residual_norm import residual_norm
from zslurm.kernels.symmetric_product import symmetric_product


@dataclass(frozen=True)
class Figure:
    """One comparison.

    Attributes:
        what: is compared, with sizes.
        peer: against what.
        seconds: of one call of ours; peer_s: of the peer's.
        share_of_triad: bytes that ours moves at least, over what the triad moves in that time; None for products.
    """

    what: str
    peer: str
    seconds: float
    peer_s: float
    share_of_triad: float | None = None

    @property
    def ratio(self) -> float:
        """Return how many times as long the peer takes."""
        return self.peer_s / self.seconds


def all_figures(device: torch.device, *, small: bool) -> Iterator[Figure]:
    """Yield every comparison of this file."""
    for group in GROUPS.values():
        yield from group(device, small=small)


def head_forward(device: torch.device, *, small: bool) -> Iterator[Figure]:
    """Compare the logits of bf16 operands, summed and kept in fp32, with a product of widened operands."""
    tokens, width, vocabulary = (64, 64, 512) if small else (4096, 2048, 262_272 // 8)
    x_NI, weight_VI = (
        drawn(device, torch.bfloat16, tokens, width),
        drawn(device, torch.bfloat16, vocabulary, width),
    )
    logits_NV = torch.empty(tokens, vocabulary, device=device)
    seconds = medians(
        {
            "ours": lambda: head.product(x_NI, weight_VI.T, logits_NV),
            "fp32": lambda: torch.mm(x_NI.float(), weight_VI.float().T, out=logits_NV),
        },
        device,
    )
    what = f"head forward, {tokens} tokens, {width} x {vocabulary}, bf16 with fp32 logits"
    yield Figure(what, "operands widened to fp32", seconds["ours"], seconds["fp32"])


def grouped_products(device: torch.device, *, small: bool) -> Iterator[Figure]:
    """Compare grouped products with one dense product of the same FLOPs."""
    experts, inputs, outputs = (4, 64, 128) if small else (16, 2048, 4096)
    for rows in (64,) if small else (256, 1024, 4096):
        x_NI = drawn(device, torch.bfloat16, experts * rows, inputs)
        weight_EIO = drawn(device, torch.bfloat16, experts, inputs, outputs)
        ends_E = ends_of([rows] * experts, device)
        seconds = medians(
            {
                "grouped": lambda x=x_NI, w=weight_EIO, ends=ends_E: multiply(x, w, Groups(ends)),  # type: ignore[misc]
                "dense": partial(torch.mm, x_NI, weight_EIO[0]),
            },
            device,
        )
        what = f"{experts} groups of {rows} rows, {inputs} x {outputs}, bf16"
        yield Figure(what, "one dense product of the same FLOPs", seconds["grouped"], seconds["dense"])


def symmetric_products(device: torch.device, *, small: bool) -> Iterator[Figure]:
    """Compare X X^T with the library's batched product: of five matrices as Muon has them, and of large ones."""
    for count, side, length in ((1, 64, 64),) if small else ((5, 2048, 4096), (1, 4096, 4096), (1, 8192, 8192)):
        x_KSL = drawn(device, torch.bfloat16, count, side, length)
        out_KSS = x_KSL.new_empty(count, side, side)
        seconds = medians(
            {
                "ours": partial(symmetric_product, x_KSL, out_KSS),
                "library": partial(torch.bmm, x_KSL, x_KSL.mT, out=out_KSS),
            },
            device,
        )
        yield Figure(
            f"symmetric product, {count} x {side}, bf16",
            "the library's product",
            seconds["ours"],
            seconds["library"],
        )


def norms(device: torch.device, *, small: bool) -> Iterator[Figure]:
    """Compare a stage's entry, forward and both directions, with torch.compile's and with the triad of the run."""
    rows, width = (64, 64) if small else (16384, 2048)
    on_gpu = device.type == "cuda"
    hidden, weight, *affine = (
        drawn(device, torch.bfloat16, *shape, seed=seed).requires_grad_()
        for seed, shape in enumerate([(rows, width), *[(width,)] * 5])
    )
    residual = drawn(device, torch.float32, rows, width, seed=9).requires_grad_()
    grads = (
        drawn(device, torch.bfloat16, rows, width, seed=10),
        drawn(device, torch.float32, rows, width, seed=11),
    )
    operands = (hidden, residual, weight, *affine)

    def ours(*_: Tensor) -> tuple[Tensor, Tensor]:
        return residual_norm(
            hidden,
            weight,
            1e-5,
            hidden_affine=(affine[0], affine[1]),
            residual=residual,
            residual_affine=(affine[2], affine[3]),
        )

    peer = torch.compile(_entry) if on_gpu else _entry

    def forward(run: Callable[..., tuple[Tensor, Tensor]]) -> None:
        with torch.no_grad():
            run(*operands)

    def both(run: Callable[..., tuple[Tensor, Tensor]]) -> None:
        torch.autograd.grad(run(*operands), operands, grads)

    for name, moved, way in (("forward", 12, forward), ("forward and backward", 30, both)):
        seconds = medians({"ours": partial(way, ours), "peer": partial(way, peer)}, device)
        share = moved * rows * width / seconds["ours"] / triad(device)
        what = f"residual and norm, {name}, {rows} x {width}"
        yield Figure(what, "torch.compile" if on_gpu else "torch", seconds["ours"], seconds["peer"], share)


def _entry(
    hidden: Tensor, residual: Tensor, weight: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor
) -> tuple[Tensor, Tensor]:
    joined = (hidden.float() + b) * a + (residual + d) * c
    return (joined * (joined.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight).to(weight.dtype), joined


def passes(device: torch.device, *, small: bool) -> Iterator[Figure]:
    """Compare Muon's passes with torch.compile's, and with the triad of the same run."""
    count, rows, columns = (2, 64, 128) if small else (8, 4096, 2048)
    elements = count * rows * columns
    masters, gradients, means = (drawn(device, torch.float32, count, rows, columns, seed=k) for k in range(3))
    weights = torch.empty_like(masters, dtype=torch.bfloat16)
    x_KMN = torch.empty_like(weights)
    on_gpu = device.type == "cuda"
    compiled: Callable[[Callable[..., Any]], Callable[..., Any]] = torch.compile if on_gpu else lambda run: run
    cases: list[tuple[str, int, Callable[[], object], Callable[[], object]]] = [
        (
            "Muon's momentum and norms",
            14,
            lambda: muon.momentum([means], [gradients], x_KMN, mu=0.95, nesterov=True),
            partial(compiled(_momentum), means, gradients, x_KMN),
        ),
        (
            "Muon's update",
            12,
            lambda: muon.update([masters], x_KMN, decay=0.999, rate=0.01, weights=[weights]),
            partial(compiled(_update), masters, x_KMN, weights),
        ),
    ]
    for name, moved, ours, peer in cases:
        seconds = medians({"ours": ours, "peer": peer}, device)
        share = moved * elements / seconds["ours"] / triad(device)
        what = f"{name}, {elements / 1e6:.4g} M elements"
        yield Figure(what, "torch.compile" if on_gpu else "torch", seconds["ours"], seconds["peer"], share)


def _momentum(momentum: Tensor, gradient: Tensor, x_KMN: Tensor) -> Tensor:
    momentum.lerp_(gradient, 0.05)
    x_KMN.copy_(gradient.lerp(momentum, 0.95))
    return x_KMN.float().square().sum((1, 2)).sqrt()


def _update(master: Tensor, x_KMN: Tensor, weight: Tensor) -> None:
    master.mul_(0.999).sub_(x_KMN * 0.01)
    weight.copy_(master)


GROUPS: dict[str, Callable[..., Iterator[Figure]]] = {
    "head": head_forward,
    "symmetric products": symmetric_products,
    "grouped products": grouped_products,
    "norms": norms,
    "optimizers": passes,
}
"""Comparisons by their subject."""
