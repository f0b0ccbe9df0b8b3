"""A healthy node, as in the tests of the doctor."""

from tests.doctor.conftest import node

__all__ = ["node"]
