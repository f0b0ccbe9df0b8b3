"""Fixtures of submission tests."""

from __future__ import annotations

from tests.cluster.conftest import site

__all__ = ["site"]
