"""Count habits of language in the source: `python -m docs.language`, part of `make lint`.

Well-kept repositories have 7 to 16 `where` and 26 to 105 `if` in 10,000 words of docstrings; `where` for a
condition makes a reader look for a place. A pronoun as a name (`found`, `each`) does not say what a variable
holds, and a public class that shares its name with one of another package has to be looked up. `PHRASES` send a
reader back to find what they stand for. Each row of `LIMITS` may only get better: lower a limit when the count has
fallen.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = ("zslurm", "train", "checkpoint_tools", "kernels")
PRONOUNS = frozenset(
    "found given there here ours mine each left known own one place part that those these it".split()
)
PHRASES = re.compile(
    r"\b(?:(?:that|those) of|so many|so long|somebody|nobody|whoever|beside|anew|once more|for ever|by and by"
    r"|of (?:its|their) own|all the same|meanwhile|alone)\b",
    re.IGNORECASE,
)
"""Phrases that leave open what is meant, or how many: `that of`, `so many`."""
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Limit(NamedTuple):
    """How often a habit may occur, at most, or at least if `at_least`."""

    count: float
    advice: str
    at_least: bool = False


LIMITS = {
    "where in 10,000 words of docstrings": Limit(8, "introduce conditions by `if` or `when`"),
    "if in 10,000 words of docstrings": Limit(60, "introduce conditions by `if` or `when`", at_least=True),
    "vague phrases in 10,000 words of docstrings": Limit(11, "name what is meant, and how many"),
    "variables named by a pronoun": Limit(110, "name what the variable holds"),
    "public class names of several modules": Limit(6, "choose a name that no other package has"),
}


def counts(sources: Mapping[str, str]) -> dict[str, float]:
    """Return the count of each habit in modules, given as source text by path."""
    words = wheres = ifs = phrases = names = 0
    modules: defaultdict[str, set[str]] = defaultdict(set)
    for path, source in sources.items():
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
                words += len(text.split())
                wheres += len(re.findall(r"\bwhere\b", text, re.IGNORECASE))
                ifs += len(re.findall(r"\bif\b", text, re.IGNORECASE))
                phrases += len(PHRASES.findall(text))
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names += node.id in PRONOUNS
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].add(path)
    per = 10_000 / max(1, words)
    shared = Counter(len(paths) > 1 for paths in modules.values())[True]
    return dict(zip(LIMITS, (wheres * per, ifs * per, phrases * per, names, shared), strict=True))


def problems(found: Mapping[str, float]) -> Iterable[str]:
    """Yield a line for each count that is beyond its limit."""
    for habit, limit in LIMITS.items():
        if found[habit] < limit.count if limit.at_least else found[habit] > limit.count:
            bound = "at least" if limit.at_least else "at most"
            yield f"{habit}: {found[habit]:.0f}, {bound} {limit.count:g}: {limit.advice}"


def main() -> int:
    """Print what is beyond its limit, or all counts with --all; return 1 if something is beyond."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    sources = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}
    counted = counts(sources)
    if "--all" in sys.argv[1:]:
        print("\n".join(f"{count:8.1f}  {habit}" for habit, count in counted.items()))
    lines = list(problems(counted))
    print("\n".join(lines), end="\n" if lines else "", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
