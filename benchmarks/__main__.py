"""`python -m benchmarks [NAME...]`: run the named benchmarks, or all of them; `... gpu [OPTION...]`: a GPU's."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from tests.end_of_tests import end_with

_HELPERS = {"__init__", "checkpoint_ranks", "slowed_python"}


def modules() -> dict[str, str]:
    """The module of each benchmark by its name: one file each, in a folder for its subject."""
    found = sorted(Path(__file__).parent.glob("*/*.py"), key=lambda path: path.stem)
    return {
        path.stem: f"benchmarks.{path.parent.name}.{path.stem}"
        for path in found
        if path.stem not in _HELPERS and path.parent.name not in ("gpu", "chaos")
    }


def main(asked: list[str]) -> int:
    """Run benchmarks by name; returns the exit code."""
    if asked[:1] == ["gpu"]:
        from benchmarks.gpu.command import main as on_gpu

        return on_gpu(asked[1:])
    known = modules()
    if unknown := [name for name in asked if name not in known]:
        print(f"no benchmark called {', '.join(unknown)}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    end_with(os.getpid())
    for name in asked or known:
        print(f"== {name}", file=sys.stderr)
        importlib.import_module(known[name]).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
