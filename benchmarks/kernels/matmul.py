"""fp32 products on a CPU: `zslurm.kernels.matmul` against torch.mm, on one thread.

The three products of a linear map (forward, gradient of the input, gradient of the weight) of the tiny recipe's
and the larger model's shapes, turn by turn. Where the processor is not one of AMD with AVX-512, both are the same.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.common import alternate, write_result
from zslurm.kernels.matmul import kernel_per_shape, matmul

SHAPES = {  # tokens, inputs, outputs
    "tiny: attention": (1024, 128, 256),
    "tiny: an expert, first": (256, 128, 512),
    "tiny: an expert, second": (256, 256, 128),
    "tiny: head": (512, 128, 4096),
    "larger: attention": (1024, 512, 512),
    "larger: an expert, first": (64, 512, 1024),
    "larger: head": (256, 512, 8192),
}
RUNS = 50


def run() -> None:
    """Measure and write results/matmul.json."""
    torch.set_num_threads(1)
    write_result(
        "matmul",
        {
            "torch": torch.__version__,
            "threads": 1,
            "by_onednn": kernel_per_shape(torch.empty(0)),
            "products": [row for name, sizes in SHAPES.items() for row in _rows(name, *sizes)],
        },
    )


def _rows(name: str, tokens: int, inputs: int, outputs: int) -> list[dict[str, Any]]:
    x_TI, weight_OI, gradient_TO = (
        torch.randn(shape) for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
    )
    operands = {
        "forward": (x_TI, weight_OI.T),
        "gradient of the input": (gradient_TO, weight_OI),
        "gradient of the weight": (gradient_TO.T, x_TI),
    }
    rows = []
    for what, (left, right) in operands.items():
        timings = alternate(
            {"ours": partial(matmul, left, right), "torch": partial(torch.mm, left, right)},
            runs=RUNS,
            warm_up=5,
        )
        gflop = 2e-9 * tokens * inputs * outputs
        rows.append(
            {
                "product": f"{name}, {what}",
                "speed_ratio": round(timings["torch"].median / timings["ours"].median, 2),
                "ours_gflops": round(gflop / timings["ours"].median),
                "torch_gflops": round(gflop / timings["torch"].median),
            }
        )
    return rows
