"""Attention to documents that are kept apart, by torch's own flash kernels: no mask, memory linear in the context.

torch has `torch.nn.attention.varlen.varlen_attn` since 2.10, on NVIDIA and on AMD. Its argument for causality has
changed since, and the one for grouped queries came in 2.12: the signature decides which are given. Without
`varlen_attn`, or if its kernel fails on this GPU, documents are kept apart by a mask (`sdpa.py`), whose memory
grows with the square of the context.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zslurm.train.model.attention_backends.packages import FlashAttention

TORCH = "torch"
"""Name of these kernels among the packages."""
_TOLERANCE = 0.03
"""Of the norm: results and gradients in bf16."""


def documents_by_torch() -> FlashAttention | None:
    """Return torch's kernels for documents with bounds; None if this torch has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return FlashAttention(TORCH, _whole, _varlen(varlen_attn))


def failure_of(
    kernels: FlashAttention, device: torch.device, dtype: torch.dtype, heads: tuple[int, int], head_dim: int
) -> str | None:
    """Attend over a sequence and over two documents, forward and backward; return what fails in a line, or None.

    Args:
        kernels: to try.
        device: a GPU; the host waits for it.
        dtype: of queries, keys and values.
        heads: numbers of query heads and of key heads.
        head_dim: channels of a head.

    Raises:
        torch.OutOfMemoryError, torch.AcceleratorError: the device itself has failed.
    """
    queries, keys = heads
    generator = torch.Generator().manual_seed(0)
    operands = [torch.randn(1, count, 16, head_dim, generator=generator) for count in (queries, keys, keys)]
    for documents in (((0, 16),), ((0, 5), (5, 16))):
        tried = [x.to(device, dtype, copy=True).requires_grad_() for x in operands]
        starts = [*(start for start, _ in documents), 16]
        bounds_N = torch.tensor(starts, dtype=torch.int32, device=device) if len(documents) > 1 else None
        try:
            y_BSX = kernels(tried[0], tried[1], tried[2], bounds_N)
            y_BSX.float().square().sum().backward()
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise  # not refused: the device has no memory left, or reports a fault
        except Exception as error:  # a package may compile now: without a compiler, or where it cannot write
            return f"{type(error).__name__}: {error}".partition("\n")[0]
        if not _is_right(y_BSX, tried, documents):
            return "its values or gradients are not those of the documents one by one"
    return None


def _is_right(y_BSX: Tensor, tried: Sequence[Tensor], documents: Sequence[tuple[int, int]]) -> bool:
    """Return whether a result and its gradients are those of torch, one document after the other."""
    wide = [x.detach().float().requires_grad_() for x in tried]
    results = []
    for start, end in documents:
        q, k, v = (x[:, :, start:end] for x in wide)
        results.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    expected_BSX = torch.cat(results, dim=2).transpose(1, 2).flatten(2)
    expected_BSX.square().sum().backward()
    pairs = [(y_BSX, expected_BSX), *((x.grad, reference.grad) for x, reference in zip(tried, wide, strict=True))]
    return all(
        result is not None and reference is not None and _near(result, reference) for result, reference in pairs
    )


def _near(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors differ by no more than 16-bit formats do."""
    return bool((one.detach().float() - other.detach()).norm() <= _TOLERANCE * other.detach().norm())


def _whole(
    q_BSHP: Tensor, k_BSJP: Tensor, v_BSJP: Tensor, *, softmax_scale: float, causal: bool, **_: Any
) -> Tensor:
    """Attend over whole sequences, for which torch has fused kernels with grouped queries."""
    q_BHSP, k_BJSP, v_BJSP = (x.transpose(1, 2) for x in (q_BSHP, k_BSJP, v_BSJP))
    y_BHSP = F.scaled_dot_product_attention(
        q_BHSP, k_BJSP, v_BJSP, is_causal=causal, scale=softmax_scale, enable_gqa=True
    )
    return y_BHSP.transpose(1, 2)


def _varlen(varlen_attn: Callable[..., Any]) -> Callable[..., Tensor]:
    """Return torch's function with the arguments of flash-attn's `flash_attn_varlen_func`."""
    parameters = inspect.signature(varlen_attn).parameters
    grouped = "enable_gqa" in parameters
    options: Mapping[str, Any] = {"enable_gqa": True} if grouped else {}

    def varlen(
        q_THP: Tensor, k_TJP: Tensor, v_TJP: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
        max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float, causal: bool, **_: Any,
    ) -> Tensor:  # fmt: skip
        if not grouped:
            repeats = q_THP.shape[1] // k_TJP.shape[1]
            k_TJP, v_TJP = (x.repeat_interleave(repeats, dim=1) for x in (k_TJP, v_TJP))
        if "window_size" in parameters:
            seen: dict[str, Any] = {"window_size": (-1, 0) if causal else (-1, -1)}
        else:
            seen = {"is_causal": causal}
        if "scale" in parameters:  # the default of all versions is 1 / sqrt(P), as the model has it
            seen["scale"] = softmax_scale
        y_THP: Tensor = varlen_attn(
            q_THP, k_TJP, v_TJP, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **seen, **options
        )
        return y_THP

    return varlen
