"""Does a GPU compute what it should? `python -m zslurm.aegis.gpu_test GPU` tests one, and answers for its node.

NaN that comes first from one and the same GPU again and again may be the GPU's fault or the model's. So the GPU
does what it did while it trained, matrix products, on numbers whose product is known:

    the product of integers small enough for every partial sum to be exact must be exact, in fp32 and in bf16;
    the product of random bf16 matrices must be finite, within its rounding of fp64's, and the same every time.

A GPU that fails either is broken. One that passes may still be: the test takes seconds, the fault took hours.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zslurm.config.spec import RunSpec
from zslurm.errors import ZslurmError
from zslurm.slurm.survey import answer, survey, survey_here

_TIMEOUT_S = 300.0
_REPEATS = 20
_N_GPU, _N_CPU = 4096, 256


@dataclass(frozen=True)
class Tested:
    """What came of a test.

    Attributes:
        ok: whether the GPU computes correctly; None where the test could not be run.
        reason: what it computes wrongly, or why the test could not be run.
    """

    ok: bool | None
    reason: str | None = None


def try_gpu(node: str, gpu: str, job_id: str | None, spec: RunSpec, environ: Mapping[str, str]) -> Tested:
    """Test a GPU of the job.

    Args:
        node: the node.
        gpu: local index of the GPU.
        job_id: the job that this process runs in; None: the GPU is on this machine.
        spec: the run.
        environ: of the job.
    """
    cluster = spec.cluster
    options = []
    if cluster.gpus_per_node:
        kind = f"{cluster.gpu_type}:" if cluster.gpu_type else ""
        options = [f"--gpus-per-node={kind}{cluster.gpus_per_node}", "--gpu-bind=none"]
    try:
        if job_id is None:
            found = survey_here(__name__, gpu, timeout_s=_TIMEOUT_S, environ=environ)
        else:
            found = survey(
                __name__, gpu, nodes=[node], options=options, job_id=job_id, timeout_s=_TIMEOUT_S, environ=environ
            )[node]
    except ZslurmError as error:
        return Tested(None, str(error))
    if not isinstance(found.value, dict):
        return Tested(None, found.error or "the test said nothing")
    return Tested(found.value.get("reason") is None, found.value.get("reason"))


def fault_of(device: Any) -> str | None:
    """What a torch device computes wrongly, in one line; None where nothing is wrong."""
    import torch

    n = _N_GPU if device.type == "cuda" else _N_CPU
    generator = torch.Generator().manual_seed(7)
    # Entries of at most 3 in n terms: every partial sum is below 2^24, so fp32 accumulates without rounding.
    small = torch.randint(-3, 4, (n, n), generator=generator)
    exact = (small[:64].double() @ small.double()).to(torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        on_device = small.to(device, dtype)
        product = (on_device[:64] @ on_device).float().cpu()
        if not torch.equal(product, exact.to(dtype).float()):
            wrong = int((product != exact.to(dtype).float()).sum())
            return f"{wrong} of {product.numel()} entries of an exact product in {_name(dtype)} are wrong"
    drawn = torch.randn(n, n, generator=generator).to(torch.bfloat16)
    expected = drawn[:64].double() @ drawn.double()
    left = drawn.to(device)
    first = left @ left
    for _ in range(_REPEATS):
        again = left @ left
        if not torch.isfinite(again).all():
            return "a product of finite bf16 matrices is not finite"
        if not torch.equal(first, again):
            return "the same product of bf16 matrices came out differently"
    # bf16 rounds to 2^-9 of the result; the terms add up in fp32.
    error = (first[:64].double().cpu() - expected).abs()
    if bool((error > 2**-8 * expected.abs() + 2**-12 * n).any()):
        return f"a product of bf16 matrices is off by {error.max():.3g}"
    return None


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def main(arguments: list[str]) -> None:
    """Test the GPU that is named, or this node's CPU where it has none."""
    import torch

    torch.set_num_threads(1)
    index = int(arguments[0]) if arguments and arguments[0].isdecimal() else 0
    on_gpu = torch.cuda.is_available() and index < torch.cuda.device_count()
    device = torch.device("cuda", index) if on_gpu else torch.device("cpu")
    # As the trainer does: products in fp32 mean fp32.
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        reason = fault_of(device)
    except RuntimeError as error:
        reason = f"it cannot compute: {' '.join(str(error).split())[:200]}"
    answer({"device": str(device), "reason": reason}, os.environ)


if __name__ == "__main__":
    main(sys.argv[1:])
