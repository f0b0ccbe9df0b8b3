"""Test whether a GPU computes what it should: `python -m zslurm.aegis.supervisor.gpu_test GPU WHY`.

NaN that comes first from one and the same GPU again and again may be the GPU's fault or the model's. So the GPU
does what it did while it trained, matrix products, on numbers whose product is known:

    the product of integers small enough for every partial sum to be exact must be exact, in fp32 and in bf16;
    the product of random bf16 matrices must be finite, within its rounding of fp64's, and the same every time.

A GPU that fails either is broken. One that passes may still be: the test takes seconds, the fault took hours.

Only the device that ran the test is certified, and the answer names it. A GPU that torch does not show if the
node should have it (the profile has GPUs, Slurm allocated one, a variable makes one visible) fails the test. Only
if the run computes on CPUs is the CPU tested in its place, and then the answer is about the CPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zslurm.checkpoint_tools.quantities import counted
from zslurm.config.spec import RunSpec
from zslurm.core.errors import ZslurmError
from zslurm.slurm.environment import gpus_of_slurm
from zslurm.slurm.on_nodes.run_on_nodes import answer, run_here, run_on_nodes

_TIMEOUT_S = 300.0
_REPEATS = 20
_N_GPU, _N_CPU = 4096, 256
_ON_CPU = "cpu"
_VISIBLE_GPUS = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""Variables that give a process GPUs."""
_NO_GPU = ("-1", "NoDevFiles", "(null)")


@dataclass(frozen=True)
class Tested:
    """What came of a test.

    Attributes:
        ok: whether the GPU computes correctly; None if the test could not be run.
        reason: what it computes wrongly, or why the test could not be run.
        device: what ran the test: a GPU with its index, model and PCI address or UUID, or `CPU`; None: nothing.
    """

    ok: bool | None
    reason: str | None = None
    device: str | None = None


def try_gpu(node: str, gpu: str, job_id: str | None, spec: RunSpec, environ: Mapping[str, str]) -> Tested:
    """Test a GPU of the job, by its index on the node or its PCI address; of this machine without a job."""
    why, options = _why_expected(spec), spec.cluster.srun_gpu_options()
    try:
        if job_id is None:
            tested = run_here(__name__, gpu, why, timeout_s=_TIMEOUT_S, environ=environ)
        else:
            tested = run_on_nodes(
                __name__, gpu, why, nodes=[node], options=options, job_id=job_id, timeout_s=_TIMEOUT_S,
                environ=environ,
            )[node]  # fmt: skip
    except ZslurmError as error:
        return Tested(None, str(error))
    if not isinstance(tested.value, dict):
        return Tested(None, tested.error or "the test printed nothing")
    reason, device = tested.value.get("reason"), tested.value.get("device")
    return Tested(reason is None, reason, device)


def _why_expected(spec: RunSpec) -> str:
    """Return a reason why a node of the run should have GPUs; `cpu`: it computes on CPUs; empty: it knows."""
    if spec.parallel.device == "cpu":
        return _ON_CPU
    if spec.cluster.gpus_per_node:
        return f"cluster.gpus_per_node: {spec.cluster.gpus_per_node}"
    return "parallel.device: cuda" if spec.parallel.device == "cuda" else ""


def why_visible(environ: Mapping[str, str]) -> str:
    """Return which variable of Slurm or of the runtime gives this process a GPU; empty if none does."""
    for name in _VISIBLE_GPUS:
        value = environ.get(name, "").strip()
        if value and value not in _NO_GPU:
            return f"{name}={value}"
    return gpus_of_slurm(environ)


@dataclass(frozen=True)
class Device:
    """What a test runs on.

    Attributes:
        name: as torch calls it: `cuda:3`, `cpu`.
        shown: for people: `GPU 3 (AMD Instinct MI300X, 0000:c1:00.0)`, `CPU`.
    """

    name: str
    shown: str


_CPU = Device("cpu", "CPU")


def choose_device(gpu: str, why: str, allocated: str, cuda: Any) -> Device | str:
    """Choose what to test; return why nothing can be, if the GPU is not there and should be.

    Args:
        gpu: index of the GPU as torch counts, or its PCI address.
        why: why the run expects GPUs; empty if it does not; `cpu`: it computes on CPUs.
        allocated: which variable gives this process GPUs (`why_visible`); empty: none does.
        cuda: torch.cuda.
    """
    if why == _ON_CPU:
        return _CPU
    count = cuda.device_count() if cuda.is_available() else 0
    if not count:
        expected = why or allocated
        return f"no GPU is visible, and the node should have one ({expected})" if expected else _CPU
    devices = [cuda.get_device_properties(index) for index in range(count)]
    if gpu.isdecimal():
        index = int(gpu)
    else:
        index = next(
            (number for number, device in enumerate(devices) if pci_address(device) == gpu.lower()), count
        )
    if index >= count and gpu.isdecimal() and not why:
        return _CPU  # as the ranks do with parallel.device: auto, where there are more of them than GPUs
    if index >= count:
        return f"GPU {gpu} is not visible: there are {count}"
    uuid = getattr(devices[index], "uuid", None)
    marks = [devices[index].name, pci_address(devices[index]) or (f"UUID {uuid}" if uuid else None)]
    return Device(f"cuda:{index}", f"GPU {index} ({', '.join(mark for mark in marks if mark)})")


def pci_address(properties: Any) -> str | None:
    """Return the PCI address of a GPU, such as `0000:c1:00.0`; None if this torch does not know it."""
    if not hasattr(properties, "pci_domain_id"):
        return None
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def fault_of(device: Any) -> str | None:
    """Return what a torch device computes wrongly, in one line; None if nothing is wrong."""
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
            name = str(dtype).removeprefix("torch.")
            return f"{wrong} of {counted(product.numel(), 'entry')} of an exact product in {name} are wrong"
    drawn = torch.randn(n, n, generator=generator).to(torch.bfloat16)
    expected = drawn[:64].double() @ drawn.double()
    matrix = drawn.to(device)
    first = matrix @ matrix
    for _ in range(_REPEATS):
        again = matrix @ matrix
        if not torch.isfinite(again).all():
            return "a product of finite bf16 matrices is not finite"
        if not torch.equal(first, again):
            return "the same product of bf16 matrices came out differently"
    # bf16 rounds to 2^-9 of the result; the terms add up in fp32.
    error = (first[:64].double().cpu() - expected).abs()
    if bool((error > 2**-8 * expected.abs() + 2**-12 * n).any()):
        return f"a product of bf16 matrices is off by {error.max():.3g}"
    return None


def main(arguments: list[str]) -> None:
    """Test the GPU that is named, or this node's CPU if the run computes on CPUs."""
    import torch

    torch.set_num_threads(1)
    gpu, why = (*arguments, "") if len(arguments) == 1 else (arguments[0], arguments[1])
    device = choose_device(gpu, why, why_visible(os.environ), torch.cuda)
    if isinstance(device, str):
        answer({"device": None, "reason": device}, os.environ)
        return
    # As the trainer does: products in fp32 mean fp32.
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        reason = fault_of(torch.device(device.name))
    except RuntimeError as error:
        reason = f"it cannot compute: {' '.join(str(error).split())[:200]}"
    answer({"device": device.shown, "reason": reason}, os.environ)


if __name__ == "__main__":
    main(sys.argv[1:])
