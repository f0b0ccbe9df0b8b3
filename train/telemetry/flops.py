"""How much arithmetic a token takes, and what share of the device's peak a run reaches (MFU). No torch here.

FLOPs of forward and backward for one token: 6 for each weight that the token is multiplied with (two in forward,
four in backward; Kaplan et al., arXiv 2001.08361), and for attention, as in PaLM (arXiv 2204.02311, appendix B),
6 for each channel of a query head and each key that the query may see, twice (scores and values):

    attention    12 * layers * query_heads * head_dim * (context + 1) / 2

PaLM leaves causality out, and so counts twice as much: (context + 1) / 2 is the mean number of keys that a token
sees, and work that the model does not ask for is not counted here. With data.isolate_documents it asks for less
still; that is not subtracted, so that MFU is then a little too high.

Which weights a token is multiplied with: every matrix and convolution outside of the experts, the output head (the
tied embedding, once: looking a token up is not a product), and those of the experts it is sent to. A choice that
falls on the skip class costs nothing, so the measured share of skipped choices counts. Norms, scales, softmax,
routing and the optimizer are not counted, and neither is what is computed twice: recomputed activations make the
step longer, not the work larger (this is MFU, not HFU).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from zslurm.train.config import ModelConfig
from zslurm.train.shapes import TensorKind, tensor_table


def token_flops(model: ModelConfig, context: int, skip_share: float) -> float:
    """Return the FLOPs of the mean token, forward and backward, in sequences of `context` tokens.

    `skip_share`, in [0, 1], is the share of all choices that fall on the skip class. Formula and sources are
    above.
    """
    table = tensor_table(model)
    always = sum(
        row.numel for row in table if row.kind in (TensorKind.EMBEDDING, TensorKind.MATRIX, TensorKind.CONVOLUTION)
    )
    expert = sum(row.numel for row in table if row.kind is TensorKind.EXPERTS) / model.experts
    attention = 2 * model.layers * model.query_heads * model.head_dim * (context + 1) / 2
    return 6 * (always + attention + model.experts_per_token * (1 - skip_share) * expert)


@dataclass(frozen=True)
class Peak:
    """Peak of a device: matrix products, dense, in TFLOP/s."""

    words: tuple[str, ...]  # words of torch's name for the device, in capitals
    units: int  # compute units (AMD) or multiprocessors (NVIDIA) of the whole device
    bf16: float
    fp32: float
    source: str  # where the figures come from


_AMD = "AMD's data sheet"
_NVIDIA = "NVIDIA's data sheet: bf16 is half of the figure with sparsity, fp32 the one without TF32"

PEAKS = (
    Peak(("MI355X",), 256, 2516.6, 157.3, _AMD),
    Peak(("MI350X",), 256, 2306.9, 144.2, _AMD),
    Peak(("MI325X",), 304, 1307.4, 163.4, _AMD),
    Peak(("MI300X",), 304, 1307.4, 163.4, _AMD),
    Peak(("MI300A",), 228, 980.6, 122.6, _AMD),
    Peak(("MI250X",), 110, 191.5, 47.9, f"{_AMD}, halved: torch sees each of its two dies as a device"),
    Peak(("GH200",), 132, 989.4, 67.0, _NVIDIA),
    Peak(("H200", "NVL"), 132, 835.5, 60.0, _NVIDIA),
    Peak(("H200",), 132, 989.4, 67.0, _NVIDIA),
    Peak(("H100", "NVL"), 132, 835.5, 60.0, _NVIDIA),
    Peak(("H100", "PCIE"), 114, 756.5, 51.0, _NVIDIA),
    Peak(("H100",), 132, 989.4, 67.0, _NVIDIA),
    Peak(("A100",), 108, 312.0, 19.5, _NVIDIA),
)
"""The first row whose words are all among the device's counts: rows of variants come before their family's."""


def peak_of(device_name: str, units: int, dtype: str) -> float | None:
    """Return the peak of a device in FLOP/s; None if the table does not know it in the format `dtype`.

    The name is torch.cuda.get_device_name's, such as "AMD Instinct MI300X", and `units` what torch calls
    multi_processor_count. A part of a device (a MIG instance, a partition of an MI300X) may have the name of the
    whole and has fewer units: it has no peak here.
    """
    words = set(re.split(r"[\W_]+", device_name.upper()))
    for row in PEAKS:
        if words.issuperset(row.words):
            return {"bf16": row.bf16 * 1e12, "fp32": row.fp32 * 1e12}.get(dtype) if units == row.units else None
    return None
