"""A healthy node for each test to break."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doctor.nodes import Node
from zslurm.doctor.checks import gpu


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setattr(gpu, "PYTHON", "torch-python")
    return Node(tmp_path / "node0")
