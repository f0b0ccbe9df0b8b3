"""Every implementation on the cases of its operation: what is right, wrong, failing and missing."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from zslurm.kernels.arch import CPU
from zslurm.kernels.case import TOLERANCE, Call, Case, benchmarks_of, checks_of
from zslurm.kernels.dispatch import Implementation, Operation, anywhere, operations
from zslurm.kernels.harness.comparison import check, check_all, difference

DEVICE = torch.device("cpu")


def doubled(x: Tensor) -> Tensor:
    return x * 2


def operation(run: Callable[[Tensor], Tensor], lacks: str | None = None) -> Operation:
    return Operation(
        name="double",
        reference=doubled,
        candidates=[(anywhere, Implementation("other", run, lambda x: lacks))],
        check=lambda x: None,
        device=lambda x: x.device,
        sizes=lambda x: {"numel": x.numel()},
    )


def make(device: torch.device) -> Call:
    x = torch.tensor([1.0, 2.0, -4.0], device=device)
    return Call(lambda: (x,), lambda y: [y])


CASE = Case("double", "three", make, TOLERANCE[torch.float32])
EXACT = Case("double", "three", make, TOLERANCE[torch.float32], exact=frozenset({"other"}))


def fails(error: Exception) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        raise error

    return run


@pytest.mark.parametrize(
    ("run", "case", "status", "message"),
    [
        (lambda x: x + x, CASE, "ok", ""),
        (lambda x: x + x, EXACT, "ok", ""),
        (lambda x: x * (2 + 1e-6), CASE, "ok", ""),
        (lambda x: x * (2 + 1e-6), EXACT, "wrong", "is not the reference's bit by bit"),
        (lambda x: x * 2.5, CASE, "wrong", "differs by 0.25 of the largest magnitude, more than 1e-05"),
        (lambda x: x * torch.nan, CASE, "wrong", "differs by inf of the largest magnitude"),
        (lambda x: (x * 2)[:2], CASE, "wrong", "differs by inf"),
        (fails(ImportError("no module named triton")), CASE, "unavailable", "ImportError: no module named triton"),
        (fails(RuntimeError("an illegal\naddress")), CASE, "failed", "RuntimeError: an illegal"),
    ],
    ids=["equal", "same bits", "close", "other bits", "wrong", "NaN", "other shape", "missing", "failing"],
)
def test_what_came_of_an_implementation(run: Any, case: Case, status: str, message: str) -> None:
    found = check(operation(run), case, "other", DEVICE)
    assert found.status == status
    assert message in found.message
    assert found.bad == (status in ("wrong", "failed"))


def test_operands_that_it_does_not_take() -> None:
    found = check(operation(doubled, lacks="short operands"), CASE, "other", DEVICE)
    assert (found.status, found.message, found.bad) == ("not supported", "does not take short operands", False)


def test_nan_and_infinity_where_they_are_expected() -> None:
    expected = torch.tensor([1.0, torch.nan, torch.inf])
    assert difference(expected.clone(), expected) == 0
    assert difference(torch.zeros(3), torch.zeros(3)) == 0
    assert difference(torch.ones(3), torch.zeros(3)) == torch.inf


def test_muon_on_a_cpu() -> None:
    found = list(check_all(DEVICE, only=["muon"]))
    assert {(each.implementation, each.status) for each in found} == {("hip", "ok"), ("torch", "ok")}
    assert {each.operation for each in found} == {"muon.momentum", "muon.update"}


def test_triton_in_its_interpreter_on_a_cpu() -> None:
    pytest.importorskip("triton")
    found = []
    for each in check_all(DEVICE, only=["grouped_gemm"]):
        # Triton may be imported here while the checks run: on a GPU it must not interpret then.
        assert "TRITON_INTERPRET" not in os.environ
        found.append(each)
    assert {each.status for each in found if each.implementation == "triton"} == {"ok"}
    assert not any(each.bad for each in found)


@pytest.mark.parametrize("name", operations())
def test_every_operation_on_a_cpu(name: str) -> None:
    of_operation, case = operations()[name], checks_of(name)[0]
    others = [each.name for each in of_operation.implementations if each.name != "triton"]
    found = [check(of_operation, case, other, DEVICE) for other in others]
    assert [each for each in found if each.bad] == []


@pytest.mark.soak
def test_all_on_a_cpu() -> None:
    pytest.importorskip("triton")
    found = list(check_all(DEVICE))
    assert [each for each in found if each.bad] == []
    right = {each.operation for each in found if each.implementation == "triton" and each.status == "ok"}
    in_triton = {name for name, each in operations().items() if "triton" in {one.name for one in each.all()}}
    assert right == in_triton


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_all_on_a_gpu() -> None:
    found = list(check_all(torch.device("cuda", 0)))
    assert [each for each in found if each.bad] == []
    assert any(each.status == "ok" for each in found)


@pytest.mark.parametrize("name", operations())
def test_cases_are_right_and_distinct(name: str) -> None:
    """What the checks and the benchmarks hand over is what the operation takes."""
    of_operation = operations()[name]
    checked, timed = checks_of(name), benchmarks_of(name, small=True)
    for cases in (checked, timed, benchmarks_of(name, small=False)):
        assert cases, "`zslurm dev kernels check` and `bench` cover every operation"
        assert len({case.name for case in cases}) == len(cases)
    for case in (*checked, *timed):
        call = case.make(DEVICE)
        of_operation.check(*call.args(), **call.kwargs)
        if case in timed:
            assert case.axis in of_operation.sizes(*call.args(), **call.kwargs)
            assert of_operation.device(*call.args(), **call.kwargs).type == CPU.name
