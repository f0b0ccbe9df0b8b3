"""Describe operands of an operation, on which its implementations are checked and measured on a device.

The file `cases.py` in every operation's folder has two functions:

    checks()                cases of a few thousand elements, odd sizes among them: `zslurm dev kernels check`
    benchmarks(small)       cases of the sizes that training has, or small ones to try the program: `... bench`
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Call:
    """Operands on a device.

    Attributes:
        args: returns the arguments of one call; the tensors in them are the same each time.
        outputs: returns the tensors to compare, from what the call returned.
        kwargs: further arguments, by name.
    """

    args: Callable[[], tuple[Any, ...]]
    outputs: Callable[[Any], Sequence[Tensor]]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def run(self, implementation: Callable[..., Any]) -> list[Tensor]:
        """Run an implementation and return what it computed."""
        return list(self.outputs(implementation(*self.args(), **self.kwargs)))


@dataclass(frozen=True)
class Case:
    """One kind of operands.

    Attributes:
        operation: its name.
        name: of the format and the sizes.
        make: makes the operands on a device; the same numbers each time.
        tolerance: largest difference between an implementation and the reference, of the largest magnitude there.
        exact: implementations that are equal to the reference bit by bit.
        flops: of one call.
        bytes: that one call moves at least.
        axis: the key of the operation's sizes along which implementations cross over.
    """

    operation: str
    name: str
    make: Callable[[torch.device], Call]
    tolerance: float
    exact: frozenset[str] = frozenset()
    flops: float = 0.0
    bytes: float = 0.0
    axis: str = ""


TOLERANCE = {torch.bfloat16: 2**-7, torch.float32: 1e-5, torch.float64: 1e-12}
"""Of the largest magnitude in a result: one unit of its last place, and sums of fp32 in another order."""


def drawn(device: torch.device, dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Return normal numbers, the same each time on one device."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def checks_of(operation: str) -> list[Case]:
    """Return the cases that an operation is checked on; none if its folder has no cases."""
    cases = _cases(operation)
    return [case for case in cases.checks() if case.operation == operation] if cases else []


def benchmarks_of(operation: str, *, small: bool) -> list[Case]:
    """Return the cases that an operation is measured on; none if its folder has no cases."""
    cases = _cases(operation)
    return [case for case in cases.benchmarks(small) if case.operation == operation] if cases else []


def _cases(operation: str) -> Any:
    name = f"zslurm.kernels.{operation.partition('.')[0]}.cases"
    return importlib.import_module(name) if importlib.util.find_spec(name) else None
