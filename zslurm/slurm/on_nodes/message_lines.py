"""JSON documents from many nodes through the output of one srun, in lines that Slurm neither cuts nor mixes.

Slurm cuts lines at 1,024 characters, and mixes the pieces of several nodes. A document is therefore one or more
lines: a mark, the words that name the document (its node, its number), the index of the part, the number of parts,
and the part. Lines of prologs and modules have no mark.
"""

from __future__ import annotations

import json
import re
from typing import Any

_PART = 700
"""Characters of a document in one line."""


def split(mark: str, words: tuple[str, ...], document: Any) -> list[str]:
    """Return the lines of a document, each with its line break."""
    text = json.dumps(document)
    parts = [text[at : at + _PART] for at in range(0, len(text), _PART)]
    head = " ".join((mark, *words))
    return [f"{head} {index} {len(parts)} {part}\n" for index, part in enumerate(parts)]


class Joiner:
    """Puts documents together from the lines of all nodes, in whichever order they come."""

    def __init__(self, mark: str, words: int) -> None:
        """Take lines with this mark, whose documents are named by so many words."""
        self._line = re.compile(rf"{re.escape(mark)}((?: \S+){{{words}}}) (\d+) (\d+) (.*)")
        self._parts: dict[str, dict[int, str]] = {}

    def take(self, line: str) -> tuple[list[str], Any] | None:
        """Return the words and the document that a line completes; None if it completes none, or a damaged one."""
        match = self._line.search(line.rstrip("\n"))
        if match is None:
            return None
        words, index, count, part = match[1], int(match[2]), int(match[3]), match[4]
        parts = self._parts.setdefault(words, {})
        parts[index] = part
        if len(parts) < count:
            return None
        del self._parts[words]
        try:
            return words.split(), json.loads("".join(parts[number] for number in range(count)))
        except (KeyError, ValueError, RecursionError):
            return None
