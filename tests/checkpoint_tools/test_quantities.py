"""Sizes, counts and durations in messages: what the owner writes, and that all others leave it to the owner."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkout import ROOT
from zslurm.checkpoint_tools.quantities import counted, show_bytes, show_count, show_duration

SOURCES = sorted(
    path for floor in ("zslurm", "train", "checkpoint_tools") for path in (ROOT / floor).rglob("*.py")
)
NOUNS = (
    "attempts bundles bytes characters checkpoints cores documents elements entries errors failures files GPUs "
    "hosts "
    "inodes jobs lines members microbatches NICs nodes pages parameters problems processes rails ranks "
    "restarts retries saves shards starts steps tensors tokens tries warnings zombies"
).split()
ADJECTIVES = "usable left-over idle new bad free open retired uncorrectable correctable deferred".split()
AFTER_A_NUMBER = re.compile(rf" (?:(?:{'|'.join(ADJECTIVES)}) )*(?:{'|'.join(NOUNS)})\b(?!/)")
AFTER_A_SIZE = re.compile(r" ?(?:[KMGT]i?|k)?B(?:/s)?\b")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        *((0, "0 B"), (950, "950 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (12595, "12.3 KiB")),
        *((10239, "10.0 KiB"), (102_395, "100 KiB"), (4.5 * 2**20, "4.50 MiB"), (2**20 - 1, "1.00 MiB")),
        *((16.5 * 2**30, "16.5 GiB"), (300 << 30, "300 GiB"), (3 << 40, "3.00 TiB"), (5 << 50, "5.00 PiB")),
    ],
)
def test_sizes_have_binary_units_and_three_digits(size: float, text: str) -> None:
    assert show_bytes(size) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (950, "950"), (999.4, "999"), (999.6, "1k"), (12_345, "12.3k"), (999_600, "1M"), (7.8e9, "7.8B")],
)
def test_rounded_counts(number: float, text: str) -> None:
    assert show_count(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0s"), (45.9, "45s"), (60, "1m 00s"), (723, "12m 03s"), (3720, "1h 02m"), (187_200, "2d 4h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert show_duration(seconds) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (counted(1, "node"), "1 node"),
        (counted(2, "node"), "2 nodes"),
        (counted(0, "node"), "0 nodes"),
        (counted(2, "process"), "2 processes"),
        (counted(3, "retry"), "3 retries"),
        (counted(3, "day"), "3 days"),
        (counted(1, "process is left", "processes are left"), "1 process is left"),
        (counted(2, "process is left", "processes are left"), "2 processes are left"),
        (counted(12_345, "token", shown="12.3k"), "12.3k tokens"),
    ],
)
def test_singular_and_plural(text: str, expected: str) -> None:
    assert text == expected


def test_importing_checkpoint_tools_does_not_import_numpy() -> None:
    """What zslurm runs next to the ranks reads and shows values by these functions, and must stay light."""
    imports = "import sys, zslurm.checkpoint_tools.quantities, zslurm.checkpoint_tools.plain"
    program = f"{imports}; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def _in_messages(path: Path) -> Iterator[tuple[int, ast.expr, str]]:
    """Each value in an f-string with the text behind it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            for value, after in zip(node.values, node.values[1:], strict=False):
                if isinstance(value, ast.FormattedValue) and isinstance(after, ast.Constant):
                    yield node.lineno, value.value, str(after.value)


def _is_a_constant(value: ast.expr) -> bool:
    """Whether the value is a constant of the source, such as LONGEST_NAME: its number is known."""
    return isinstance(value, ast.Name) and value.id.isupper()


def _names(value: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(value) if isinstance(node, ast.Name)} | {
        node.attr for node in ast.walk(value) if isinstance(node, ast.Attribute)
    }


def _uncounted(path: Path) -> Iterator[str]:
    for line, value, after in _in_messages(path):
        no_number = {"join", "name"}
        if AFTER_A_NUMBER.match(after) and not _is_a_constant(value) and not _names(value) & no_number:
            yield f"{path.relative_to(ROOT)}:{line}: {ast.unparse(value)}{after[:30]!r}"


def test_no_message_has_a_plural_for_one() -> None:
    """A number before a noun is `counted`; and nothing is `node(s)`."""
    found = [problem for path in SOURCES for problem in _uncounted(path)]
    assert not found, "use zslurm.checkpoint_tools.quantities.counted:\n" + "\n".join(found)
    lazy = re.compile(r"[a-z]\(e?s\)(?!:)")
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCES}
    strings = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"
        for path, text in texts.items()
        if lazy.search(text)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and lazy.search(node.value)
    ]
    assert [string for string in strings if "http(s)" not in string] == []


def test_no_message_makes_its_own_size() -> None:
    """A size is shown by its owner: nothing is divided in a message, and no unit is put behind a rounded count."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {ast.unparse(value)}{after[:10]!r}"
        for path in SOURCES
        for line, value, after in _in_messages(path)
        if AFTER_A_SIZE.match(after)
        and ("show_count" in _names(value) or any(isinstance(node, ast.BinOp) for node in ast.walk(value)))
    ]
    assert not found, "use zslurm.checkpoint_tools.quantities.show_bytes:\n" + "\n".join(found)
