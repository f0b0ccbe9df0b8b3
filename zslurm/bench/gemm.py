"""Rates of matrix products: a sweep over M, N and K, or every product of a run, made as the trainer makes it.

A product makes [M, N] from [M, K] and [K, N] in 2 M N K FLOPs, `batch` of them in one call. How the operands are
in memory decides which kernel runs, so each pass of a linear map, with weights [outputs, inputs], has its layout:

    nt    forward            x [M, K] times the transpose of w [N, K]
    nn    input gradient     g [M, K] times w [K, N]
    tn    weight gradient    the transpose of g [K, M] times x [K, N]

Kinds of products: `dense` by torch, with fp32 results in the head's forward
(`zslurm.kernels.head`); `grouped`, the experts' (`zslurm.kernels.grouped_gemm`), with equally many rows each;
`attention`, scores and values in one kernel (`train/model/attention_backends/sdpa.py`), counted with its causal
mask; `group` query heads share a key head. Of a run there are also rows of the kind `part`: whole parts of a
microbatch with all that they do besides products (parts.py), for m tokens of sequences of n, of width k, with the
FLOPs of their products; and of the kind `newton_schulz`: k of Muon's steps (train/optim/newton_schulz.py) on
`batch` matrices of m x n, in the format that Muon multiplies in, which need not be the run's.

Operands are normal random numbers: others take less power, and a GPU at its power limit is faster with them. Each
result is checked by the sums of its rows (Freivalds' check with a vector of ones).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zslurm.bench.measurement import MeasurementPlan, Options, Point, Row
from zslurm.bench.parts import BuiltPart
from zslurm.bench.ranks import BenchRanks
from zslurm.bench.result import MeasuredMachine, Skipped
from zslurm.bench.run.local import rates_of_all, time_alone
from zslurm.checkpoint_tools.quantities import show_bytes
from zslurm.kernels import grouped_gemm, head
from zslurm.kernels.grouped_gemm import Groups
from zslurm.train.model.attention_backends.sdpa import attend
from zslurm.train.optim.newton_schulz import coefficient_schedule, orthogonalise_
from zslurm.train.parallel.world import DTYPES
from zslurm.train.plan.newton_schulz import KIND as NEWTON_SCHULZ

SWEEP = {
    "cuda": {"m": [2**power for power in range(8, 15)], "n": [2**power for power in range(8, 15)],
             "k": [512, 1024, 2048, 4096, 8192]},
    "cpu": {"m": [64, 128, 256, 512, 1024], "n": [64, 128, 256, 512, 1024], "k": [128, 512, 1024]},
}  # fmt: skip
"""Sizes if the user names none."""

_POINT_S = 0.5
_NOT_SHOWN = ("model", "rope_base", "peak_bytes", "coefficients")  # what a part, or Muon's steps, are made of
_LONGEST_ROW = 1.5  # singular values end at 1.2 at most
# FLOP/s for the first estimate of how long a point takes.
_GUESS = {"cuda": 2e14, "cpu": 2e10}


def points(options: Options, machine: MeasuredMachine) -> MeasurementPlan:
    """Return the products that were asked for.

    Those that do not fit into memory, or whose format the device lacks, are skipped.
    """
    planned: list[Point] = []
    skipped: list[Skipped] = []
    for product in options["products"] or _sweep(options, machine):
        values = {"dtype": options["dtype"], **product}
        lacks = _lacks(values["dtype"], machine)
        needed = _bytes(values)
        if lacks or needed > 0.9 * machine.gpu_memory:
            free = show_bytes(machine.gpu_memory)
            reason = lacks or f"its operands take {show_bytes(needed)} for each rank, of {free} that are free"
            point = {name: value for name, value in values.items() if name not in _NOT_SHOWN}
            skipped.append(Skipped(point=point, reason=reason))
            continue
        once = values["flops"] / _GUESS[machine.device]
        planned.append(Point(values, max(0.1, min(_POINT_S, 60 * once), 7 * once)))
    return MeasurementPlan(planned, skipped)


def _sweep(options: Options, machine: MeasuredMachine) -> list[dict[str, Any]]:
    default = SWEEP[machine.device]
    return [
        {"product": "", "pass": "forward", "kind": "dense", "m": m, "n": n, "k": k, "batch": 1, "group": 1,
         "flops": 2.0 * m * n * k}
        for k in options["k"] or default["k"]
        for m in options["m"] or default["m"]
        for n in options["n"] or default["n"]
    ]  # fmt: skip


def _lacks(dtype: str, machine: MeasuredMachine) -> str:
    if machine.device == "cuda" and dtype == "bf16" and not torch.cuda.is_bf16_supported():
        return f"{machine.gpu} has no bf16"
    return ""


def _bytes(values: dict[str, Any]) -> int:
    m, n, k, batch = (values[name] for name in ("m", "n", "k", "batch"))
    itemsize = DTYPES[values["dtype"]].itemsize
    if values["kind"] == "part":
        return int(values["peak_bytes"])
    if values["kind"] == NEWTON_SCHULZ:  # drawn, divided by its norm, and the workspace of a step
        return int(batch * (3 * m * n + 2 * min(m, n) ** 2) * itemsize)
    if values["kind"] == "attention":
        return int(batch * 12 * m * k * itemsize + (batch * m * n * 4 if values["dtype"] == "fp64" else 0))
    return int(batch * (m * k + k * n + m * n) * itemsize + 2 * m * n * 4)


def run(point: Point, ranks: BenchRanks) -> Row | None:
    """Measure a product on every rank at the same time; the row is rank 0's."""
    values = point.values
    product = _MADE_BY.get(values["kind"], Product)(values, ranks.device)
    timing = time_alone(product.call, ranks, _POINT_S)
    tflops = values["flops"] / timing.seconds / 1e12
    row = rates_of_all(tflops, timing, ranks, "tflops", wrong=product.wrong())
    shown = {name: value for name, value in values.items() if name not in _NOT_SHOWN}
    return None if row is None else {**shown, **row, "us": row["seconds"] * 1e6}


