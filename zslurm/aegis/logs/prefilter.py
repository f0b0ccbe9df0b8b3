"""The literals without which a regular expression cannot match, for a fast search before it is tried."""

from __future__ import annotations

import re
from collections.abc import Iterable


class TableError(ValueError):
    """signatures.yaml contradicts itself; the message names the expression."""


def required_literals(expression: str, prefilter: re.Pattern[str]) -> frozenset[str]:
    r"""Return literals in lower case, one of which is in every text that matches; each has one of the prefilter.

    Of the parts that follow each other the one with the longest such literals is taken: a run of fixed
    characters, or a group that is not optional, whose literals are its alternatives'. A class, an escape
    like `\d` and what may be repeated or left out end a run. Empty if there are no such literals.
    """
    alternatives = [max(parts, key=_shortest, default=frozenset()) for parts in _parts(expression, prefilter)]
    return frozenset[str]().union(*alternatives) if all(alternatives) else frozenset()


def any_of(prefilter: Iterable[str]) -> re.Pattern[str]:
    """Return the expression that finds one of these literals."""
    return re.compile("|".join(map(re.escape, prefilter)))


def _shortest(words: frozenset[str]) -> int:
    return min(map(len, words), default=0)


# Characters that mean themselves come all at once: agents read 1,200 expressions when they start.
_TOKEN = re.compile(
    r"[^\\\[\](){}.^$|?*+]+(?![?*+{])|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?(?:[:=!]|<[=!])|.", re.DOTALL
)
_ESCAPED = re.compile(r"\\\W")
_OPTIONAL = re.compile(r"[?*]|\{0?,")
_REPEATED = re.compile(r"[?*+]\??|\{[\d,]+\}\??")


def _parts(expression: str, prefilter: re.Pattern[str]) -> list[list[frozenset[str]]]:
    """Return the literals of each part of each alternative at the top level of an expression."""
    alternatives: list[list[frozenset[str]]] = [[]]
    run, at = "", 0

    def end_of_run() -> None:
        nonlocal run
        word = run.lower()
        if word and prefilter.search(word):
            alternatives[-1].append(frozenset({word}))
        run = ""

    while at < len(expression):
        token = _TOKEN.match(expression, at)
        assert token is not None  # the last alternative of _TOKEN takes any character
        text, end = token[0], token.end()
        inside = ""
        if text.startswith("("):
            close = _closing(expression, at)
            inside, end = expression[end:close], close + 1
        repeated = _REPEATED.match(expression, end)
        fixed = text[1:] if _ESCAPED.match(text) else "" if text[0] in r"\[(.^$|" else text
        if inside or text.startswith("(") or repeated or not fixed:
            end_of_run()
        else:
            run += fixed
        if text in ("(", "(?:") and not _OPTIONAL.match(expression, end):
            alternatives[-1].append(required_literals(inside, prefilter))
        elif text == "|":
            alternatives.append([])
        at = repeated.end() if repeated else end
    end_of_run()
    return alternatives


def _closing(expression: str, at: int) -> int:
    """Return the end of the group that begins at `at`."""
    depth = 0
    for token in _TOKEN.finditer(expression, at):
        depth += token[0].startswith("(") - (token[0] == ")")
        if depth == 0:
            return token.start()
    raise TableError(f"a group is not closed in {expression!r}")
