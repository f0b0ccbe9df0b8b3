"""Documents of several nodes come through lines that are mixed; damaged ones hide no other."""

from __future__ import annotations

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
    assert {node: value for (node, _), value in found} == documents


@pytest.mark.parametrize(
    "damaged",
    [
        f"{MARK} node0 0 1 {{",
        f"{MARK} node0 1 1 7",
        f"{MARK} node0 0 0 ",
        f"{MARK} node0 0 1 {'[' * 100_000}",
        f"{MARK} node0 0 2 [1,",
        f"{MARK} node0 x 1 7",
        MARK,
    ],
)
def test_a_damaged_line_is_no_document_and_hides_no_later_one(damaged: str) -> None:
    joiner = Joiner(MARK, words=1)
    assert joiner.take(damaged) is None
    (line,) = split(MARK, ("node1",), [1])
    assert joiner.take(line) == (["node1"], [1])
