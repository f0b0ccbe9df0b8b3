"""Slurm's hostlists: `rack[1-2]n[001-128,200]-ib,login` and the names in it.

Ours, because python-hostlist and ClusterShell are under the GPL and the LGPL.

In pure Python, because compute nodes and laptops may have no scontrol.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence

from zslurm.checkpoint_tools.plain import shorten
from zslurm.core.errors import ConfigError

MAX_HOSTS = 1 << 20
"""A list of more names is refused: it is a typing error, and would fill the memory."""

_COMMA = re.compile(r",(?![^\[\]]*\])")  # outside of brackets
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]++)")
_WORD = re.compile(rf"(?:{_PIECE.pattern})*")
# A longer run of digits numbers no node: it is refused in a range, and is plain text in a name.
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_DIGITS = re.compile(r"((?<![0-9])[0-9]{1,18}(?![0-9]))")


class HostlistError(ConfigError, ValueError):
    """A hostlist that Slurm would refuse as well."""


def expand(hostlist: str) -> list[str]:
    """Return every name, in Slurm's order (the last bracket runs fastest); none for empty text.

    Raises:
        HostlistError: brackets or ranges are wrong, or the list has more than MAX_HOSTS names.
    """
    names: list[str] = []
    for word in filter(None, map(str.strip, _COMMA.split(hostlist))):
        if not _WORD.fullmatch(word):
            raise HostlistError(f"hostlist `{shorten(hostlist)}`: brackets do not match in `{shorten(word)}`")
        parts = [[text] if text else _padded_numbers(numbers) for numbers, text in _PIECE.findall(word)]
        if len(names) + math.prod(map(len, parts)) > MAX_HOSTS:
            raise HostlistError(f"hostlist `{shorten(hostlist)}`: more than {MAX_HOSTS} names")
        names.extend("".join(chosen) for chosen in itertools.product(*parts))
    return names


def expand_ranges(ranges: str) -> list[int]:
    """Return the numbers of `0-3,7`, as in srun's lists of tasks.

    Raises:
        HostlistError: not a list of numbers and rising ranges.
    """
    return [int(number) for number in _padded_numbers(ranges)]


def compress_ranges(numbers: Iterable[int]) -> str:
    """Return `0-3,7` for numbers in any order; empty for none."""
    return compress(f"r{number}" for number in numbers).removeprefix("r").strip("[]")


def compress(names: Iterable[str]) -> str:
    """Return one hostlist for a set of names, each once, in natural order.

    `expand` gives exactly these names back.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    ordered = sorted(set(names), key=natural_key)
    varying = _varying_position(ordered)
    for name in ordered:
        # re.split with a group: text, digits, text, digits, ..., text
        pieces = _DIGITS.split(name)
        index = varying.get(_shape(pieces))
        if index is None:
            groups[(name,)] = []
        else:
            key = ("".join(pieces[:index]), "".join(pieces[index + 1 :]))
            groups.setdefault(key, []).append(pieces[index])
    return ",".join(_group_text(key, numbers) for key, numbers in groups.items())


def split_hostlist(names: Iterable[str], width: int | None) -> list[str]:
    """Return `compress`, in several hostlists of at most `width` columns if it is wider; a name stays whole."""
    ordered = sorted(set(names), key=natural_key)
    shortened = compress(ordered)
    if width is None or len(shortened) <= width or len(ordered) < 2:
        return [shortened]
    half = len(ordered) // 2
    return [*split_hostlist(ordered[:half], width), *split_hostlist(ordered[half:], width)]


def by_reason(reasons: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the nodes of each reason, as a hostlist, from pairs of a reason and a node."""
    by_text: dict[str, list[str]] = {}
    for reason, node in reasons:
        by_text.setdefault(reason, []).append(node)
    return {reason: compress(nodes) for reason, nodes in by_text.items()}


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key that puts node2 before node10."""
    return [
        (0, 0, piece) if index % 2 == 0 else (1, int(piece), piece)
        for index, piece in enumerate(_DIGITS.split(name))
    ]


def _padded_numbers(ranges: str) -> list[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        match = _RANGE.fullmatch(item.strip())
        if match is None:
            raise HostlistError(f"hostlist range `{shorten(item)}`: expected a number or LOW-HIGH, such as 0-3")
        low, high = match[1], match[2] or match[1]
        if int(high) < int(low):
            raise HostlistError(f"hostlist range `{shorten(item)}`: the end is below the start")
        if len(numbers) + int(high) - int(low) >= MAX_HOSTS:
            raise HostlistError(f"hostlist range `{shorten(item)}`: more than {MAX_HOSTS} names")
        numbers += [f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1)]
    return numbers


def _varying_position(names: Sequence[str]) -> dict[tuple[str, ...], int]:
    """For names of one shape, the number that goes into brackets: the one that leaves the fewest groups."""
    rows: dict[tuple[str, ...], list[list[str]]] = {}
    for name in names:
        pieces = _DIGITS.split(name)
        rows.setdefault(_shape(pieces), []).append(pieces)
    best: dict[tuple[str, ...], int] = {}
    for shape, group in rows.items():
        positions = range(1, 2 * len(shape) - 1, 2)
        if positions:
            # Later numbers win ties: in rack1node2 it is the node's.
            best[shape] = min(
                reversed(positions),
                key=lambda index: len({(*pieces[:index], *pieces[index + 1 :]) for pieces in group}),
            )
    return best


def _shape(pieces: Sequence[str]) -> tuple[str, ...]:
    return tuple(pieces[::2])


def _group_text(key: tuple[str, ...], numbers: Sequence[str]) -> str:
    if len(key) == 1:
        return key[0]
    runs: list[list[str]] = []
    for number in numbers:
        # What a range starting at runs[-1][0] would count next, with its padding.
        if runs and number == f"{int(runs[-1][-1]) + 1:0{len(runs[-1][0])}d}":
            runs[-1].append(number)
        else:
            runs.append([number])
    inner = ",".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    before, after = key
    return f"{before}[{inner}]{after}" if len(numbers) > 1 else f"{before}{inner}{after}"
