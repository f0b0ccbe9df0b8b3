"""The entry of a stage, residual scaling and RMSNorm in one, against torch's operators and `torch.compile`.

Forward alone, and forward with backward, of bf16 hidden states and an fp32 residual stream. Beside them, in the
same run, a triad a = b + s c of as many bytes: what the memory gives to the simplest kernel. Bytes are those that
an entry has to move, each counted once.

On a GPU kernels are timed by events, the caches written over before each; on a CPU by the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import Timing, alternate, write_result
from zslurm.kernels.residual_norm import OPERATIONS, residual_norm
from zslurm.kernels.residual_norm.operands import Operands

GPU_SHAPES = ((16384, 2048), (4096, 2048), (16384, 4096), (8192, 8192), (2048, 32768), (65536, 256))
CPU_SHAPES = ((2048, 256), (2048, 2048))
FORWARD_BYTES, BACKWARD_BYTES = 2 + 4 + 4 + 2, 2 + 4 + 2 + 4 + 2 + 4
"""Of an element: both streams, t and x; both gradients, both streams and theirs."""
THREADS = 1

_FLUSHES = 8  # about a millisecond, in which the host prepares the launches that are timed

Contender = Callable[[], object]
Apply = Callable[..., tuple[Tensor, Tensor]]


def run() -> None:
    """Measure and write results/norms.json."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    write_result("norms", {"torch": torch.__version__, **figures(device)})


def figures(device: str) -> dict[str, Any]:
    """Measure on a device; returns the device and one row for each shape."""
    if device == "cpu":
        torch.set_num_threads(THREADS)
        return {"device": "cpu", "threads": THREADS, "shapes": [_shape(*shape, device) for shape in CPU_SHAPES]}
    name = torch.cuda.get_device_name()
    return {"device": name, "shapes": [_shape(*shape, device) for shape in GPU_SHAPES]}


def _shape(rows: int, width: int, device: str) -> dict[str, Any]:
    operands = _drawn(rows, width, device)
    chosen = OPERATIONS[0].choose(1e-5, False, *operands).name
    row: dict[str, Any] = {"rows": rows, "width": width, "dtype": "bfloat16", "operation_runs": chosen}
    forward_bytes = rows * width * FORWARD_BYTES
    both_bytes = rows * width * (FORWARD_BYTES + BACKWARD_BYTES)
    for name, moved, backward in (("forward", forward_bytes, False), ("forward_backward", both_bytes, True)):
        contenders = {
            "operation": _contender(_apply, operands, backward),
            "eager": _contender(_definition, operands, backward),
            "compiled": _contender(torch.compile(_definition, dynamic=False), operands, backward),
            "triad": _triad(moved, device),
        }
        timings = _measure(contenders, device)
        rate = {each: moved / timing.median / 1e9 for each, timing in timings.items()}
        row[name] = {
            "bytes": moved,
            "gb_per_s": {each: round(value, 1) for each, value in rate.items()},
            "of_triad": round(rate["operation"] / rate["triad"], 3),
            "times_eager": round(timings["eager"].median / timings["operation"].median, 2),
            "times_compiled": round(timings["compiled"].median / timings["operation"].median, 2),
            "microseconds": {each: round(timing.median * 1e6, 1) for each, timing in timings.items()},
            "runs": len(timings["triad"].seconds),
        }
    return row


def _drawn(rows: int, width: int, device: str) -> Operands:
    generator = torch.Generator(device).manual_seed(0)

    def values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator).to(dtype)

    stream = values(rows, width, dtype=torch.float32)
    vectors = [values(width) for _ in range(5)]
    return Operands(values(rows, width), *vectors[:2], stream, *vectors[2:4], vectors[4], None)


def _contender(apply: Apply, operands: Operands, backward: bool) -> Contender:
    """An entry, with gradients of both results where there is a backward."""
    leaves = [each.detach().clone().requires_grad_(backward) for each in operands if each is not None]
    assert operands.residual is not None
    gradients = [torch.randn_like(operands.hidden), torch.randn_like(operands.residual)]

    def step() -> None:
        results = apply(*leaves)
        if backward:
            torch.autograd.grad(results, leaves, gradients)

    return step


def _apply(h: Tensor, a: Tensor, b: Tensor, r: Tensor, c: Tensor, d: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return residual_norm(h, w, 1e-5, hidden_affine=(a, b), residual=r, residual_affine=(c, d))


def _definition(
    h: Tensor, a: Tensor, b: Tensor, r: Tensor, c: Tensor, d: Tensor, w: Tensor
) -> tuple[Tensor, Tensor]:
    joined = (h.float() + b) * a.float() + (r + d) * c.float()
    inverse = (joined.square().mean(dim=-1, keepdim=True) + 1e-5).rsqrt()
    return (joined * inverse * w).to(w.dtype), joined


def _triad(moved: int, device: str) -> Contender:
    size = moved // 12  # two reads and one write of fp32
    left, right, out = (torch.ones(size, device=device) for _ in range(3))
    return lambda: torch.add(left, right, alpha=3.0, out=out)


def _measure(contenders: Mapping[str, Contender], device: str) -> dict[str, Timing]:
    if device == "cpu":
        return alternate(contenders, runs=20, warm_up=3)
    return _on_gpu(contenders, runs=50, warm_up=5)


def _on_gpu(contenders: Mapping[str, Contender], *, runs: int, warm_up: int) -> dict[str, Timing]:
    """Time contenders in turn, each by what its kernels take between two events on the stream."""
    flush = torch.empty(512 * 2**20, dtype=torch.int8, device="cuda")  # more than the caches of any card
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(warm_up + runs):
        for name, action in contenders.items():
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(_FLUSHES):
                flush.zero_()
            before.record()
            action()
            after.record()
            after.synchronize()
            if turn >= warm_up:
                seconds[name].append(before.elapsed_time(after) / 1e3)
    return {name: Timing(name, each) for name, each in seconds.items()}
