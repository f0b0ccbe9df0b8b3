"""Run every implementation of every operation on its cases and compare it with the reference, on one device.

On a CPU, kernels in Triton run in Triton's interpreter, in a separate process: whether Triton interprets is
decided when it is imported. HIP kernels run as host code there, if there is a C++ compiler.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context

import torch
from torch import Tensor

from zslurm.kernels.case import Case, checks_of
from zslurm.kernels.dispatch import REFERENCE, Operation, failed_to_start, operations

OK, WRONG, FAILED, UNAVAILABLE, UNSUPPORTED, NO_CASES = (
    "ok",
    "wrong",
    "failed",
    "unavailable",
    "not supported",
    "no cases",
)


@dataclass(frozen=True)
class Checked:
    """What came of one implementation on one case.

    Attributes:
        status: ok, wrong (other numbers), failed (an error), unavailable (it cannot start here), not supported
            (it does not take the operands), or no cases (of the operation).
        error: largest difference, of the largest magnitude in the reference's result.
        message: why, if it is not ok.
    """

    operation: str
    case: str
    implementation: str
    status: str
    error: float | None = None
    message: str = ""

    @property
    def bad(self) -> bool:
        """Return whether the kernel is at fault."""
        return self.status in (WRONG, FAILED)


def check_all(device: torch.device, *, only: Sequence[str] = ()) -> Iterator[Checked]:
    """Check all operations on a device, or those whose folder is named."""
    with ExitStack() as stack:
        interpreter = None
        for operation in operations().values():
            if only and operation.name.partition(".")[0] not in only:
                continue
            cases = checks_of(operation.name)
            if not cases:
                yield Checked(operation.name, "", "", NO_CASES)
            for index, case in enumerate(cases):
                for implementation in operation.implementations:
                    if implementation.name == "triton" and device.type == "cpu":
                        interpreter = interpreter or stack.enter_context(_interpreter())
                        yield interpreter.submit(_interpreted, operation.name, index).result()
                    else:
                        yield check(operation, case, implementation.name, device)


def check(operation: Operation, case: Case, name: str, device: torch.device, *, ask: bool = True) -> Checked:
    """Compare one implementation with the reference on one case.

    Args:
        operation: what is computed.
        case: the operands.
        name: of the implementation.
        device: where it runs.
        ask: whether to ask the implementation if it supports the operands.
    """
    implementation = operation.implementation(name)
    inputs = case.make(device)
    lacks = implementation.supports(*inputs.args(), **inputs.kwargs) if ask else None

    def outcome(status: str, apart: float | None = None, message: str = "") -> Checked:
        return Checked(operation.name, case.name, name, status, apart, message)

    if lacks is not None:
        return outcome(UNSUPPORTED, message=f"does not take {lacks}")
    expected = case.make(device).run(operation.implementation(REFERENCE).run)
    try:
        results = inputs.run(implementation.run)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:  # of whatever kind: the next implementation is checked all the same
        status = UNAVAILABLE if failed_to_start(error) else FAILED
        return outcome(status, message=f"{type(error).__name__}: {error}".splitlines()[0])
    if name in case.exact:
        same = all(_same_bits(*pair) for pair in zip(results, expected, strict=True))
        wrong = "" if same else "is not the reference's bit by bit"
    else:
        wrong = ""
    apart = max(map(difference, results, expected), default=0.0)
    if not apart <= case.tolerance:
        wrong = f"differs by {apart:.2g} of the largest magnitude, more than {case.tolerance:.2g}"
    return outcome(WRONG if wrong else OK, apart, wrong)


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, of the largest magnitude that is expected; infinite for NaN in one alone."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if not found.numel():
        return 0.0
    found, expected = found.double(), expected.double()
    if not torch.equal(found.isfinite(), expected.isfinite()):
        return float("inf")
    largest = expected.nan_to_num(0, 0, 0).abs().max().item()
    apart = (found - expected).nan_to_num(0, 0, 0).abs().max().item()
    return apart / largest if largest else (float("inf") if apart else 0.0)


def _same_bits(found: Tensor, expected: Tensor) -> bool:
    integer_type = {2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
    return torch.equal(found.contiguous().view(integer_type), expected.contiguous().view(integer_type))


def _interpreted(operation: str, index: int) -> Checked:
    case = checks_of(operation)[index]
    return check(operations()[operation], case, "triton", torch.device("cpu"), ask=False)


def _interpreter() -> ProcessPoolExecutor:
    """Return a process in which Triton interprets; in this one nothing changes."""
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_start)
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        pool.submit(os.getpid).result()  # it starts with this environment
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
    return pool


def _start() -> None:
    torch.set_num_threads(1)
