"""`python -m benchmarks [NAME...]`: run the named benchmarks, or all of them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

_HELPERS = {"__init__", "__main__", "checkpoint_ranks", "common", "memory", "models"}


def names() -> list[str]:
    """Every benchmark: one file each."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in _HELPERS)


def main(asked: list[str]) -> int:
    """Run benchmarks by name; returns the exit code."""
    unknown = [name for name in asked if name not in names()]
    if unknown:
        print(f"no benchmark called {', '.join(unknown)}; there are: {', '.join(names())}", file=sys.stderr)
        return 2
    for name in asked or names():
        print(f"== {name}", file=sys.stderr)
        importlib.import_module(f"benchmarks.{name}").run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
