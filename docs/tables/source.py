"""The floors of the source, what is in each room, and how large it is."""

from __future__ import annotations

import ast
import json
import re
import tomllib

from docs.tables.markdown import RESULTS, ROOT, table


def contracts() -> dict[str, list[list[str]]]:
    """Return the floors of each package, top floor first, as the import contracts in pyproject.toml have them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    return {
        contract["containers"][0]: [[name.strip() for name in floor.split("|")] for floor in contract["layers"]]
        for contract in settings["contracts"]
        if contract["type"] == "layers"
    }


def about(module: str) -> str:
    """Return the first sentence of the docstring of a module or package."""
    place = ROOT / module.replace(".", "/")
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return re.split(r"\.(?:\s|$)", docstring.partition("\n\n")[0].replace("\n", " "))[0]


def drawing() -> str:
    """Return the drawing of the floors, for GitHub's Mermaid: one box for each floor."""
    lines = ["```mermaid", "flowchart TB"]
    for package, floors in contracts().items():
        boxes = [", ".join(name for name in floor if name != "__main__") for floor in floors]
        names = {f"{package.replace('.', '_')}_{number}": box for number, box in enumerate(boxes) if box}
        lines.append(f'  subgraph {package.replace(".", "_")}["{package}"]')
        lines += [f'    {name}["{box}"]' for name, box in names.items()]
        lines += [f"    {' --> '.join(names)}", "  end"]
    return "\n".join([*lines, "```", ""])


def rooms() -> str:
    """Return every room, top floor first."""
    rows = [
        (f"`{package}.{name}`", about(f"{package}.{name}"))
        for package, floors in contracts().items()
        for floor in floors
        for name in floor
        if name != "__main__"
    ]
    return table(("room", "what is in it"), rows)


def source_figures() -> str:
    """Return the figures of benchmarks/results/source_figures.json."""
    text = (RESULTS / "source_figures.json").read_text(encoding="utf-8")
    figures = json.loads(text)
    before, after = figures["before"], figures["after"]
    head = ("figure", f"before ({before['commit']})", "after")
    return table(
        head, ((name.replace("_", " "), _shown(before, name), _shown(after, name)) for name in after["figures"])
    )


def _shown(side: dict[str, dict[str, float]], name: str) -> str:
    value = side["figures"].get(name)
    return "-" if value is None else f"{value:,}"


READ_BEFORE = {
    "a submission": 37,
    "a save": 17,
    "a fault from a log line to an action": 28,
}
"""Files of each walk before the move, as a reader counted them; those that load a checkpoint were not."""


def walk_figures() -> str:
    """Return the files of each walk, before and after the move."""
    walks = json.loads((RESULTS / "source_figures.json").read_text(encoding="utf-8"))["walks"]
    head = ("walk", "before", "now")
    return table(head, ((name, READ_BEFORE.get(name, "-"), files) for name, files in walks.items()))


TABLES = (
    drawing,
    rooms,
    source_figures,
    walk_figures,
)
