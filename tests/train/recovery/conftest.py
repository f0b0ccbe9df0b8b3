"""Leaves torch as it was for the tests of other folders."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.distributed import Work

from zslurm.train.recovery.waits import WAITS


@pytest.fixture(autouse=True)
def own_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A wait for a collective is torch's own again after each test."""
    monkeypatch.setattr(Work, "wait", Work.wait)
    yield
    WAITS.resume()
