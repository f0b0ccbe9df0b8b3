"""Declare operators of torch.compile whose operands are a record."""

from __future__ import annotations

from typing import Any, get_type_hints

from torch import Tensor


def schema_of(record: type[Any]) -> str:
    """Return a NamedTuple's tensors as the schema of an operator has them: "Tensor hidden, Tensor? bias"."""
    hints = get_type_hints(record)
    return ", ".join(f"Tensor{'' if hint is Tensor else '?'} {name}" for name, hint in hints.items())
