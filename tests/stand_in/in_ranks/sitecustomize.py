"""Gives a rank the modules of this folder for the trainer and for torch; see tests/stand_in/__init__.py.

Python imports a module of this name by itself, the first one that it finds; the next one is imported from here.
"""

import importlib.abc
import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

HERE = Path(__file__).resolve().parent
_REPLACED = {
    "torch": "torch_package",
    "torch.distributed": "store",
    "zslurm.train.checkpointing.writer": "writer",
    "zslurm.train.setup": "trainer",
    "zslurm.train.main": "main",
}


class StandIns(importlib.abc.MetaPathFinder):
    """Finds the modules of this folder under the names of those whose place they take."""

    def find_spec(self, name, path=None, target=None):
        if (file := _REPLACED.get(name)) is None:
            return None
        package = {"submodule_search_locations": []} if name == "torch" else {}
        return importlib.util.spec_from_file_location(name, HERE / f"{file}.py", **package)


def import_next():
    """Import the sitecustomize that would have been found without this one, under its name."""
    here = next(number for number, path in enumerate(sys.path) if path and Path(path).resolve() == HERE)
    if spec := PathFinder.find_spec("sitecustomize", sys.path[here + 1 :]):
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if "zslurm.job.rank" in sys.orig_argv:
    sys.meta_path.insert(0, StandIns())
import_next()
