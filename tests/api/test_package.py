"""`import zslurm`: what it offers, what it imports, and that all errors are of one family."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import zslurm
import zslurm.api.submission
import zslurm.submit.control
from zslurm.checkpoint_tools import errors as checkpoint_errors
from zslurm.core import errors as core_errors
from zslurm.train import errors as train_errors


def modules_after(program: str) -> set[str]:
    """Names of the modules in a fresh interpreter after it."""
    text = f"import sys; before = set(sys.modules)\n{program}\nimport json; print(json.dumps([*sys.modules]))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_importing_the_package_imports_nothing_else() -> None:
    plain = modules_after("pass")
    new = modules_after("import zslurm") - plain
    assert {name for name in new if name.partition(".")[0] not in sys.stdlib_module_names} == {"zslurm"}
    assert not new & {"asyncio", "importlib.metadata", "json", "pathlib", "re", "subprocess"}


def test_the_whole_api_imports_neither_torch_nor_submitit() -> None:
    loaded = modules_after("import zslurm\nfor name in zslurm.__all__: getattr(zslurm, name)")
    assert {"zslurm.api.run", "zslurm.api.checkpoint", "zslurm.api.faults"} <= loaded
    assert not loaded & {"torch", "submitit", "pandas", "matplotlib", "h5py"}


def test_type_checkers_and_the_interpreter_see_the_same_names() -> None:
    """What the interpreter finds by the table is what a type checker reads in the block for it."""
    text = Path(inspect.getsourcefile(zslurm) or "").read_text()
    block = next(node for node in ast.parse(text).body if isinstance(node, ast.If))
    typed = {
        name.name: part.module for part in block.body if isinstance(part, ast.ImportFrom) for name in part.names
    }
    del typed["Any"]
    assert typed.keys() == zslurm._MODULES.keys() == set(zslurm.__all__) - {"__version__"}
    for name, module in typed.items():
        if name not in ("submit", "progress"):
            assert zslurm._MODULES[name] == module
            assert getattr(zslurm, name) is getattr(importlib.import_module(str(module)), name)
    assert set(zslurm.__all__) <= set(dir(zslurm))


def test_a_name_that_is_not_there_is_an_ordinary_error() -> None:
    with pytest.raises(AttributeError, match="module 'zslurm' has no attribute 'sumbit'"):
        _ = zslurm.sumbit  # type: ignore[attr-defined]


def test_submit_is_the_function_and_the_package() -> None:
    assert isinstance(zslurm.submit, ModuleType)
    assert callable(zslurm.submit)
    assert inspect.signature(zslurm.submit) == inspect.signature(zslurm.api.submission.submit)
    assert zslurm.submit.control is sys.modules["zslurm.submit.control"]


@pytest.mark.parametrize("module", [checkpoint_errors, core_errors, train_errors])
def test_every_error_is_of_one_family_and_survives_pickling(module: ModuleType) -> None:
    kinds = [kind for kind in vars(module).values() if inspect.isclass(kind) and issubclass(kind, Exception)]
    assert len(kinds) > 3
    for kind in kinds:
        assert issubclass(kind, zslurm.Error), kind
    assert isinstance(pickle.loads(pickle.dumps(core_errors.ConfigError("x"))), zslurm.Error)
