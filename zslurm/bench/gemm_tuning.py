"""`python -m zslurm.bench.gemm_tuning < CALLS`: tune products on this machine's first GPU; a JSON line for each.

Standard input has the calls, and how long to take. Standard output gets an object in each line: `{"call": N,
"figures": ...}` when a call is tuned, `{"call": N, "skipped": REASON}` if it cannot be, and at the end one with
the results, the card and the versions. No call is begun when the time is over.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, TextIO


def run(calls: list[dict[str, Any]], seconds: float, out: TextIO, tunable: Any, device: str = "cuda") -> None:
    """Tune calls within a time limit, the largest first, and write the lines."""
    import torch

    from zslurm.kernels.tunable_op import agrees, tune

    def line(**fields: Any) -> None:
        out.write(json.dumps(fields) + "\n")
        out.flush()

    tunable.set_filename(os.devnull)  # else torch writes a file next to the command
    refused: set[tuple[str, str]] = set()
    began = time.monotonic()
    for index in sorted(
        range(len(calls)), key=lambda call_index: -calls[call_index]["rows"] * calls[call_index]["outputs"]
    ):
        if time.monotonic() - began > seconds:
            line(call=index, skipped="no time was left")
            continue
        before = {row[:2] for row in tunable.get_results()}
        try:
            figures = tune(calls[index], tunable, device)
        except torch.OutOfMemoryError:
            line(call=index, skipped="its operands do not fit the GPU's memory")
            continue
        if not agrees(figures):
            refused |= {row[:2] for row in tunable.get_results()} - before
            line(call=index, skipped="the fastest solution gives other results; torch's default stays")
            continue
        line(call=index, figures=figures)
    on_gpu = device == "cuda"
    version = torch.version
    runtime = f"ROCm {version.hip}" if version.hip else f"CUDA {version.cuda}" if version.cuda else "no GPU"
    line(
        device=torch.cuda.get_device_name() if on_gpu else device,
        torch=torch.__version__,
        runtime=runtime,
        validators=dict(tunable.get_validators()),
        results=[list(row) for row in tunable.get_results() if tuple(row[:2]) not in refused],
    )


def main() -> int:
    """Read the calls and tune them; exit code 3 if torch sees no GPU."""
    os.environ.pop("PYTORCH_TUNABLEOP_FILENAME", None)
    import torch

    request = json.load(sys.stdin)
    if not torch.cuda.is_available():
        return 3
    tunable = torch.cuda.tunable
    tunable.set_max_tuning_duration(request["solution_ms"])
    run(request["calls"], request["seconds"], sys.stdout, tunable)
    return 0


if __name__ == "__main__":
    sys.exit(main())
