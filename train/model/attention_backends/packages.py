"""Attention by the kernels of an installed package: flash-attn, or AMD's AITER.

Both offer `flash_attn_func` for whole sequences and `flash_attn_varlen_func` for documents of any lengths laid end
to end, with the same layouts and meanings (read in flash_attn/flash_attn_interface.py and aiter/ops/mha.py):

    q [B, S, H, P], k and v [B, S, J, P] -> [B, S, H, P]
                            varlen: [B * S, ...] instead of [B, S, ...], and `cu_seqlens`: where each document
                            begins, and the number of tokens, int32
    causal, softmax_scale   query head h sees key head h // (H / J)

They differ in two defaults, which are therefore always stated. `deterministic` follows torch's own setting;
AITER's default (true) rules out its fast backward. AITER keeps what its backward needs only with `return_lse`, and
then returns a tuple. Arguments are passed by name, for their order is not the same.

Not done here: padding (`valid_BS`) and tokens that follow a cache go to torch, with their mask. Nor are
FlashAttention-3 and -4 looked for, which are separate packages.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from zslurm.train.errors import ConfigError

_OPTIONS: dict[str, dict[str, Any]] = {"flash_attn": {}, "aiter": {"return_lse": True}}
"""Packages, each with the arguments that its functions need in addition to the layout."""

_HOW_TO_INSTALL = {
    "flash_attn": "pip install flash-attn --no-build-isolation",
    "aiter": "build it from github.com/ROCm/aiter",
}
_LARGEST_HEAD = 256
FORMATS = (torch.bfloat16, torch.float16)
"""Formats that flash kernels take."""


@dataclass(frozen=True)
class FlashAttention:
    """A package's two functions, and how to call them."""

    package: str
    whole: Callable[..., Any]
    varlen: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, q_BHSP: Tensor, k_BJSP: Tensor, v_BJSP: Tensor, bounds_N: Tensor | None = None) -> Tensor:
        """Causal grouped-query attention with scale 1 / sqrt(P), in fp16 or bf16; returns [B, S, H * P].

        bounds_N is the start of each document among the B * S tokens, and their number, int32; None if every
        sequence is one document.
        """
        batch, _, length, head_dim = q_BHSP.shape
        arguments: dict[str, Any] = {
            "softmax_scale": 1 / math.sqrt(head_dim),
            "causal": True,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            **self.options,
        }
        q_BSHP, k_BSJP, v_BSJP = (x.transpose(1, 2) for x in (q_BHSP, k_BJSP, v_BJSP))
        if bounds_N is None:
            return _output(self.whole(q_BSHP, k_BSJP, v_BSJP, **arguments)).flatten(2)
        # Documents may be shorter than a sequence: the bound only sizes the launch, and needs no wait.
        y_THP = _output(
            self.varlen(
                *(x.flatten(0, 1) for x in (q_BSHP, k_BSJP, v_BSJP)),
                cu_seqlens_q=bounds_N,
                cu_seqlens_k=bounds_N,
                max_seqlen_q=length,
                max_seqlen_k=length,
                **arguments,
            )
        )
        return y_THP.unflatten(0, (batch, length)).flatten(2)

    def outside_of_graphs(self) -> FlashAttention:
        """Return the same functions, at which torch.compile ends a graph instead of tracing into the package."""
        return replace(self, whole=torch.compiler.disable(self.whole), varlen=torch.compiler.disable(self.varlen))


Kernels = Literal["auto", "sdpa"] | FlashAttention
"""What attention runs on: torch as it is fastest here, its scaled_dot_product_attention, or a package."""


def choose_kernels(
    setting: Literal["auto", "sdpa", "flash_attn", "aiter"],
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
) -> Kernels:
    """Return the kernels that `parallel.attention` asks for.

    Raises:
        ConfigError: they are not installed, or cannot run this model here.
    """
    if setting in ("auto", "sdpa"):
        return setting
    where = f"parallel.attention: {setting}"
    if device.type != "cuda":
        raise ConfigError(f"{where} needs a GPU, and this run is on a {device.type.upper()}; use auto")
    if dtype not in FORMATS:
        raise ConfigError(f"{where} knows 16-bit formats only; set parallel.dtype: bf16, or use auto")
    if head_dim > _LARGEST_HEAD:
        raise ConfigError(f"{where} knows heads of up to {_LARGEST_HEAD} channels, model.head_dim is {head_dim}")
    return load(setting)


def load(package: str) -> FlashAttention:
    """Find a package's functions.

    Raises:
        ConfigError: it is not installed, or does not work here.
    """
    where, advice = f"parallel.attention: {package}", f"({_HOW_TO_INSTALL[package]}), or use auto"
    try:
        module = importlib.import_module(package)
        return FlashAttention(package, module.flash_attn_func, module.flash_attn_varlen_func, _OPTIONS[package])
    except ModuleNotFoundError as error:
        if error.name != package:
            raise ConfigError(f"{where}: needs {error.name}, which is not installed {advice}") from error
        raise ConfigError(f"{where}: the package is not installed {advice}") from error
    except AttributeError as error:
        raise ConfigError(f"{where}: the installed package has not the functions of version 2 {advice}") from error
    except (ImportError, OSError, RuntimeError) as error:
        # Compiled for another torch or GPU, most often.
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{where}: the package cannot be loaded: {reason} {advice}") from error


def _output(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    return result[0] if isinstance(result, tuple) else result
