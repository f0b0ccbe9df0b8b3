"""Habits of language are counted, and each has a limit."""

from __future__ import annotations

import pytest

from docs.language import LIMITS, counts, problems

WHERE, IF, PHRASES, NAMES, CLASSES = LIMITS
GOOD = '"""Return the nodes, if there are any."""\n' + "class Nodes:\n    idle = 1\n"


def test_each_habit_is_counted() -> None:
    source = (
        '"""Return None where there is none, else `where`."""\nfound = place = 1\nclass Node:\n'
        '    """If so many, that of."""\n'
    )
    counted = counts({"one.py": source, "two.py": "class Node: ...\nclass _Node: ...\n"})
    assert counted == {
        WHERE: pytest.approx(2e4 / 13),
        IF: pytest.approx(1e4 / 13),
        PHRASES: pytest.approx(2e4 / 13),
        NAMES: 2,
        CLASSES: 1,
    }


def test_a_class_of_one_module_is_no_duplicate_and_files_without_docstrings_count() -> None:
    assert counts({"one.py": GOOD + GOOD.replace('"""', "#"), "empty.py": ""})[CLASSES] == 0


@pytest.mark.parametrize(
    ("habit", "count"), [(WHERE, 1e4), (IF, 0.0), (PHRASES, 1e4), (NAMES, 1e4), (CLASSES, 1e4)]
)
def test_what_is_beyond_its_limit_is_named_with_advice(habit: str, count: float) -> None:
    allowed = {name: limit.count for name, limit in LIMITS.items()}
    assert list(problems(allowed)) == []
    (line,) = problems(allowed | {habit: count})
    assert line.startswith(f"{habit}: {count:.0f}, ")
    assert line.endswith(LIMITS[habit].advice)
