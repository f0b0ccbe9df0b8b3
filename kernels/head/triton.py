"""Read logits twice on a GPU, and leave their gradient in their place: softmax, losses and cast in one kernel.

A workgroup has one row. The first pass keeps a maximum and a sum of exponentials for each of its places, and joins
them at the end. The second pass writes the gradient, whose elements may be narrower: element j begins at byte 2 j
of the row, where fp32 logits of the same or an earlier block were. A barrier between reading a block and writing
it makes sure that every wave has read these. On AMD's GPUs loads that were issued may be under way at a barrier,
so each value is moved to another register before it, for which its load has to be done.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from zslurm.kernels.arch import Arch, arch_of
from zslurm.kernels.code_object import KernelLaunch
from zslurm.kernels.head.reference import in_place_of
from zslurm.kernels.triton_tools import INTERPRETED, launch

_BLOCK, _BLOCK_OF_FP32 = 8192, 4096
"""Logits that a workgroup reads at one time, for a gradient in 16 bits and in fp32: with more registers spill."""


def losses(
    logits_TV: Tensor, targets_T: Tensor, counted_T: Tensor, z_weight: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-sum-exp and the target's logit of each row, and the gradient in the logits' place."""
    rows, columns = logits_TV.shape
    log_sum_T, target_logit_T = (logits_TV.new_empty(rows) for _ in range(2))
    gradient_TV = in_place_of(logits_TV, dtype)
    largest = _BLOCK_OF_FP32 if dtype == torch.float32 else _BLOCK
    block = min(largest, max(512, triton.next_power_of_2(columns)))
    if rows:
        launch(
            _losses,
            rows,
            logits_TV,
            logits_TV,
            targets_T,
            counted_T,
            log_sum_T,
            target_logit_T,
            gradient_TV,
            2 * z_weight,
            columns,
            logits_TV.stride(0),
            gradient_TV.stride(0),
            BLOCK=block,
            ON_AMD=arch_of(logits_TV.device).is_amd and not INTERPRETED,
            num_warps=8 if block == largest else 4,
        )
    return log_sum_T, target_logit_T, gradient_TV


@triton.jit
def _losses(
    logits,
    targets,
    counted,
    log_sums,
    target_logits,
    gradient,
    twice_z_weight,
    columns,
    logits_row,
    gradient_row,
    BLOCK: tl.constexpr,
    ON_AMD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_row
    gradient += row * gradient_row
    offset = tl.arange(0, BLOCK)
    most = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    total = tl.full((BLOCK,), 0.0, dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        value = tl.load(logits + start + offset, mask=start + offset < columns, other=float("-inf"))
        larger = tl.maximum(most, value, propagate_nan=tl.PropagateNan.ALL)
        # -inf less -inf is not a number: a place that has met no logit yet adds nothing.
        total = tl.where(most == float("-inf"), 0.0, total * tl.exp(most - larger))
        total += tl.where(value == float("-inf"), 0.0, tl.exp(value - larger))
        most = larger
    largest = tl.max(most, 0)
    total = tl.sum(tl.where(most == float("-inf"), 0.0, total * tl.exp(most - largest)), 0)
    log_sum = largest + tl.log(total)
    target = tl.load(targets + row)
    tl.store(log_sums + row, log_sum)
    tl.store(target_logits + row, tl.load(logits + target))
    scale = 1.0 + twice_z_weight * log_sum
    counts = tl.load(counted + row)

    for start in range(0, columns, BLOCK):
        is_column = start + offset < columns
        value = tl.load(logits + start + offset, mask=is_column, other=float("-inf"))
        if ON_AMD:
            value = tl.inline_asm_elementwise(
                "v_mov_b32 $0, $1", "=v,v", [value], dtype=tl.float32, is_pure=False, pack=1
            )
        result = tl.exp(value - log_sum) * scale - tl.where(start + offset == target, 1.0, 0.0)
        result = tl.where(counts, result, 0.0)
        tl.debug_barrier()
        tl.store(gradient + start + offset, result.to(gradient.dtype.element_ty), mask=is_column)


def launches(arch: Arch) -> Iterator[KernelLaunch]:
    """Yield a launch of every kind that the compiler makes other code of: ZAYA1's vocabulary, and odd ones."""
    for dtype in (torch.bfloat16, torch.float32):
        for columns in (262_272, 32_768, 4096, 999):
            logits = torch.empty(64, columns, device="meta")
            targets = torch.empty(64, dtype=torch.int64, device="meta")
            counted = torch.empty(64, dtype=torch.bool, device="meta")
            name = f"{str(dtype).removeprefix('torch.')} {columns} classes"
            run = partial(losses, logits, targets, counted, 1e-4, dtype)
            yield KernelLaunch(name, run, product=False, wide=columns % 16 == 0)
