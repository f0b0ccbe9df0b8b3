"""A healthy node for each test to break."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doctor.nodes import Node


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "node0")
