"""Describe a launch of every kind that the compiler makes other code of: ZAYA1's experts, and odd widths."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zslurm.kernels.arch import Arch
from zslurm.kernels.checks import short
from zslurm.kernels.code_object import KernelLaunch
from zslurm.kernels.experts.triton.routing import choose, choose_backward, sort
from zslurm.kernels.experts.triton.rows import activate, activate_backward, combine, gather, weights_backward


def launches(arch: Arch) -> Iterator[KernelLaunch]:
    """Yield them."""
    yield from _routing()
    yield from _rows()


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _routing() -> Iterator[KernelLaunch]:
    few: dict[str, Any] = {"product": False, "wide": False}
    for tokens, choices, classes in ((4096, 1, 17), (4096, 8, 160), (4001, 2, 5)):
        name = f"{classes} classes, {choices} choices"
        probabilities, weights = _empty(tokens, classes), _empty(tokens, choices)
        chosen = _empty(tokens, choices, dtype=torch.int64)
        for dtype in (torch.bfloat16, torch.float32):
            forward = partial(choose, _empty(tokens, classes, dtype=dtype), _empty(classes), choices)
            backward = partial(choose_backward, weights, chosen, probabilities, dtype)
            yield KernelLaunch(f"choose {short(dtype)} {name}", forward, **few)
            yield KernelLaunch(f"choose_backward {short(dtype)} {name}", backward, **few)
        yield KernelLaunch(f"sort {name}", partial(sort, chosen, classes, classes - 1), **few)


def _rows() -> Iterator[KernelLaunch]:
    ends = _empty(16, dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float32):
        for tokens, width, choices in ((4096, 2048, 1), (4096, 2048, 2), (4001, 77, 2)):
            moved: dict[str, Any] = {"product": False, "wide": width % 16 == 0}
            count = tokens * choices
            x, y, both = (
                _empty(*shape, dtype=dtype) for shape in ((tokens, width), (count, width), (count, 2 * width))
            )
            weights, rows, of_rows = _empty(tokens, choices), _empty(count, dtype=torch.int64), _empty(count)
            name = f"{short(dtype)} {width} wide, {choices} choices"
            yield KernelLaunch(f"gather {name}", partial(gather, x, rows, choices), **moved)
            yield KernelLaunch(f"activate {name}", partial(activate, both, of_rows), **moved)
            yield KernelLaunch(f"activate_backward {name}", partial(activate_backward, y, both, of_rows), **moved)
            for identity in (True, False):
                routed = rows, ends, identity
                kind = f"{name}, skipping {'identity' if identity else 'zero'}"
                of_weights: dict[str, Any] = {**moved, "wide": identity and width % 16 == 0}
                yield KernelLaunch(f"combine {kind}", partial(combine, y, x, weights, *routed), **moved)
                yield KernelLaunch(
                    f"weights_backward {kind}", partial(weights_backward, of_rows, x, x, *routed), **of_weights
                )
