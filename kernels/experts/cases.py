"""Cases of routing and the experts' steps: what they are checked and measured on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zslurm.kernels.case import TOLERANCE, Call, Case, drawn
from zslurm.kernels.experts import reference


class _Sizes(NamedTuple):
    """Tokens, router classes (the last of them skips), choices a token, hidden size, inner size of an expert."""

    tokens: int
    experts: int
    choices: int
    width: int
    inner: int

    @property
    def classes(self) -> int:
        return self.experts + 1

    @property
    def rows(self) -> int:
        return self.tokens * self.choices


def checks() -> Iterator[Case]:
    """Yield one choice and several, odd sizes, and experts without rows."""
    for dtype in (torch.bfloat16, torch.float32):
        for sizes in (_Sizes(96, 16, 1, 64, 48), _Sizes(37, 4, 2, 77, 33), _Sizes(3, 16, 2, 32, 16)):
            for identity in (True, False):
                yield from _all(dtype, sizes, identity)


def benchmarks(small: bool) -> Iterator[Case]:
    """Yield zaya1-8b's layer for microbatches of several sizes."""
    for tokens in (64, 256) if small else (4096, 16384, 65536):
        width, inner = (64, 64) if small else (2048, 2048)
        yield from _all(torch.bfloat16, _Sizes(tokens, 16, 1, width, inner), True)


def _all(dtype: torch.dtype, sizes: _Sizes, identity: bool) -> Iterator[Case]:
    tokens, experts, choices, width, inner = sizes
    skips = "identity" if identity else "zero"
    name = f"{str(dtype).removeprefix('torch.')} {tokens} tokens, {choices} of {sizes.classes}, {width} x {inner}"
    of_classes = 4.0 * tokens * sizes.classes
    of_tokens, of_rows = dtype.itemsize * tokens * width, dtype.itemsize * sizes.rows * width
    of_inner = dtype.itemsize * sizes.rows * inner
    products = 6.0 * sizes.rows * width * inner
    steps: list[tuple[str, Callable[..., Call], str, float, float]] = [
        ("choose", _choose, "tokens", 2 * of_classes, 0),
        ("choose_backward", _choose_backward, "tokens", 2 * of_classes, 0),
        ("sort", _sort, "tokens", 24.0 * sizes.rows, 0),
        ("gather", _gather, "rows", of_tokens + of_rows, 0),
        ("activate", _activate, "rows", 3 * of_inner, 0),
        ("activate_backward", _activate_backward, "rows", 6 * of_inner, 0),
        ("combine", _combine, "rows", of_rows + of_tokens, 0),
        ("weights_backward", _weights_backward, "rows", 2 * of_tokens, 0),
        ("network", _network, "tokens", dtype.itemsize * 3 * experts * width * inner + 2 * of_tokens, products),
    ]
    of_identity = ("combine", "weights_backward", "network")
    for step, make, axis, moved, flops in steps:
        if not identity and step not in of_identity:
            continue
        yield Case(
            f"experts.{step}",
            f"{name}, skipping {skips}" if step in of_identity else name,
            partial(make, dtype, sizes, identity),
            TOLERANCE[dtype] * (4 if step == "network" else 1),  # several roundings
            flops=flops,
            bytes=float(moved),
            axis=axis,
        )


def _weights(sizes: _Sizes, device: torch.device) -> Tensor:
    return drawn(device, torch.float32, sizes.tokens, sizes.choices, seed=5).sigmoid()


def _classes(sizes: _Sizes, device: torch.device) -> Tensor:
    """Return each token's choices, all different, without any for the second expert."""
    preference_TC = drawn(device, torch.float32, sizes.tokens, sizes.classes, seed=6)
    preference_TC[:, 1] = -torch.inf
    return preference_TC.argsort(dim=-1, descending=True)[:, : sizes.choices].contiguous()


def _order(sizes: _Sizes, device: torch.device) -> reference.Order:
    return reference.sort(_classes(sizes, device), sizes.classes, sizes.experts)


