"""Which implementation of attention runs on a GPU: known, written to the log and checked before the first step.

Packages (`packages.py`) serve grouped queries by themselves. In torch, scaled_dot_product_attention picks one of
its backends by device, format, heads and mask, and reports nothing:

    flash, efficient, cudnn    memory grows with the sequence's length
    math                       writes all scores: heads * length^2 of them, several times, kept for backward

so that a long sequence on the math backend is a run that is slow, and then out of memory. Some builds of torch
have no fused backend for a card. Documents kept apart are attended over by their bounds, without a mask, by a
package or by torch (`documents.py`); if this torch cannot, with a mask, and keys repeated for every query head
(`sdpa.py`). A CPU has its own path, and this check does not apply to it.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch

from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.config import TrainConfig
from zslurm.train.errors import ConfigError
from zslurm.train.model.attention_backends.documents import TORCH
from zslurm.train.model.attention_backends.packages import FlashAttention, Kernels

LONGEST_MATH = 2048
"""Tokens of a sequence that the math backend may attend over on a GPU: 64 MiB of scores for 8 heads in bf16."""


class SdpaChoice(NamedTuple):
    """A backend of torch's scaled_dot_product_attention, and why it is not one of the others."""

    name: str
    reasons: tuple[str, ...] = ()


def attention_backend(kernels: Kernels, config: TrainConfig, device: torch.device, dtype: torch.dtype) -> str:
    """Return what attention runs on on a GPU, for the log: `flash`, or by context if contexts differ.

    Raises:
        ConfigError: the math backend would attend over more than LONGEST_MATH tokens.
    """
    by_bounds = isinstance(kernels, FlashAttention)
    if isinstance(kernels, FlashAttention) and kernels.package != TORCH:
        return kernels.package
    by_context = {}
    for context in sorted({phase.context for phase in config.phases}):
        if by_bounds and _isolated(config, context):
            by_context[context] = "torch's flash backend, by the bounds of documents"
            continue
        choice = ask_torch(config, context, device, dtype)
        if choice.name == "math" and context > LONGEST_MATH:
            raise ConfigError(_refusal(config, context, choice.reasons))
        by_context[context] = f"torch's {choice.name} backend"
    if len(set(by_context.values())) == 1:
        return next(iter(by_context.values()))
    return ", ".join(f"{name} for {counted(context, 'token')}" for context, name in by_context.items())


def ask_torch(config: TrainConfig, context: int, device: torch.device, dtype: torch.dtype) -> SdpaChoice:
    """Ask torch which backend it picks for a training sequence of `context` tokens; computes nothing."""
    from torch.nn.attention import SDPBackend

    model = config.model
    keys = model.query_heads if _isolated(config, context) else model.kv_heads  # with a mask they are repeated
    shapes = [(1, heads, context, model.head_dim) for heads in (model.query_heads, keys, keys)]
    q_BHSP, k_BJSP, v_BJSP = (
        torch.empty(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes
    )
    mask_B1SS = None
    if _isolated(config, context):
        row_B11S = torch.empty(1, 1, 1, context, dtype=torch.bool, device=device)
        mask_B1SS = row_B11S.expand(1, 1, context, context)
    causal = mask_B1SS is None
    with warnings.catch_warnings(record=True):
        number = torch._fused_sdp_choice(
            q_BHSP, k_BJSP, v_BJSP, attn_mask=mask_B1SS, is_causal=causal, enable_gqa=True
        )
    names = {
        int(SDPBackend.FLASH_ATTENTION.value): "flash",
        int(SDPBackend.EFFICIENT_ATTENTION.value): "efficient",
        int(SDPBackend.CUDNN_ATTENTION.value): "cudnn",
        int(SDPBackend.OVERRIDEABLE.value): "device's own",
    }
    if int(number) in names:
        return SdpaChoice(names[int(number)])
    parameters = torch.backends.cuda.SDPAParams(q_BHSP, k_BJSP, v_BJSP, mask_B1SS, 0.0, causal, True)
    return SdpaChoice("math", why_not_fused(parameters))


def why_not_fused(parameters: torch.backends.cuda.SDPAParams) -> tuple[str, ...]:
    """Return torch's own reasons, each one line; torch gives them as warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.backends.cuda.can_use_flash_attention(parameters, debug=True)
        torch.backends.cuda.can_use_efficient_attention(parameters, debug=True)
    lines = (str(warning.message).partition(" (Triggered")[0].strip().partition("\n")[0] for warning in caught)
    return tuple(dict.fromkeys(lines))


def _isolated(config: TrainConfig, context: int) -> bool:
    """Return whether the documents of some sequences of this length are kept apart, which takes a mask."""
    return any(phase.context == context and config.data.isolates(phase) for phase in config.phases)


def _refusal(config: TrainConfig, context: int, reasons: tuple[str, ...]) -> str:
    reason = "; ".join(reason_line.rstrip(".") for reason_line in reasons) or "torch gives no reason"
    if config.parallel.dtype == "bf16":
        ways = ["parallel.attention: flash_attn or aiter"]
        if _isolated(config, context):
            ways.append("data.isolate_documents: false and data.packing: windows, which need no mask")
    else:
        ways = ["parallel.dtype: bf16, the format of the fused backends"]
    return (
        f"parallel.attention: {config.parallel.attention}: phases[].context is {context}, and of torch's backends "
        "only math serves this model on this GPU: its memory grows with the square of the context, and it is "
        f"refused above {LONGEST_MATH} tokens ({reason}); set {'; or '.join(ways)}"
    )
