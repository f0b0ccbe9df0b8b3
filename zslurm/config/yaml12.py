"""YAML with the scalars of YAML 1.2's core schema, and the line that each value came from.

PyYAML resolves scalars by YAML 1.1: `24:00:00` becomes 86400, `no` becomes False, `010` becomes 8 and `8e12`
stays a word. Each of these has cost somebody a cluster job. Here the core schema decides: `24:00:00` and `no`
are words, `010` is ten, `8e12` is a number. Only mappings, sequences and scalars are built: tags are refused.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from yaml.error import MarkedYAMLError

from zslurm.core.errors import ConfigError, NotFound

STDIN = Path("-")

Key = str | int
KeyPath = tuple[Key, ...]

# Nobody means more; Python itself refuses to print integers of thousands of digits.
MAX_DIGITS = 400
_INTEGER = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITY = re.compile(r"[-+]?\.(inf|Inf|INF)")
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}


@dataclass(frozen=True)
class Document:
    """A parsed file: its data, and the 1-based line of every key path in it."""

    data: Any
    lines: dict[KeyPath, int]


def plain_scalar(text: str) -> Any:
    """The value of an unquoted scalar by YAML 1.2's core schema.

    Raises:
        ValueError: an integer of more than MAX_DIGITS digits.
    """
    if text in _WORDS:
        return _WORDS[text]
    if len(text) > MAX_DIGITS and (_INTEGER.fullmatch(text) or _OCTAL.fullmatch(text) or _HEX.fullmatch(text)):
        raise ValueError(f"a number of more than {MAX_DIGITS} digits")
    if _INTEGER.fullmatch(text):
        return int(text, 10)
    if _OCTAL.fullmatch(text):
        return int(text, 8)
    if _HEX.fullmatch(text):
        return int(text, 16)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _INFINITY.fullmatch(text):
        return float(text.replace(".", ""))
    return text


class _Loader(yaml.BaseLoader):
    """Composes nodes without resolving scalars; a tag would be a request to build something else."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag is not None:
            raise MarkedYAMLError(None, None, "tags are not supported", event.start_mark)  # type: ignore[arg-type]
        return super().compose_node(parent, index)


def _build(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], name: str, open_ids: frozenset[int]) -> Any:
    line = node.start_mark.line + 1
    lines.setdefault(path, line)
    if id(node) in open_ids:
        raise ConfigError(f"{name}:{line}: an alias refers to the mapping or list that it stands in")
    if isinstance(node, yaml.ScalarNode):
        if node.style in ("'", '"', "|", ">"):
            return node.value
        try:
            return plain_scalar(node.value)
        except ValueError as error:
            raise ConfigError(f"{name}:{line}: {error}") from error
    inside = open_ids | {id(node)}
    if isinstance(node, yaml.SequenceNode):
        return [_build(item, (*path, i), lines, name, inside) for i, item in enumerate(node.value)]
    assert isinstance(node, yaml.MappingNode)
    mapping: dict[Key, Any] = {}
    for key_node, value_node in node.value:
        key_line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{name}:{key_line}: a key must be a word, not a list or a mapping")
        key = key_node.value
        if key in mapping:
            raise ConfigError(f"{name}:{key_line}: the key {json.dumps(key)} stands here a second time; keep one")
        lines[(*path, key)] = key_line
        mapping[key] = _build(value_node, (*path, key), lines, name, inside)
    return mapping


def parse(text: str, name: str) -> Document:
    """Parse one YAML document.

    Args:
        text: the document.
        name: what error messages call it (a path, or `--set`).

    Raises:
        ConfigError: not YAML, more than one document, a tag, a duplicate key, or a self-referring alias.
    """
    try:
        return _parse(text, name)
    except RecursionError as error:
        raise ConfigError(f"{name}: not valid YAML: lists or mappings are nested too deeply") from error


def _parse(text: str, name: str) -> Document:
    try:
        node = yaml.compose(text, Loader=_Loader)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line if mark else 0
        shown = text.splitlines()[line].strip() if line < len(text.splitlines()) else "end of file"
        raise ConfigError(
            f"{name}:{line + 1}: not valid YAML: {error.problem or error.context}: {shown}"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from error
    lines: dict[KeyPath, int] = {}
    if node is None:
        return Document(None, lines)
    return Document(_build(node, (), lines, name, frozenset()), lines)


def called(path: Path) -> str:
    """What messages and origins call a file."""
    return "standard input" if path == STDIN else str(path)


def read(path: Path) -> Document:
    """Parse the file at `path`; `-` is standard input.

    Raises:
        NotFound: there is no such file.
        ConfigError: it cannot be read, is not UTF-8, or is not valid YAML.
    """
    try:
        text = sys.stdin.read() if path == STDIN else path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise NotFound(f"{path}: no such file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    return parse(text, called(path))
