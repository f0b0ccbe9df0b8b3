"""Builds of kernels are kept for this run of the tests, and shared by its processes."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest

from tests import forked
from tests.kernels.implementations import ON_A_GPU
from zslurm.kernels.cache import CACHE_VARIABLE
from zslurm.kernels.dispatch import operations


@pytest.fixture(autouse=True)
def kernel_cache(own_environment: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that this run's tests build kernels in."""
    cache = forked.place() / "kernels"
    monkeypatch.setenv(CACHE_VARIABLE, str(cache))
    return cache


@pytest.fixture(autouse=True)
def no_choice_of_another_test() -> None:
    """Let every test choose again: tests put other architectures and packages in place of this machine's."""
    for operation in operations().values():
        operation.forget_choices()


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is not asked for by its mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of an implementation on a GPU, wherever they are parametrised with its name."""
    for item in items:
        values = (
            item.callspec.params.values()
            if isinstance(item, pytest.Function) and hasattr(item, "callspec")
            else ()
        )
        names = chain.from_iterable(value if isinstance(value, tuple) else (value,) for value in values)
        if any(isinstance(name, str) and name.endswith(ON_A_GPU) for name in names):
            item.add_marker(pytest.mark.gpu)
