"""Torch's TunableOp: tune products once, offline, and have ranks use the results without ever tuning or writing.

On ROCm TunableOp tries the solutions of hipBLASLt and rocBLAS for a call and keeps the fastest. On CUDA it knows
torch's default alone, so a table has nothing to choose there.

What torch does with files decides how ranks get theirs (aten/src/ATen/cuda/tunable/Tunable.cpp):

- The name in PYTORCH_TUNABLEOP_FILENAME gets the device's ordinal: in place of `%d`, else before the last dot. A
  name that is given by `set_filename` first gets none, and the variable is not read then.
- When the first product is made, torch reads that file and opens it for appending, even with tuning off, which
  creates a missing file.
- `read_file` reads any other file, compares its validators with the libraries, and returns whether it took it.

So ranks name /dev/null as the file, and load the table by `read_file`: all ranks read one file, and torch never
has its name to write to. PYTORCH_TUNABLEOP_TUNING=0, which wins over every call, keeps tuning off.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

ENABLED, TUNING = "PYTORCH_TUNABLEOP_ENABLED", "PYTORCH_TUNABLEOP_TUNING"
_NO_FILE = os.devnull
_REPEATS = 20
_TOLERANCE = 2e-2  # of the largest element; solutions differ by the order of their sums and bf16's last bits


def use_table(csv: Path, tunable: Any = torch.cuda.tunable) -> str | None:
    """Let products use a table from now on, never tune, and never write; to be called before the first product.

    Returns:
        Why torch does not take the table; None if torch uses it.
    """
    os.environ |= {TUNING: "0", "PYTORCH_TUNABLEOP_RECORD_UNTUNED": "0"}  # torch reads them with its first product
    tunable.set_filename(_NO_FILE)
    tunable.tuning_enable(False)
    tunable.record_untuned_enable(False)
    if not tunable.read_file(str(csv)):
        return "torch refuses it (PYTORCH_TUNABLEOP_VERBOSE=1 shows why)"
    tunable.enable(True)
    return None


def tune(call: Mapping[str, Any], tunable: Any = torch.cuda.tunable, device: str = "cuda") -> dict[str, float]:
    """Tune the passes of one `F.linear` on this GPU; results are in `tunable.get_results()` then.

    Args:
        call: dtype, rows, outputs, inputs, bias and passes of a `LinearCall`.
        tunable: torch's module; a test gives another.
        device: where to multiply.

    Returns:
        Of each pass the seconds before and after, as `default.PASS` and `tuned.PASS`; `error.PASS` is how far
        tuned results are from the default's, as a share of their largest element.

    Raises:
        torch.OutOfMemoryError: the operands do not fit.
    """
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}[call["dtype"]]
    x = torch.randn(call["rows"], call["inputs"], device=device, dtype=dtype)
    weight = torch.randn(call["outputs"], call["inputs"], device=device, dtype=dtype)
    bias = torch.randn(call["outputs"], device=device, dtype=dtype) if call["bias"] else None
    grad = torch.randn(call["rows"], call["outputs"], device=device, dtype=dtype)
    actions = passes(x, weight, bias, grad)
    figures = {}
    for name in call["passes"]:
        action = actions[name]
        tunable.enable(False)
        expected = action()
        figures[f"default.{name}"] = _seconds(action, device)
        tunable.enable(True)
        tunable.tuning_enable(True)
        product = action()  # tunes
        tunable.tuning_enable(False)
        figures[f"tuned.{name}"] = _seconds(action, device)
        tunable.enable(False)
        apart = (product.float() - expected.float()).abs().amax() / expected.float().abs().amax()
        figures[f"error.{name}"] = apart.item()
    return figures


def agrees(figures: Mapping[str, float]) -> bool:
    """Return whether what `tune` found gives the default's results, to rounding."""
    return all(value <= _TOLERANCE for key, value in figures.items() if key.startswith("error."))


def passes(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, grad: torch.Tensor
) -> dict[str, Callable[[], torch.Tensor]]:
    """Return the three passes of `F.linear` as the model makes them: forward, and torch's own gradients."""
    wants_x, wants_weight = x.requires_grad_(), weight.requires_grad_()

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return F.linear(x, weight, bias)

    y = F.linear(wants_x, wants_weight, bias)

    def gradient_of(operand: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: torch.autograd.grad(y, operand, grad, retain_graph=True)[0]

    return {"forward": forward, "input gradient": gradient_of(x), "weight gradient": gradient_of(weight)}


def _seconds(action: Callable[[], object], device: str) -> float:
    """Return the mean time of an action on a GPU, by its own clock; 0 elsewhere."""
    if not device.startswith("cuda"):
        action()
        return 0.0
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    action()
    begin.record()
    for _ in range(_REPEATS):
        action()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / _REPEATS
