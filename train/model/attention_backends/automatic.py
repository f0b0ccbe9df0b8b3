"""Whether `parallel.attention: auto` takes AITER's kernels: on gfx942, if they are installed and work there.

They are tried on two small documents before the first step. AITER builds its kernels itself when they first run.
Its deterministic backward is the slow one, and torch.compile would cut a layer's graph around its calls: torch's
kernels are kept then.
"""

from __future__ import annotations

import importlib.util
import inspect
from typing import Literal

import torch

from zslurm.kernels.arch import arch_of
from zslurm.train.config import TrainConfig
from zslurm.train.model.attention_backends.documents import failure_of
from zslurm.train.model.attention_backends.packages import FlashAttention, choose_kernels

_PACKAGE: Literal["aiter"] = "aiter"
_ARCHITECTURE = "gfx942"
_COMMON = frozenset({"softmax_scale", "causal", "deterministic", "return_lse"})
_OF_DOCUMENTS = _COMMON | {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}


def aiter_of_auto(
    config: TrainConfig, device: torch.device, dtype: torch.dtype
) -> tuple[FlashAttention | None, str | None]:
    """Return AITER's kernels if `auto` takes them; else why not, if that is worth a line in the log."""
    installed = importlib.util.find_spec(_PACKAGE) is not None
    if arch_of(device).name != _ARCHITECTURE or not installed:
        return None, None
    if config.parallel.deterministic:
        return None, "parallel.deterministic rules out its fast backward"
    if config.parallel.compile:
        return None, "parallel.compile would cut graphs around its calls"
    model = config.model
    try:
        kernels = choose_kernels(_PACKAGE, device=device, dtype=dtype, head_dim=model.head_dim)
    except Exception as error:  # its import compiles, and makes files and directories
        return None, f"{type(error).__name__}: {error}".partition("\n")[0]
    assert isinstance(kernels, FlashAttention)
    reason = _missing(kernels) or failure_of(
        kernels, device, dtype, (model.query_heads, model.kv_heads), model.head_dim
    )
    return (None, reason) if reason else (kernels, None)


def _missing(kernels: FlashAttention) -> str | None:
    """Return which arguments the package's functions lack."""
    for function, names in ((kernels.whole, _COMMON), (kernels.varlen, _OF_DOCUMENTS)):
        if lacking := sorted(names - inspect.signature(function).parameters.keys()):
            return f"its {getattr(function, '__name__', 'function')} has no {', '.join(lacking)}"
    return None
