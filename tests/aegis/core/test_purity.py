"""The core of Aegis depends only on what is reported to it, so that it can be simulated."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import zslurm.aegis.core

CORE = Path(zslurm.aegis.core.__file__).parent
STANDARD_LIBRARY = frozenset(
    (
        "__future__",
        "bisect",
        "collections",
        "dataclasses",
        "enum",
        "itertools",
        "json",
        "re",
        "statistics",
        "typing",
    )
)
"""Modules of Python that read no clock, start nothing and draw nothing."""
EFFECTS = frozenset(("open", "print", "input", "exec", "eval", "__import__"))


def sources() -> list[Path]:
    return sorted(CORE.rglob("*.py"))


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(CORE)))
def test_a_file_of_the_core_reads_no_clock_and_touches_no_file(path: Path) -> None:
    assert effects_in(path.read_text(encoding="utf-8")) == set()


@pytest.mark.parametrize(
    ("source", "effect"),
    [
        ("import time", "time"),
        ("from os import path", "os"),
        ("def load():\n    import random.x", "random"),
        ("open('x')", "open"),
        ("path.read_text()", "read_text"),
        ("from dataclasses import dataclass\nfrom zslurm.aegis.types import Fault", None),
    ],
)
def test_an_effect_is_found(source: str, effect: str | None) -> None:
    assert effects_in(source) == ({effect} if effect else set())


def effects_in(source: str) -> set[str]:
    """Return the modules that source imports and must not, and the calls in it that reach outside."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules = {alias.name.partition(".")[0] for alias in node.names}
            found |= modules - STANDARD_LIBRARY - {"zslurm"}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module).partition(".")[0]} - STANDARD_LIBRARY - {"zslurm"}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found |= {node.func.id} & EFFECTS
        elif isinstance(node, ast.Attribute):
            found |= {node.attr} & {"read_text", "write_text", "read_bytes", "write_bytes", "monotonic"}
    return found
