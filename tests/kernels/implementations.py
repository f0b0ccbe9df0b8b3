"""Every implementation of an operation that this machine can run, as functions of tensors on a CPU.

The reference and what is for CPUs run as they are. What is written in Triton runs in Triton's interpreter, in one
process next to the test's: whether Triton interprets is decided when it is imported, and this process compiles.
If there is a GPU, what supports the operands there runs on it as well, on copies.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from zslurm.kernels.dispatch import Operation, operations
from zslurm.kernels.grouped_gemm import Groups

Run = Callable[..., Any]
ON_A_GPU = " on a GPU"
"""End of the names of those that run there: their tests get the mark `gpu` (conftest.py)."""


def implementations(operation: Operation) -> dict[str, Run]:
    """Each runs on CPU tensors and changes those operands that it writes to."""
    found: dict[str, Run] = {}
    for each in operation.all():
        if each.name == "triton":
            found["triton, interpreted"] = partial(interpreted, operation.name, each.name)
        elif each.name in ("reference", "cpu"):
            found[each.name] = each.run
        if torch.cuda.is_available() and each.name != "cpu":
            found[f"{each.name}{ON_A_GPU}"] = partial(on_gpu, each.run, each.supports, operation.reference)
    return found


def interpreted(operation: str, implementation: str, *args: Any) -> Any:
    """Run an implementation in Triton's interpreter."""
    return _written_back(interpreter().submit(_run, operation, implementation, args).result(), args)


def on_gpu(run: Run, supports: Callable[..., str | None], reference: Run, *args: Any) -> Any:
    """Run an implementation on a GPU, or for operands that it does not take the reference, as in an operation."""
    there = tuple(map(moved, args))
    return _written_back(((run if supports(*there) is None else reference)(*there), there), args)


def moved(operand: Any) -> Any:
    """An operand on the GPU, with what is in it."""
    if isinstance(operand, Tensor):
        return operand.cuda()
    if isinstance(operand, Groups):
        return Groups(operand.ends_E.cuda())
    if isinstance(operand, tuple):
        each = map(moved, operand)
        return type(operand)(*each) if hasattr(operand, "_fields") else tuple(each)
    return operand


def _written_back(done: tuple[Any, tuple[Any, ...]], args: tuple[Any, ...]) -> Any:
    result, after = done
    for mine, theirs in zip(args, after, strict=True):
        if isinstance(mine, Tensor) and mine.numel() and not _same(mine, theirs):
            mine.copy_(theirs)
    return _on_cpu(result)


def _on_cpu(result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(map(_on_cpu, result))
    return result.cpu() if isinstance(result, Tensor) else result


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.to(one.device).nan_to_num()) and torch.equal(
        one.isnan(), other.to(one.device).isnan()
    )


def _run(operation: str, implementation: str, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    (chosen,) = [each for each in operations()[operation].all() if each.name == implementation]
    return chosen.run(*args), args


@cache
def interpreter() -> ProcessPoolExecutor:
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_start)
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"  # for the process, which starts now
    try:
        pool.submit(os.getpid).result()
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
    atexit.register(pool.shutdown)
    return pool


def _start() -> None:
    torch.set_num_threads(1)
