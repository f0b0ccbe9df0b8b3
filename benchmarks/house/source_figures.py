"""Sizes and imports of the source before and after the move into floors and rooms (docs/architecture.md).

`before` is a commit, `after` the working tree. Counted are the Python files of the program, without tests,
benchmarks and documents. The benchmark needs git for the commit.
"""

from __future__ import annotations

import ast
import re
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, export, write_result

COMMIT = "6ce091c"
"""The last commit before the move."""

FOLDERS = ("zslurm", "train", "kernels", "checkpoint_tools", "sbatch_templates")
_WALK = re.compile(r"^## Walk: (?P<title>[^\n]+)\n(?P<text>.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_BACK = "\nAnd back,"
_SAVE = "a save"
"""Its files were counted before the move, those of the way back were not."""
_STEP = re.compile(r"^\d+\. `(?P<path>[^`]+)`", re.MULTILINE)


@dataclass(frozen=True)
class Source:
    """One file of the program.

    Attributes:
        path: below the root.
        module: its name as others import it.
        text: the source.
        tree: the same, parsed.
    """

    path: str
    module: str
    text: str
    tree: ast.Module


def sources(root: Path, *, one_name: bool) -> dict[str, Source]:
    """Return the files of a tree by module.

    Args:
        root: of the tree.
        one_name: train, kernels and checkpoint_tools are imported below `zslurm`.
    """
    found = {}
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*.py")):
            path = file.relative_to(root)
            if any(root.joinpath(*path.parts[:depth]).is_symlink() for depth in range(1, len(path.parts))):
                continue  # zslurm/train and its like are links to the folders that are read anyway
            parts = path.with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            module = ".".join(parts if folder == "zslurm" or not one_name else ("zslurm", *parts))
            text = file.read_text(encoding="utf-8")
            found[module] = Source(str(path), module, text, ast.parse(text))
    return found


def imports(source: Source, modules: Mapping[str, Source]) -> set[str]:
    """Return the modules of the program that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules else node.module)
    return {module for module in found if module in modules and module != source.module}


def code_lines(source: Source) -> int:
    """Return how many lines hold code: no blank lines, comments or docstrings."""
    docstrings: set[int] = set()
    for node in ast.walk(source.tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                docstrings |= set(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    lines = enumerate(source.text.splitlines(), start=1)
    return sum(
        number not in docstrings and bool(line.strip()) and not line.lstrip().startswith("#")
        for number, line in lines
    )


def function_lengths(source: Source) -> Iterator[int]:
    """Yield the lines of each function, its docstring included."""
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


# --- imports ---------------------------------------------------------------------------------------------------


def circles(edges: Mapping[str, set[str]]) -> list[set[str]]:
    """Return the groups of nodes that reach each other (Tarjan's strongly connected components of two or more)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in edges[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = set(stack[stack.index(node) :])
            del stack[stack.index(node) :]
            found.append(group)

    for node in edges:
        if node not in index:
            visit(node)
    return [group for group in found if len(group) > 1]


def rooms(edges: Mapping[str, set[str]]) -> Counter[tuple[str, str]]:
    """Return how many imports lead from each package of zslurm to each other one."""
    pairs = [(_room(importer), _room(module)) for importer, others in edges.items() for module in others]
    return Counter((one, other) for one, other in pairs if one and other and one != other)


def _room(module: str) -> str:
    """Return the package below zslurm that a module is in; empty for what is in none."""
    name, _, rest = module.partition(".")
    return rest.partition(".")[0] if name == "zslurm" and "." in rest else ""


def upward(between: Mapping[tuple[str, str], int]) -> tuple[int, int]:
    """Return how many packages import each other in rings, and the imports that lead up in their best order.

    Packages put one above the other in any order: the second figure is the fewest imports that can lead up.
    """
    edges: dict[str, set[str]] = {name: set() for pair in between for name in pair}
    for one, other in between:
        edges[one].add(other)
    groups = circles(edges)
    fewest = sum(
        min(
            sum(between.get((lower, upper), 0) for upper, lower in combinations(order, 2))
            for order in permutations(group)
        )
        for group in groups
    )
    return sum(map(len, groups)), fewest


# --- figures ---------------------------------------------------------------------------------------------------


def figures(modules: Mapping[str, Source]) -> dict[str, float]:
    """Return the figures of a tree."""
    edges = {name: imports(source, modules) for name, source in modules.items()}
    edges["zslurm"] = set()  # the names of the API, for type checkers alone: they are imported when they are used
    files = [source.text.count("\n") for source in modules.values() if source.text.strip()]
    functions = [length for source in modules.values() for length in function_lengths(source)]
    crowded = Counter(str(Path(source.path).parent) for source in modules.values())
    in_a_ring, leading_up = upward(rooms(edges))
    result: dict[str, float] = {"files": len(modules), "lines": sum(files)}
    for folder in FOLDERS:
        inside = [source for source in modules.values() if source.path.startswith(f"{folder}/")]
        result[f"lines_of_{folder}"] = sum(source.text.count("\n") for source in inside)
    return result | {
        "lines_of_code": sum(code_lines(source) for source in modules.values()),
        "median_lines_of_a_file": statistics.median(files),
        "files_of_more_than_400_lines": sum(length > 400 for length in files),
        "median_lines_of_a_function": statistics.median(functions),
        "functions_of_more_than_50_lines": sum(length > 50 for length in functions),
        "most_files_in_one_folder": max(crowded.values()),
        "packages_of_zslurm_in_a_ring": in_a_ring,
        "imports_between_them_that_lead_up": leading_up,
        "files_in_import_circles": sum(map(len, circles(edges))),
    }


def walks() -> dict[str, int]:
    """Return how many files each walk of docs/architecture.md has; of one with a way back, the first part."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    found = {}
    for walk in _WALK.finditer(text):
        there, _, back = walk["text"].partition(_BACK)
        found[_SAVE if back else walk["title"]] = len(set(_STEP.findall(there)))
    return found


def run() -> None:
    """Measure both trees and write results/source_figures.json."""
    after = sources(ROOT, one_name=True)
    with tempfile.TemporaryDirectory() as folder:
        export(COMMIT, folder, *FOLDERS)
        before = sources(Path(folder), one_name=False)
    body: dict[str, Any] = {
        "before": {"commit": COMMIT, "figures": figures(before)},
        "after": {"figures": figures(after)},
        "walks": walks(),
    }
    write_result("source_figures", body)
