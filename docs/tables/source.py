"""The packages of the source in the order in which they may import each other, and what is in each."""

from __future__ import annotations

import ast
import re
import tomllib

from docs.tables.markdown import ROOT, table

LISTED = ("zslurm", "zslurm.aegis", "zslurm.train")
"""Packages whose packages the table has."""


def contracts() -> dict[str, list[list[str]]]:
    """Return the layers of each package, top layer first, as the import contracts in pyproject.toml have them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    return {
        contract["containers"][0]: [[name.strip() for name in layer.split("|")] for layer in contract["layers"]]
        for contract in settings["contracts"]
        if contract["type"] == "layers"
    }


def about(module: str) -> str:
    """Return the first sentence of the docstring of a module or package."""
    place = ROOT / module.replace(".", "/")
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return re.split(r"\.(?:\s|$)", docstring.partition("\n\n")[0].replace("\n", " "))[0]


def packages() -> str:
    """Return the packages of zslurm, Aegis and the trainer, those that may import the others first."""
    rows = [
        (f"`{package}.{name}`", about(f"{package}.{name}"))
        for package, layers in contracts().items()
        if package in LISTED
        for layer in layers
        for name in layer
        if (ROOT / f"{package}.{name}".replace(".", "/")).is_dir()
    ]
    return table(("package", "what is in it"), rows)


TABLES = (packages,)
