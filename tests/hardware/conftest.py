"""Fixtures of the hardware readers' tests."""

from __future__ import annotations

from tests.doctor.conftest import node

__all__ = ["node"]