class Product:
    """One product, or a batch of them, with its operands.

    Attributes:
        call: makes it once; the result is in `out`.
    """

    def __init__(self, values: dict[str, Any], device: torch.device) -> None:
        m, n, k, self.batch = (values[name] for name in ("m", "n", "k", "batch"))
        dtype = DTYPES[values["dtype"]]
        generator = torch.Generator(device).manual_seed(0)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(self.batch, *shape, dtype=dtype, device=device, generator=generator)

        name = values["pass"]
        if name == "input gradient":
            self.left, self.right = drawn(m, k), drawn(k, n)
        elif name == "weight gradient":
            self.left, self.right = drawn(k, m).mT, drawn(k, n)
        else:
            self.left, self.right = drawn(m, k), drawn(n, k).mT
        self.out = torch.empty(0)
        if values["kind"] == "grouped":
            self.call = self._grouped(by_rows=name != "weight gradient")
        elif self.batch > 1:
            self.call = lambda: self._keep(torch.bmm(self.left, self.right))
        else:
            left, right = self.left[0], self.right[0]
            is_head = values["product"].startswith("head.") and name == "forward"
            self.call = self._wide(left, right) if is_head else lambda: self._keep(left @ right)

    def _keep(self, out: Tensor) -> None:
        self.out = out

    def _wide(self, left: Tensor, right: Tensor) -> Callable[[], None]:
        """Return the head's product, with a result in at least fp32."""
        wide = torch.promote_types(left.dtype, torch.float32)
        if left.dtype == wide:
            return lambda: self._keep(left @ right)
        self.out = left.new_empty(left.shape[0], right.shape[1], dtype=wide)
        return lambda: head.product(left, right, self.out)

    def _grouped(self, *, by_rows: bool) -> Callable[[], None]:
        rows = self.left.shape[1] if by_rows else self.left.shape[2]
        counts = [rows] * self.batch
        ends = torch.tensor([rows * (1 + index) for index in range(self.batch)], dtype=torch.int32)
        groups = Groups(ends.to(self.left.device), counts)
        if by_rows:
            left = self.left.flatten(0, 1)
            return lambda: self._keep(grouped_gemm.multiply(left, self.right, groups))
        left, right = self.left.mT.flatten(0, 1), self.right.flatten(0, 1)
        return lambda: self._keep(grouped_gemm.weight_gradient(left, right, groups))

    def wrong(self) -> int:
        """Return how many rows of the last result have a wrong sum, or one that is not a number."""
        out = self.out.reshape(*self.left.shape[:2], self.right.shape[2])
        count = 0
        for left, right, result in zip(self.left, self.right, out, strict=True):
            k, n = right.shape
            wide = torch.promote_types(left.dtype, torch.float32)
            sums = result.to(wide).sum(dim=1)
            expected = left.to(wide) @ right.to(wide).sum(dim=1)
            # Rounding the operands' products to the result's format: a step of it at a typical sum, N of them.
            eps = torch.finfo(result.dtype).eps + torch.finfo(wide).eps * k**0.5
            allowed = 16 * eps * (n * k) ** 0.5
            count += int((~((sums - expected).abs() <= allowed)).sum().item())
        return count


class Attention:
    """Causal attention of `batch` query heads; backward takes the gradients of queries, keys and values."""

    def __init__(self, values: dict[str, Any], device: torch.device) -> None:
        heads, group = values["batch"], values["group"]
        dtype, shape = DTYPES[values["dtype"]], (values["m"], values["k"])
        generator = torch.Generator(device).manual_seed(0)
        self.inputs = [
            torch.randn(heads // group, count, *shape, dtype=dtype, device=device, generator=generator)
            for count in (group, 1, 1)
        ]
        self.out = torch.empty(0)
        if values["pass"] == "forward":
            self.call = self._forward
        else:
            self.inputs = [input_tensor.requires_grad_() for input_tensor in self.inputs]
            self._forward()
            self.gradient = torch.randn(self.out.shape, dtype=dtype, device=device, generator=generator)
            self.call = self._backward

    def _forward(self) -> None:
        queries, keys, values = self.inputs
        self.out = attend(queries, keys, values, None)

    def _backward(self) -> None:
        torch.autograd.grad(self.out, self.inputs, self.gradient, retain_graph=True)

    def wrong(self) -> int:
        """Return how many rows of the result are not finite numbers."""
        return int((~self.out.detach().isfinite().all(dim=-1)).sum().item())


class NewtonSchulz:
    """Muon's steps on `batch` matrices, in place: what they leave is what the next call begins with."""

    def __init__(self, values: dict[str, Any], device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        shape = (values["batch"], values["m"], values["n"])
        self.x_KMN = torch.randn(*shape, dtype=DTYPES[values["dtype"]], device=device, generator=generator)
        schedule = coefficient_schedule(values["coefficients"], values["k"])
        self.call = lambda: orthogonalise_(self.x_KMN, schedule)

    def wrong(self) -> int:
        """Return how many rows have something else than numbers, or are longer than orthogonal ones can be."""
        lengths = self.x_KMN.float().norm(dim=-1)
        return int((~(lengths < _LONGEST_ROW)).sum())


_MADE_BY: dict[str, Callable[[dict[str, Any], torch.device], Product | Attention | BuiltPart | NewtonSchulz]] = {
    "attention": Attention,
    "part": BuiltPart,
    NEWTON_SCHULZ: NewtonSchulz,
}
"""By kind; all others are products."""
