"""Forward and backward of one way to run qk_conv: for this process, Triton's interpreter, and a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.kernels.implementations import interpreter
from tests.kernels.qk_conv import definition
from zslurm.kernels import qk_conv as package
from zslurm.kernels.arch import GFX942
from zslurm.kernels.dispatch import using
from zslurm.kernels.qk_conv import Convolutions, JoinedKernel, qk_conv

Result = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """Operands of one call and the gradients of its results."""

    z_BSQ: Tensor
    kernel: Convolutions | JoinedKernel
    temperature_J: Tensor
    cos: Tensor
    sin: Tensor
    linked: tuple[Tensor, ...] | None
    before_BWQ: Tensor | None
    grad_q_BHSP: Tensor
    grad_k_BJSP: Tensor

    def converted(self, *to: Any) -> Case:
        """Return it on another device, or in another format, all that are numbers."""
        moved = {name: _converted(value, to) for name, value in vars(self).items()}
        return Case(**moved)


def _converted(value: Any, to: tuple[Any, ...]) -> Any:
    if isinstance(value, Tensor):
        keeps = value.dtype == torch.bool and isinstance(to[0], torch.dtype)
        return value if keeps else value.to(*to)
    if isinstance(value, tuple):
        parts = [_converted(part, to) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def defined(case: Case) -> Result:
    """Compute the definition: queries, keys and, without tokens before, all gradients."""
    return _both_passes(definition.mix, case)


def here(implementation: str, case: Case) -> Result:
    """Run an implementation of both passes on the device of the case."""
    with using("qk_conv", implementation):
        return _both_passes(qk_conv, case)


def interpreted(case: Case, compute_units: int = 1) -> Result:
    """Run the kernels in Triton's interpreter, with places dealt out as on so large a GPU of AMD."""
    result: Result = interpreter().submit(_interpret, case, compute_units).result()
    return result


def on_gpu(case: Case) -> Result:
    """Run the kernels on a GPU."""
    return {name: result.cpu() for name, result in here("triton", case.converted("cuda")).items()}


def _interpret(case: Case, compute_units: int) -> Result:
    from zslurm.kernels.qk_conv import triton

    arch = replace(GFX942, compute_units=compute_units)
    with (
        patch.object(package, "forward", triton.forward),
        patch.object(package, "backward", triton.backward),
        patch.object(triton, "arch_of", lambda device: arch),
    ):
        return _both_passes(qk_conv, case)


def _both_passes(run: Callable[..., tuple[Tensor, Tensor]], case: Case) -> Result:
    differentiated = case.before_BWQ is None
    leaves = {"z": case.z_BSQ, **case.kernel._asdict(), "temperature": case.temperature_J}
    leaves = {name: leaf.detach().requires_grad_(differentiated) for name, leaf in leaves.items()}
    kernel = type(case.kernel)(*list(leaves.values())[1:-1])
    q_BHSP, k_BJSP = run(
        leaves["z"], kernel, leaves["temperature"], case.cos, case.sin, case.linked, case.before_BWQ
    )
    result = {"q": q_BHSP.detach(), "k": k_BJSP.detach()}
    if differentiated:
        torch.autograd.backward([q_BHSP, k_BJSP], [case.grad_q_BHSP, case.grad_k_BJSP])
        result |= {f"gradient of {name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return result
