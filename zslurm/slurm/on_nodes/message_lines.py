"""JSON documents from many nodes through the output of one srun, in lines that Slurm neither cuts nor mixes.

Slurm cuts lines at 1,024 characters, and mixes the pieces of several nodes. A document is therefore one or more
lines: a mark, the words that name the document (its node, its number), the index of the part, the number of parts,
and the part. Lines of prologs and modules have no mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

_PART = 700
"""Characters of a document in one line."""
_MOST_PARTS = 10_000


def split(mark: str, words: tuple[str, ...], document: Any) -> list[str]:
    """Return the lines of a document, each with its line break, in ASCII; a lone surrogate becomes `?`."""
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    if not text.isascii():
        text = json.dumps(json.loads(text.encode("utf-8", "replace")), separators=(",", ":"))
    parts = [text[at : at + _PART] for at in range(0, len(text), _PART)]
    head = " ".join((mark, *words))
    return [f"{head} {index} {len(parts)} {chunk}\n" for index, chunk in enumerate(parts)]


class Joiner:
    """Puts the texts of documents together from the lines of all nodes.

    The lines of one document may come in any order. A node writes one document after the other: what is missing of
    the last one when another begins does not come any more.
    """

    def __init__(self, mark: str, words: int, damaged: Callable[[str, str], None] | None = None) -> None:
        """Take lines with this mark.

        Args:
            mark: what the lines begin with, behind a label of srun.
            words: how many name a document; the first is its node.
            damaged: called for each document that cannot be put together, with its node, which is empty if it is
                not known, and with the line that shows it.
        """
        self._mark, self._damaged = mark, damaged or (lambda node, line: None)
        self._line = re.compile(rf"{re.escape(mark)}((?: \S+){{{words}}}) (\d{{1,5}}) (\d{{1,5}}) (.*)")
        self._parts: dict[str, tuple[str, dict[int, str]]] = {}

    def take(self, line: str) -> tuple[list[str], str] | None:
        """Return the words and the text of the document that a line completes; None if it completes none."""
        line = line.rstrip("\n")
        match = self._line.search(line)
        if match is None:
            if self._mark in line:
                self._damaged("", line)
            return None
        head, index, count, chunk = match[1], int(match[2]), int(match[3]), match[4]
        words = head.split()
        node = words[0]
        begun, parts = self._parts.pop(node, (head, {}))
        if begun != head:
            self._damaged(node, line)
            parts = {}
        if not index < count <= _MOST_PARTS:
            self._damaged(node, line)
            return None
        parts[index] = chunk
        if len(parts) < count:
            self._parts[node] = head, parts
            return None
        try:
            return words, "".join(parts[number] for number in range(count))
        except KeyError:  # parts of two documents of one name
            self._damaged(node, line)
            return None
