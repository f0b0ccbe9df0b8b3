"""The tests of what runs on a GPU are marked, so that `make gpu` finds them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.kernels.conftest import pytest_collection_modifyitems
from tests.kernels.implementations import implementations
from zslurm.kernels.symmetric_product import symmetric_product


def test_the_variants_on_a_gpu_get_the_mark(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    names = list(implementations(symmetric_product))
    assert "triton on a GPU" in names
    assert "reference on a GPU" in names

    def item(name: str) -> pytest.Function:
        made = pytest.Function.from_parent(request.node.parent, name="test", callobj=lambda: None)
        made.callspec = SimpleNamespace(params={"name": name})  # type: ignore[attr-defined]
        return made

    items: list[pytest.Item] = [item(name) for name in names]
    pytest_collection_modifyitems(items)
    marked = [name for name, each in zip(names, items, strict=True) if each.get_closest_marker("gpu")]
    assert marked == [name for name in names if name.endswith("on a GPU")]
