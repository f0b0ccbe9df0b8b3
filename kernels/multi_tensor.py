"""Make operations on lists of tensors, as an optimizer's steps are: by HIP kernels on GPUs, by torch on CPUs."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

from zslurm.kernels.checks import short
from zslurm.kernels.dispatch import Implementation, Operation, Sizes, anywhere, everything, on_gpus


def operation(
    name: str,
    reference: ModuleType,
    hip: ModuleType,
    by_torch: ModuleType,
    *,
    check: Callable[..., None],
    tensor: Callable[..., Tensor],
    sizes: Callable[..., Sizes],
) -> Operation:
    """Return an operation, whose implementations are functions of one name in three modules.

    Args:
        name: the folder, or behind a dot the operation in it, after which the functions are called; `update` else.
        reference: has the definition.
        hip: has the HIP kernel's, and next to it `supports_` with its name.
        by_torch: has torch's.
        check: as `Operation` has it.
        tensor: gets the arguments, and returns the tensor whose device and format the choice depends on.
        sizes: as `Operation` has them, in addition to the format.
    """
    function = name.partition(".")[2] or "update"

    def all_sizes(*args: Any, **settings: Any) -> Sizes:
        return {**sizes(*args, **settings), "dtype": short(tensor(*args, **settings).dtype)}

    return Operation(
        name=name,
        reference=getattr(reference, function),
        candidates=[
            (on_gpus, Implementation("hip", getattr(hip, function), getattr(hip, f"supports_{function}"))),
            (anywhere, Implementation("torch", getattr(by_torch, function), everything)),
        ],
        check=check,
        device=lambda *args, **settings: tensor(*args, **settings).device,
        sizes=all_sizes,
    )