def _logits(dtype: torch.dtype, sizes: _Sizes, device: torch.device) -> Tensor:
    """Return logits whose steps are wide enough that rounding changes no choice."""
    rank_TC = drawn(device, torch.float32, sizes.tokens, sizes.classes).argsort(dim=-1)
    return ((rank_TC - sizes.classes // 2) * 0.25).to(dtype)


def _choose(dtype: torch.dtype, sizes: _Sizes, identity: bool, device: torch.device) -> Call:
    logits_TC = _logits(dtype, sizes, device)
    bias_C = drawn(device, torch.float32, sizes.classes, seed=1) * 1e-4
    return Call(lambda: (logits_TC, bias_C, sizes.choices), list)


def _choose_backward(dtype: torch.dtype, sizes: _Sizes, identity: bool, device: torch.device) -> Call:
    bias_C = torch.zeros(sizes.classes, device=device)
    chosen = reference.choose(_logits(dtype, sizes, device), bias_C, sizes.choices)
    grad_weights_TK = drawn(device, torch.float32, sizes.tokens, sizes.choices, seed=2)
    return Call(lambda: (grad_weights_TK, chosen[0], chosen[2], dtype), lambda grad_TC: [grad_TC])


def _sort(dtype: torch.dtype, sizes: _Sizes, identity: bool, device: torch.device) -> Call:
    classes_TK = _classes(sizes, device)
    return Call(lambda: (classes_TK, sizes.classes, sizes.experts), list)


def _gather(dtype: torch.dtype, sizes: _Sizes, identity: bool, device: torch.device) -> Call:
    x_TD, order = drawn(device, dtype, sizes.tokens, sizes.width), _order(sizes, device)
    return Call(lambda: (x_TD, order.order_N, sizes.choices), lambda x_ND: [x_ND])


def _both(dtype: torch.dtype, sizes: _Sizes, device: torch.device) -> tuple[Tensor, Tensor]:
    return drawn(device, dtype, sizes.rows, 2 * sizes.inner), _weights(sizes, device).flatten()


def _activate(dtype: torch.dtype, sizes: _Sizes, identity: bool, device: torch.device) -> Call:
    operands = _both(dtype, sizes, device)
    return Call(lambda: operands, lambda active_NF: [active_NF])


def _activate_backward(dtype: torch.dtype, sizes: _Sizes, identity: bool, device: torch.device) -> Call:
    operands = (drawn(device, dtype, sizes.rows, sizes.inner, seed=3), *_both(dtype, sizes, device))
    return Call(lambda: operands, list)


def _combine(dtype: torch.dtype, sizes: _Sizes, identity: bool, device: torch.device) -> Call:
    y_ND = drawn(device, dtype, sizes.rows, sizes.width, seed=4)
    x_TD, order = drawn(device, dtype, sizes.tokens, sizes.width), _order(sizes, device)
    operands = (y_ND, x_TD, _weights(sizes, device), order.back_N, order.ends_E, identity)
    return Call(lambda: operands, lambda y_TD: [y_TD])


def _weights_backward(dtype: torch.dtype, sizes: _Sizes, identity: bool, device: torch.device) -> Call:
    grad_TD, x_TD = (drawn(device, dtype, sizes.tokens, sizes.width, seed=seed) for seed in (0, 7))
    order, grad_weights_N = _order(sizes, device), _weights(sizes, device).flatten()
    operands = (grad_weights_N, grad_TD, x_TD, order.back_N, order.ends_E, identity)
    return Call(lambda: operands, lambda grad_weights_TK: [grad_weights_TK])


def _network(dtype: torch.dtype, sizes: _Sizes, identity: bool, device: torch.device) -> Call:
    tokens, experts, _, width, inner = sizes
    x_TD, weights_TK = drawn(device, dtype, tokens, width), _weights(sizes, device)
    gate_up_EOD = drawn(device, dtype, experts, 2 * inner, width, seed=8) / width**0.5
    down_EDF = drawn(device, dtype, experts, width, inner, seed=9) / inner**0.5
    leaves = [x_TD, weights_TK, gate_up_EOD, down_EDF]
    for leaf in leaves:
        leaf.requires_grad_()
    order = _order(sizes, device)

    def outputs(y_TD: Any) -> list[Tensor]:
        return [y_TD.detach(), *torch.autograd.grad(y_TD.sum(), leaves)]

    return Call(lambda: (*leaves, order, identity), outputs)
