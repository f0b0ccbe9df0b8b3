"""How large the program is, and how it reads: lines, files, commands, keys and habits of language.

Figures of before the program was made smaller (2026-11-26) are next to the figures of now. Lines count everything
in a file. Infrastructure of tests is what results/tests_processor_time.json names.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from pathlib import Path

from benchmarks.common import RESULTS, ROOT, write_result
from docs.language import PACKAGES, counts
from zslurm.cli.commands import COMMANDS, HEADINGS

BEFORE = {
    "lines_of_source": 101_000,
    "lines_of_tests": 83_000,
    "lines_of_test_infrastructure": 5_300,
    "lines_of_benchmarks": 10_000,
    "lines_of_documents": 10_000,
    "files_of_the_command_line": 98,
    "commands_in_help": 36,
    "keys_of_a_run_file": 268,
    "where in 10,000 words of docstrings": 87,
    "if in 10,000 words of docstrings": 8,
    "public class names of several modules": 67,
}


def run() -> None:
    """Count, and write results/source_figures.json."""
    answer = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    listed = answer.stdout.split()
    files = {name: ROOT / name for name in listed if not (ROOT / name).is_symlink() and (ROOT / name).is_file()}
    lines = {name: _lines(path) for name, path in files.items() if path.suffix in (".py", ".md")}
    python = [name for name in lines if name.endswith(".py")]
    source = [name for name in python if name.startswith(tuple(f"{package}/" for package in PACKAGES))]
    infrastructure = tuple(json.loads((RESULTS / "tests_processor_time.json").read_text())["infrastructure"])
    habits = counts({name: _text(files[name]) for name in source})
    now = {
        "lines_of_source": sum(lines[name] for name in source),
        "lines_of_tests": sum(lines[name] for name in python if name.startswith("tests/")),
        "lines_of_test_infrastructure": sum(lines[name] for name in python if name.startswith(infrastructure)),
        "lines_of_benchmarks": sum(lines[name] for name in python if name.startswith("benchmarks/")),
        "lines_of_documents": sum(lines[name] for name in lines if name.endswith(".md")),
        "files_of_the_command_line": sum(name.startswith("zslurm/cli/") for name in python),
        "commands_in_help": sum(len(names.split()) for names in HEADINGS.values()),
        "commands": len(COMMANDS),
        "keys_of_a_run_file": _keys(files["docs/reference/configuration.md"]),
        **{habit: round(count, 1) for habit, count in habits.items()},
    }
    packages = Counter[str]()
    for name in source:
        packages[_package(name)] += lines[name]
    write_result(
        "source_figures",
        {
            "figures": {name: {"before": BEFORE.get(name), "now": value} for name, value in now.items()},
            "lines_of_packages": dict(packages.most_common()),
            "files_of_walks": _walks(files["docs/architecture.md"]),
            "files_of_packages": dict(Counter(_package(name) for name in source).most_common()),
        },
    )


def _package(name: str) -> str:
    """Return the package of a file: the second level in zslurm, else the top one."""
    parts = name.split("/")
    return "/".join(parts[:2]) if parts[0] == "zslurm" and len(parts) > 2 else parts[0]


def _keys(reference: Path) -> int:
    """Return how many keys the reference of run files lists."""
    return len(re.findall(r"^\| `[^`]+` \|", _text(reference), re.MULTILINE))


def _walks(architecture: Path) -> dict[str, int]:
    """Return how many files each walk of docs/architecture.md lists."""
    walks = re.findall(r"^## Walk: (.+?)\n(.+?)(?=^## |\Z)", _text(architecture), re.MULTILINE | re.DOTALL)
    return {name: len(re.findall(r"^\d+\. ", text, re.MULTILINE)) for name, text in walks}


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _lines(path: Path) -> int:
    return len(_text(path).splitlines())
