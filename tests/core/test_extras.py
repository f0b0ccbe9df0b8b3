"""A missing extra is one line that names it, with exit code 2; any other missing module is a defect."""

from __future__ import annotations

import importlib.util

import pytest

from tests.cli.commands import Zslurm
from zslurm.core.errors import Exit
from zslurm.core.extras import EXTRA_OF, MissingExtra, missing_extra, require


@pytest.fixture
def zslurm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Zslurm:
    return Zslurm(monkeypatch, capsys)


@pytest.mark.parametrize(("package", "extra"), EXTRA_OF.items())
def test_each_optional_package_names_its_extra(package: str, extra: str) -> None:
    error = missing_extra(ModuleNotFoundError(f"No module named '{package}.nn'", name=f"{package}.nn"))
    assert error is not None and error.exit_code == Exit.USAGE
    assert f"pip install 'zslurm-train[{extra}]'" in str(error)


def test_a_module_of_no_extra_is_not_explained_away() -> None:
    assert missing_extra(ModuleNotFoundError("No module named 'zslurm.nothing'", name="zslurm.nothing")) is None
    assert missing_extra(ImportError("cannot import name 'x' from 'torch'", name="torch")) is None


def test_a_command_that_needs_torch_is_one_line_without_it(
    zslurm: Zslurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_torch(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr("zslurm.cli.main.app", no_torch)
    done = zslurm("dev", "kernels", "check")
    assert done.code == Exit.USAGE
    assert done.stderr.startswith(
        "zslurm: this needs torch, which is not installed here: pip install 'zslurm-train[train]'"
    )
    assert done.stderr.count("\n") == 1


def test_what_is_started_here_is_refused_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    require("numpy")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="this needs torch"):
        require("torch")
