"""The tests of what runs on a GPU are marked, so that `make gpu` finds them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import pytest_collection_modifyitems
from tests.kernels.implementations import implementations, moved
from zslurm.kernels.experts import Order, sort
from zslurm.kernels.grouped_gemm import OPERATIONS, Groups
from zslurm.kernels.symmetric_product import symmetric_product


def test_the_variants_on_a_gpu_get_the_mark(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    names = list(implementations(symmetric_product))
    assert "triton on a GPU" in names
    assert "reference on a GPU" in names

    def item(parameter: object) -> pytest.Function:
        made = pytest.Function.from_parent(request.node.parent, name="test", callobj=lambda: None)
        made.callspec = SimpleNamespace(params={"name": parameter})  # type: ignore[attr-defined]
        return made

    for alone in (True, False):  # or a pair of names, as of forward and backward
        items: list[pytest.Item] = [item(name if alone else (name, "reference")) for name in names]
        pytest_collection_modifyitems(items)
        marked = [name for name, each in zip(names, items, strict=True) if each.get_closest_marker("gpu")]
        assert marked == [name for name in names if name.endswith("on a GPU")]


def test_all_operands_are_moved_and_the_reference_takes_what_another_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Tensor, "cuda", lambda tensor: tensor.to("meta"))
    order = sort(torch.zeros(4, 1, dtype=torch.int64), 2, 1)
    groups, found_order, rest = moved((Groups(order.ends_E), order, 3))
    assert groups.ends_E.device.type == "meta"
    assert isinstance(found_order, Order)
    assert {each.device.type for each in found_order} == {"meta"}
    assert rest == 3
    monkeypatch.setattr(Tensor, "cuda", Tensor.clone)
    runs = implementations(OPERATIONS[0])
    operands = (torch.randn(4, 3), torch.randn(1, 3, 5), Groups(order.ends_E))
    for name in ("triton", "aiter"):  # which do not take tensors on a CPU
        assert torch.equal(runs[f"{name} on a GPU"](*operands), operands[0] @ operands[1][0])
