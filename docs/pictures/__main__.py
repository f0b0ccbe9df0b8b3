"""Draw the pictures of the documents: `python -m docs.pictures`, or `make pictures`.

All of them come from data: what was measured from benchmarks/results, the terminal from commands that run. With
names, only these are drawn; with `--check` none is written, and those of measurements that are outdated are named.
"""

from __future__ import annotations

import sys
from pathlib import Path

from docs.pictures import measured, terminal

FOLDER = Path(__file__).parent
PICTURES = {function.__name__: function for module in (measured, terminal) for function in module.PICTURES}


def path_of(name: str) -> Path:
    """Return the file of a picture."""
    return FOLDER / f"{name.replace('_', '-')}.svg"


def outdated() -> list[Path]:
    """Return the pictures of measurements whose files are not what the results give."""
    drawn = {path_of(function.__name__): function() for function in measured.PICTURES}
    return [path for path, svg in drawn.items() if not path.is_file() or path.read_text(encoding="utf-8") != svg]


def main(arguments: list[str]) -> int:
    """Draw pictures, or check them; return the exit code."""
    if arguments == ["--check"]:
        old = outdated()
        for path in old:
            print(f"{path}: not what the results give; run `make pictures`", file=sys.stderr)
        return 1 if old else 0
    unknown = [name for name in arguments if name not in PICTURES]
    if unknown:
        print(f"no picture is called {', '.join(unknown)}; there are: {', '.join(PICTURES)}", file=sys.stderr)
        return 2
    for name in arguments or PICTURES:
        path_of(name).write_text(PICTURES[name](), encoding="utf-8")
        print(f"wrote {path_of(name)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
