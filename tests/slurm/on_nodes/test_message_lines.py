"""Documents of several nodes come through lines that are mixed; damaged ones hide no other."""

from __future__ import annotations

import json
import random

import pytest

from zslurm.slurm.on_nodes.message_lines import Joiner, split

MARK = "zslurm-test"


def test_documents_come_through_lines_in_any_order() -> None:
    documents = {f"node{number}": ["x" * 2000, {"number": number}] for number in range(3)}
    lines = [f"3: {line}" for node, value in documents.items() for line in split(MARK, (node, "7"), value)]
    assert max(map(len, lines)) < 1024, "srun cuts longer ones"
    random.Random(1).shuffle(lines)
    joiner = Joiner(MARK, words=2)
    found = [whole for line in ["a prolog's line\n", *lines] if (whole := joiner.take(line)) is not None]
    assert {node: json.loads(text) for (node, _), text in found} == documents


@pytest.mark.parametrize(
    ("damaged", "node"),
    [
        (f"{MARK} node0 1 1 7", "node0"),
        (f"{MARK} node0 0 0 ", "node0"),
        (f"{MARK} node0 0 99999 [1,", "node0"),
        (f"{MARK} node0 x 1 7", ""),
        (MARK, ""),
    ],
)
def test_a_damaged_line_is_no_document_and_hides_no_later_one(damaged: str, node: str) -> None:
    named: list[tuple[str, str]] = []
    joiner = Joiner(MARK, words=1, damaged=lambda *what: named.append(what))
    assert joiner.take(damaged) is None
    assert named == [(node, damaged)]
    (line,) = split(MARK, ("node1",), [1])
    assert joiner.take(line) == (["node1"], "[1]")
    assert len(named) == 1


def test_text_that_is_not_ascii_takes_as_many_bytes_as_characters() -> None:
    value = ["\U0001f525\u00e4" * 500]
    joiner = Joiner(MARK, words=1)
    lines = split(MARK, ("node0",), value)
    assert all(len(line.encode()) < 1024 for line in lines)
    found = [whole for line in lines if (whole := joiner.take(line)) is not None]
    assert json.loads(found[0][1]) == value
