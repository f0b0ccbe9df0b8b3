"""Sweeps: one run for each combination of values, each with a name that shows which."""

from __future__ import annotations

import itertools
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zslurm.checkpoint_tools.quantities import counted
from zslurm.config.layers import Override, parse_path, show_path
from zslurm.core.errors import ConfigError
from zslurm.core.paths import LONGEST_NAME

_PAIRS = {"[": "]", "{": "}", "(": ")"}


@dataclass(frozen=True)
class SweepMember:
    """One run of a sweep.

    Attributes:
        suffix: what its name ends in.
        overrides: what differs in it.
        values: the same as text, by key, for tables.
    """

    suffix: str
    overrides: tuple[Override, ...]
    values: dict[str, str]


def members(sweeps: Sequence[str], list_file: Path | None) -> list[SweepMember]:
    """Return the members of a sweep.

    Args:
        sweeps: `KEY=VALUE,VALUE,...`; several give every combination, the last one running fastest.
        list_file: a file with one member in each line, `KEY=VALUE KEY=VALUE ...`; combined with `sweeps`.

    Raises:
        ConfigError: not of that form, or two members are the same.
    """
    axes = [_axis(text) for text in sweeps]
    lines = _lines(list_file) if list_file is not None else [()]
    combined = [(*line, *chosen) for line in lines for chosen in itertools.product(*axes)]
    if repeated := [" ".join(settings) for settings, count in Counter(combined).items() if count > 1]:
        raise ConfigError(f"the sweep has {repeated[0]} twice; each member must be another run")
    return [_member(*combination) for combination in zip(_suffixes(combined), combined, strict=True)]


def _member(suffix: str, settings: tuple[str, ...]) -> SweepMember:
    overrides = tuple(map(Override.parse, settings))
    texts = (setting.partition("=")[2] for setting in settings)
    return SweepMember(
        suffix, overrides, dict(zip((show_path(override.path) for override in overrides), texts, strict=True))
    )


def _axis(given: str) -> list[str]:
    key, equals, values = given.partition("=")
    parts = split_values(values)
    if not equals or not parse_path(key) or "" in parts:
        raise ConfigError(f"--sweep {given}: expected KEY=VALUE,VALUE,..., such as optim.adam_lr=1e-3,3e-4")
    return [f"{key}={value}" for value in parts]


def split_values(text: str) -> list[str]:
    """Split at commas, but not inside brackets or quotes: `[1,2],[3,4]` is two values."""
    parts: list[str] = [""]
    closing: list[str] = []
    quote = ""
    for character in text:
        if character == "," and not closing and not quote:
            parts.append("")
            continue
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in _PAIRS:
            closing.append(_PAIRS[character])
        elif closing and character == closing[-1]:
            closing.pop()
        parts[-1] += character
    return [word.strip() for word in parts]


def _lines(file: Path) -> list[tuple[str, ...]]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or 'not text'}") from error
    lines = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            words = tuple(shlex.split(line, comments=True))
        except ValueError as error:
            raise ConfigError(f"{file}:{number}: {error}") from error
        for word in words:
            key, equals, _ = word.partition("=")
            if not equals or not parse_path(key):
                raise ConfigError(f"{file}:{number}: expected KEY=VALUE KEY=VALUE ..., got `{word}`")
        if words:
            lines.append(words)
    if not lines:
        raise ConfigError(f"{file}: no members; each line is one: KEY=VALUE KEY=VALUE ...")
    return lines


def _suffixes(combined: Sequence[tuple[str, ...]]) -> list[str]:
    """Return a readable end of each name: the keys' last words and the values; numbers if that is too long."""
    keys = {setting.partition("=")[0] for settings in combined for setting in settings}
    last_words = {
        key: _clean([key_part for key_part in parse_path(key) if isinstance(key_part, str)][-1]) for key in keys
    }
    counts = Counter(last_words.values())
    names = {key: word if counts[word] == 1 else _clean(key) for key, word in last_words.items()}
    suffixes = ["".join("-" + _part(names, setting) for setting in settings) for settings in combined]
    if len(set(suffixes)) == len(suffixes) and max(map(len, suffixes)) <= LONGEST_NAME // 2:
        return suffixes
    return [f"-{number:03d}" for number in range(1, len(combined) + 1)]


def _part(names: dict[str, str], setting: str) -> str:
    key, _, value = setting.partition("=")
    cleaned = _clean(value)
    return names[key] + ("" if cleaned[:1].isdigit() else "-") + cleaned


def _clean(text: str) -> str:
    if re.fullmatch(r"[+-]?[0-9.]+(e[+-]?[0-9]+)?", text, re.IGNORECASE):
        return text.strip("+")
    return re.sub(r"[^A-Za-z0-9.]+", "_", text.replace("+", "")).strip("_")


def member_name(base: str, member: SweepMember) -> str:
    """Return the name of a member's run.

    Raises:
        ConfigError: it would be too long.
    """
    name = base + member.suffix
    if len(name) > LONGEST_NAME:
        raise ConfigError(
            f"run.name: {name} has {counted(len(name), 'character')}, {LONGEST_NAME} are permitted; give the run "
            "a shorter name"
        )
    return name
